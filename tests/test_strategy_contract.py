"""What scripts expect of Lightning's strategies holds for these: before their set-up, and for errors they catch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import run_ranks, values
from lightning.fabric import Fabric
from lightning.pytorch import Trainer

from lightning_accelpact import FabricHSDPStrategy, ResilientHSDPStrategy

both = pytest.mark.parametrize("strategy_class", [ResilientHSDPStrategy, FabricHSDPStrategy])


@both
def test_collectives_before_the_set_up_are_those_of_one_process(strategy_class: type) -> None:
    strategy = strategy_class()
    reduce = getattr(strategy, "reduce", None) or strategy.all_reduce
    tensor = torch.tensor([1.0, 2.0])
    strategy.barrier("before")
    assert strategy.broadcast({"path": "here"}, src=0) == {"path": "here"}
    assert strategy.all_gather(tensor) is tensor
    assert reduce(tensor) is tensor
    assert reduce(3.0) == 3.0
    assert tensor.tolist() == [1.0, 2.0]


def test_trainer_knows_its_log_dir_before_the_fit(tmp_path: Path) -> None:
    trainer = Trainer(strategy=ResilientHSDPStrategy(), accelerator="cpu", logger=False, default_root_dir=tmp_path)
    assert trainer.log_dir == str(tmp_path)


def test_trainer_checkpoint_that_cannot_be_written_says_why_before_the_set_up(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    strategy = ResilientHSDPStrategy(save_distributed_checkpoint=False)
    with pytest.raises(TypeError, match="storage_options"):
        strategy.save_checkpoint({}, tmp_path / "new", storage_options={})
    with pytest.raises(IsADirectoryError, match="exists and is a directory"):
        strategy.save_checkpoint({}, tmp_path)


def test_saving_leaves_the_callers_checkpoint_complete(tmp_path: Path) -> None:
    checkpoint = {"state_dict": {"weight": torch.ones(2)}, "optimizer_states": [], "epoch": 1}
    ResilientHSDPStrategy().save_checkpoint(checkpoint, tmp_path / "folder")
    assert set(checkpoint) == {"state_dict", "optimizer_states", "epoch"}
    assert torch.load(tmp_path / "folder" / "meta.pt") == {"epoch": 1}


def test_trainer_checkpoint_is_searched_for_before_the_set_up(tmp_path: Path) -> None:
    strategy = ResilientHSDPStrategy()
    strategy.model = torch.nn.Linear(1, 1)
    strategy._lightning_module = type("Module", (), {"strict_loading": True})()
    with pytest.raises(ValueError, match="distributed model"):  # reached, and it is Lightning's own answer
        strategy.load_checkpoint(tmp_path)


def test_fabric_checkpoint_without_a_model_is_refused_before_the_set_up(tmp_path: Path) -> None:
    strategy = FabricHSDPStrategy()
    with pytest.raises(ValueError, match="Could not find a distributed model"):
        strategy.save_checkpoint(tmp_path, {})
    with pytest.raises(ValueError, match="state=None"):
        strategy.load_checkpoint(tmp_path)


def errors_caught(folder: str) -> dict[str, Any]:
    """Errors of saving and loading that the script catches, on all ranks, between two updates."""
    fabric = Fabric(strategy=FabricHSDPStrategy(goodput=False), accelerator="cpu", devices=2)
    fabric.launch()
    model = fabric.setup(torch.nn.Linear(2, 2))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))

    def update() -> None:
        fabric.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()

    fabric.strategy.run_update(update)
    path = Path(folder) / "checkpoint"
    fabric.save(path, {"model": model})
    caught = []
    for operation in (
        lambda: fabric.load(path, {"model": model, "not in it": 1}),
        lambda: fabric.save(path, {"model": model}, filter={"model": lambda name, value: True}),
    ):
        try:
            operation()
        except (KeyError, NotImplementedError) as error:
            caught.append(type(error).__name__)
    fabric.load(path, {"model": model, "not in it": 1}, strict=False)
    fabric.strategy.run_update(update)
    fabric.strategy.finish()
    return {"caught": caught, "updates": fabric.strategy.committed_updates, "incidents": fabric.strategy.incidents}


def test_fabric_goes_on_after_an_error_of_a_checkpoint_that_the_script_catches(tmp_path: Path) -> None:
    for result in values(run_ranks(errors_caught, 2, str(tmp_path))):
        assert result == {"caught": ["KeyError", "NotImplementedError"], "updates": 2, "incidents": []}


def error_not_caught(folder: str) -> None:
    """Only rank 1 cannot load, and does not catch it."""
    fabric = Fabric(strategy=FabricHSDPStrategy(goodput=False), accelerator="cpu", devices=2)
    fabric.launch()
    model = fabric.setup(torch.nn.Linear(2, 2))
    fabric.save(Path(folder) / "checkpoint", {"model": model})
    try:
        fabric.load(Path(folder) / "checkpoint", {"model": model} if fabric.global_rank == 0 else None)
    except ValueError as error:
        fabric.strategy.on_exception(error)  # as the interpreter's hook does for an error that nobody catches
        raise


def test_fabric_error_of_a_checkpoint_that_nobody_catches_ends_the_run_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(error_not_caught, 2, str(tmp_path), timeout=60.0)
    assert second.exit_code == 1 and "state=None" in second.error
    assert first.exit_code == 86
    assert "rank 1 stopped: ValueError" in first.output + first.error
