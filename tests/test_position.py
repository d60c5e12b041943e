"""What a checkpoint keeps of a rank's position, and the private attributes of Lightning that this takes."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torchmetrics import CatMetric, MeanMetric

from lightning_accelpact import logged, position
from lightning_accelpact.position import Moment, Position, obstacle
from lightning_accelpact.recovery.window import RngState


def draws() -> tuple[float, ...]:
    return (torch.rand(()).item(), random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn())


def test_every_generator_goes_through_a_file(tmp_path: Path) -> None:
    draws()
    kept = position._plain(RngState.capture())
    wanted = draws(), draws()
    torch.save(kept, tmp_path / "kept.pt")
    read = torch.load(tmp_path / "kept.pt", weights_only=True)
    position._generators(read).restore()
    assert (draws(), draws()) == wanted


class Net(pl.LightningModule):
    """A buffer, metrics of two kinds, and a value that is logged over the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.norm = nn.BatchNorm1d(1)
        self.mean, self.all = MeanMetric(), CatMetric()
        self.epoch_ends: dict[int, dict[str, str]] = {}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.norm(self.linear(batch)).square().mean() + self.linear(batch).mean() * random.random()
        self.mean.update(loss.detach())
        self.all.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("most", loss.detach(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("least", loss.detach(), on_step=False, on_epoch=True, reduce_fx=min)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        shown = self.trainer.callback_metrics
        self.epoch_ends[self.trainer.global_step] = {name: repr(value.item()) for name, value in shown.items()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.arange(24.0).view(12, 2), batch_size=2, shuffle=True)


class Validated(Net):
    """Its validation draws, too, and its metric decides on the learning rate's future."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", self.linear(batch).mean() + torch.rand(()))

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.arange(8.0).view(4, 2), batch_size=2, shuffle=True)


class Drawn(torch.utils.data.Dataset):
    """Its items are drawn anew each time."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(2) + index


class Augmented(Net):
    """Loads with a worker, which draws."""

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Drawn(), batch_size=2, shuffle=True, num_workers=1)


class Keeps(pl.Callback):
    """Puts a position into Lightning's own checkpoint, as the strategy does beside it."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong
        self.position: Position | None = None
        self.moments: list[tuple[Moment, str]] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.position = Position(trainer)

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.moments.append((Moment.of(checkpoint["loops"]), obstacle(trainer, checkpoint)))
        checkpoint["position"] = self.position.capture()

    def on_load_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        state = copy.deepcopy(checkpoint["position"])
        module.norm.running_mean.fill_(7.0)  # as another rank's would be
        if self.wrong:
            other = copy.deepcopy(state[self.wrong])
            state[self.wrong] = {**other, "torch_cpu": torch.Generator().manual_seed(5).get_state()}
        self.position.resume(state, checkpoint["loops"])


def fit(
    folder: Path,
    *,
    resume: Path | None = None,
    updates: int = 14,
    wrong: str = "",
    net: type[Net] = Net,
    trainer_options: dict[str, Any] | None = None,
    **saves: Any,
) -> tuple[dict[str, Any], Keeps]:
    """Train in this process; everything that it has come to."""
    pl.seed_everything(3, verbose=False)
    module, keeps = net(), Keeps(wrong)
    saver = ModelCheckpoint(
        **{"dirpath": folder, "filename": "{step}", "save_top_k": -1, "every_n_train_steps": 2, **saves}
    )
    trainer = pl.Trainer(
        **{"accelerator": "cpu", "devices": 1, "max_steps": updates, "logger": False, "enable_progress_bar": False,
           "enable_model_summary": False, "callbacks": [keeps, saver], "default_root_dir": folder,
           **(trainer_options or {})}
    )  # fmt: skip
    trainer.fit(module, ckpt_path=resume, weights_only=True)
    outcome = {
        "weights": [value.tolist() for value in module.state_dict().values()],
        "mean": repr(module.mean.compute().item()),
        "all": module.all.compute().tolist(),
        "logged": {name: repr(value.item()) for name, value in trainer.callback_metrics.items()},
        "drawn": draws(),
        "epoch": trainer.current_epoch,
        "step": trainer.global_step,
        "epoch_ends": module.epoch_ends,
        "saved": sorted(path.name for path in folder.glob("*.ckpt")),
    }
    return outcome, keeps


def assert_the_same(resumed: dict[str, Any], whole: dict[str, Any], name: str = "") -> None:
    """The end of both, and the ends of the epochs in both."""
    both = resumed["epoch_ends"].keys() & whole["epoch_ends"].keys()
    assert both or len(whole["epoch_ends"]) == 0, name
    ends = {update: whole["epoch_ends"][update] for update in both}
    assert {**resumed, "saved": []} == {**whole, "saved": [], "epoch_ends": ends}, name


@pytest.mark.parametrize("update", [2, 4, 6, 8, 10, 12])
def test_a_fit_goes_on_as_if_it_had_not_ended(update: int, tmp_path: Path) -> None:
    """6 batches an epoch: within the first, at its end, within the second, at its end."""
    whole, _ = fit(tmp_path / "whole")
    resumed, _ = fit(tmp_path / "resumed", resume=tmp_path / "whole" / f"step={update}.ckpt")
    assert resumed["saved"] == [name for name in whole["saved"] if int(name[5:-5]) > update]
    assert_the_same(resumed, whole)


def test_the_check_can_fail(tmp_path: Path) -> None:
    whole, _ = fit(tmp_path / "whole")
    for wrong in ("generators", "iterated_with"):
        resumed, _ = fit(tmp_path / wrong, resume=tmp_path / "whole" / "step=8.ckpt", wrong=wrong)
        assert resumed["weights"] != whole["weights"], wrong


EVERY_EPOCH = {"every_n_train_steps": 0, "every_n_epochs": 1}
# Options of the Trainer and of its ModelCheckpoint, and the moments at which that writes; an epoch has 6 batches
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], set[Moment]]] = {
    "before validations": ({"val_check_interval": 3}, {"every_n_train_steps": 3}, {Moment.BATCH_END}),
    "between validations": ({"val_check_interval": 4}, {"every_n_train_steps": 3}, {Moment.BATCH_END}),
    "after validations": ({"val_check_interval": 3}, {**EVERY_EPOCH, "monitor": "val"}, {Moment.VALIDATION_END}),
    "after the epoch's validation": (
        {}, {**EVERY_EPOCH, "save_on_train_epoch_end": False}, {Moment.VALIDATION_END},
    ),
    "after an epoch with validation": ({}, {**EVERY_EPOCH, "save_on_train_epoch_end": True}, {Moment.EPOCH_END}),
    "validated across epochs": (
        {"val_check_interval": 4, "check_val_every_n_epoch": None}, {"every_n_train_steps": 2}, {Moment.BATCH_END},
    ),
    "accumulating": (
        {"accumulate_grad_batches": 2, "val_check_interval": 4}, {"every_n_train_steps": 2}, {Moment.BATCH_END},
    ),
    "an end by epochs": ({"max_steps": -1, "max_epochs": 3}, {"every_n_train_steps": 3}, {Moment.BATCH_END}),
    "an end by epochs, after them": (
        {"max_steps": -1, "max_epochs": 3}, {**EVERY_EPOCH, "save_on_train_epoch_end": True}, {Moment.EPOCH_END},
    ),
    "epochs cut short": ({"limit_train_batches": 5}, {"every_n_train_steps": 3}, {Moment.BATCH_END}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_fit_goes_on_from_each_of_its_checkpoints(case: str, tmp_path: Path) -> None:
    options, saves, moments = CASES[case]
    whole, keeps = fit(tmp_path / "whole", net=Validated, trainer_options=options, **saves)
    assert {moment for moment, why in keeps.moments if not why} == moments
    assert len(whole["saved"]) == len(keeps.moments) > 1
    final = f"step={whole['step']}.ckpt"
    for name in set(whole["saved"]) - {final}:  # from that nothing is left to do
        path = tmp_path / "whole" / name
        resumed, _ = fit(tmp_path / name, resume=path, net=Validated, trainer_options=options, **saves)
        assert_the_same(resumed, whole, name)
        later = [one for one in whole["saved"] if int(one[5:-5]) > int(name[5:-5])]
        assert resumed["saved"] == later, name  # the one that it has gone on from is not written again


@pytest.mark.parametrize("update", [4, 8])
def test_workers_draw_the_same(update: int, tmp_path: Path) -> None:
    whole, _ = fit(tmp_path / "whole", net=Augmented, updates=10, every_n_train_steps=4)
    resumed, _ = fit(tmp_path / "resumed", net=Augmented, updates=10, resume=tmp_path / "whole" / f"step={update}.ckpt")
    assert_the_same(resumed, whole)


@pytest.mark.parametrize("update", [6, 12])
def test_a_fit_goes_on_after_an_epoch(update: int, tmp_path: Path) -> None:
    epochs = {"every_n_train_steps": 0, "every_n_epochs": 1, "save_on_train_epoch_end": True}
    whole, _ = fit(tmp_path / "whole", **epochs)
    resumed, _ = fit(tmp_path / "resumed", resume=tmp_path / "whole" / f"step={update}.ckpt", **epochs)
    assert_the_same(resumed, whole)


def test_another_loader_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(tmp_path / "whole", updates=4)
    monkeypatch.setattr(
        Net, "train_dataloader", lambda self: torch.utils.data.DataLoader(torch.ones(6, 2), batch_size=2)
    )
    with pytest.raises(MisconfigurationException, match="after batch 4 of an epoch, but the train loader ends after 3"):
        fit(tmp_path / "resumed", resume=tmp_path / "whole" / "step=4.ckpt")


class Remembering(torch.utils.data.DataLoader):
    """A loader with a state, as torchdata's: the next iteration begins where the one that was saved stood."""

    place = start = 0

    def __iter__(self) -> Any:
        batches, self.start, self.place = super().__iter__(), 0, self.start
        for _ in range(self.place):
            next(batches)
        return self._counted(batches)

    def _counted(self, batches: Any) -> Any:
        for batch in batches:
            self.place += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["place"] % len(self)


@pytest.mark.parametrize("update", [2, 6, 8])
def test_a_loader_with_a_state_is_left_to_itself(update: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.arange(24.0).view(12, 2)
    monkeypatch.setattr(Net, "train_dataloader", lambda self: Remembering(data, batch_size=2))
    epochs = {"every_n_train_steps": 0, "every_n_epochs": 1, "save_on_train_epoch_end": True} if update == 6 else {}
    whole, _ = fit(tmp_path / "whole", **epochs)
    resumed, _ = fit(tmp_path / "resumed", resume=tmp_path / "whole" / f"step={update}.ckpt", **epochs)
    assert_the_same(resumed, whole)


def test_some_loaders_with_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.arange(24.0).view(12, 2)
    loaders = {"a": Remembering(data, batch_size=2), "b": torch.utils.data.DataLoader(data, batch_size=2)}
    monkeypatch.setattr(Net, "train_dataloader", lambda self: loaders)
    plain = Net.training_step
    monkeypatch.setattr(Net, "training_step", lambda self, batch, index: plain(self, batch["a"] + batch["b"], index))
    _, keeps = fit(tmp_path, updates=2)
    assert keeps.moments == [
        (Moment.BATCH_END, "it was written within an epoch, and only some of the loaders have a state")
    ]


def test_moments(tmp_path: Path) -> None:
    _, keeps = fit(tmp_path / "batches", updates=12, every_n_train_steps=6)
    assert keeps.moments == [(Moment.BATCH_END, "")] * 2
    _, keeps = fit(
        tmp_path / "epochs", updates=12, every_n_train_steps=0, every_n_epochs=1, save_on_train_epoch_end=True
    )
    assert keeps.moments == [(Moment.EPOCH_END, "")] * 2


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        ("on_train_batch_start", "neither at the end of a batch"),
        ("on_train_epoch_start", "neither at the end of a batch"),
    ],
)
def test_elsewhere(hook: str, said: str, tmp_path: Path) -> None:
    class Saves(Keeps):
        pass

    keeps = Saves()
    setattr(keeps, hook, lambda trainer, *_: trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt"))
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=3, logger=False, enable_progress_bar=False,
                         enable_model_summary=False, callbacks=[keeps], default_root_dir=tmp_path,
                         enable_checkpointing=False)  # fmt: skip
    trainer.fit(Net())
    assert keeps.moments
    for moment, why in keeps.moments:
        assert moment is Moment.ELSEWHERE
        assert said in why


def test_in_the_middle_of_an_update(tmp_path: Path) -> None:
    keeps = Keeps()
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=2, accumulate_grad_batches=3, logger=False,
                         enable_progress_bar=False, enable_model_summary=False, callbacks=[keeps],
                         enable_checkpointing=False, default_root_dir=tmp_path)  # fmt: skip
    keeps.on_train_batch_end = lambda *_: trainer.save_checkpoint(tmp_path / "x.ckpt")
    trainer.fit(Net())
    said = "it was written in the middle of an update, whose gradients it does not hold"
    assert keeps.moments == [(Moment.BATCH_END, why) for why in (said, said, "", said, said, "")]


def test_weights_alone(tmp_path: Path) -> None:
    assert (
        obstacle(pl.Trainer(accelerator="cpu", logger=False), {}) == "it holds weights alone (save_weights_only=True)"
    )


@pytest.mark.parametrize(
    ("named", "chosen", "restored"),
    [
        (None, None, None),
        (None, "newest", "newest"),
        ("mine", "mine", "mine"),
        ("hpc_ckpt_2.ckpt", "newest", "newest"),  # what Lightning finds on SLURM nobody has named
        ("hpc_ckpt_2.ckpt", None, "hpc_ckpt_2.ckpt"),
    ],
)
def test_who_chooses_the_checkpoint(
    named: str | None, chosen: str | None, restored: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hpc_ckpt_2.ckpt").touch()
    monkeypatch.setattr(position.SLURMEnvironment, "detect", lambda: True)
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, default_root_dir=tmp_path)
    connector, given, seen = trainer._checkpoint_connector, [], []
    monkeypatch.setattr(type(connector), "_restore_modules_and_callbacks", lambda self, path, weights=None: seen.append(path))

    def choose(path: Any) -> Any:
        given.append(path)
        return chosen

    position.choose_checkpoint(trainer, choose)
    path = str(tmp_path / named) if named and named.startswith("hpc") else named
    connector._restore_modules_and_callbacks(path)
    assert given == [named if named == "mine" else None]
    assert [one and Path(one).name for one in seen] == [restored]
    connector._restore_modules_and_callbacks("next")  # only the fit that begins is chosen for
    assert (seen[-1], len(given)) == ("next", 1)


def test_private_attributes(tmp_path: Path) -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, default_root_dir=tmp_path)
    fit_loop, connector = trainer.fit_loop, trainer._checkpoint_connector
    for owner, names in [
        (fit_loop, ("_load_combined_loader_states", "reset", "on_run_start", "_combined_loader", "restarting")),
        (fit_loop.epoch_loop, ("reset", "on_run_start", "advance", "_should_accumulate", "_on_before_fetch",
                               "_on_after_fetch", "batch_progress", "val_loop", "_results")),
        (trainer._logger_connector, (*logged._SHOWN, "_first_loop_iter")),
        (connector, ("_restore_modules_and_callbacks", "_hpc_resume_path")),
        (ModelCheckpoint(every_n_train_steps=2), ("_every_n_train_steps", "_last_global_step_saved")),
    ]:  # fmt: skip
        assert [name for name in names if not hasattr(owner, name)] == []
    loops = connector._get_loops_state_dict()["fit_loop"]
    for name in ("epoch_progress", "epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress"):
        for part in ("total", "current"):
            assert {"ready", "completed", "processed"} <= loops[name][part].keys()
