"""Where the callback puts the time of a real fit, and what it shows of it."""

# ruff: noqa: F811 - fixtures are imported by name

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from clocked import (  # noqa: F401
    Clock,
    FaultyModel,
    Model,
    Strategy,
    clock,
    loader,
    model,
    nonzero,
    startup_is_counted_already,
    strategy,
    trainer_for,
)
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, TQDMProgressBar

import lightning_accelpact.callback as callback_module
from lightning_accelpact.callback import GoodputCallback
from lightning_accelpact.goodput import TimeClass


def test_every_second_goes_to_its_class(model: Model, strategy: Strategy, clock: Clock, tmp_path: Path) -> None:
    callback, saver = GoodputCallback(), ModelCheckpoint(dirpath=tmp_path)
    clock.wait(3)
    trainer = trainer_for(strategy, callback, saver, num_sanity_val_steps=1, enable_checkpointing=True)
    trainer.fit(model, loader(model), loader(model))
    assert nonzero(callback) == {
        TimeClass.PROGRAM_STARTUP: 3,
        TimeClass.INITIALIZATION: 1,
        TimeClass.TRAINING_PREP: 2 + 0.25,
        TimeClass.DATA_LOADING: 4 * 0.5 + 0.25,
        TimeClass.PRODUCTIVE: 4 * 8,
        # One batch of the sanity check, four of the validation
        TimeClass.EVALUATION: 5 * 4.5,
        TimeClass.CHECKPOINT_SAVE: 16,
    }
    assert callback.summary.wall_s == clock.now
    assert callback.summary.updates == 4


def test_a_checkpoint_at_the_end_of_training_is_in_the_summary(
    model: Model, strategy: Strategy, clock: Clock, tmp_path: Path
) -> None:
    callback = GoodputCallback()
    saver = ModelCheckpoint(dirpath=tmp_path, save_last=True, every_n_train_steps=100)
    trainer = trainer_for(strategy, callback, saver, enable_checkpointing=True)
    trainer.fit(model, loader(model))
    assert Path(saver.last_model_path).exists()
    assert callback.summary.totals[TimeClass.CHECKPOINT_SAVE] == 16
    assert callback.summary.wall_s == clock.now


def test_it_works_under_any_other_strategy(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    callback = GoodputCallback()
    trainer_for("auto", callback, enable_progress_bar=True).fit(model, loader(model))
    assert callback.summary.updates == 4
    assert callback.summary.totals[TimeClass.PRODUCTIVE] > 0
    assert sum(callback.summary.totals.values()) == pytest.approx(callback.summary.elapsed_s)
    assert "4 updates committed" in capsys.readouterr().out


def test_startup_is_counted_once_in_a_process(model: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GoodputCallback, "_startup_counted", False)
    monkeypatch.setattr(callback_module, "process_age", lambda: clock.now + 100)

    def startup() -> float:
        callback, strategy = GoodputCallback(), Strategy(clock)
        trainer_for(strategy, callback).fit(model, loader(model))
        return callback.summary.totals[TimeClass.PROGRAM_STARTUP]

    clock.wait(7)
    assert [startup(), startup()] == [107, 0]


def test_the_committed_frontier_is_the_strategys(model: Model, strategy: Strategy) -> None:
    strategy.committed_updates = 0
    model.on_before_zero_grad = lambda optimizer: setattr(strategy, "committed_updates", 3 * model.trainer.global_step)
    callback = GoodputCallback()
    trainer_for(strategy, callback).fit(model, loader(model))
    assert callback.summary.updates == strategy.committed_updates > 4


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_slow_first_update_is_not_typical(strategy: Strategy, clock: Clock, accumulate: int) -> None:
    class SlowStart(Model):
        def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.clock.wait(0 if self.trainer.global_step else 100)

    callback, model = GoodputCallback(), SlowStart(clock)
    trainer = trainer_for(strategy, callback, accumulate_grad_batches=accumulate, max_epochs=2)
    trainer.fit(model, loader(model))
    assert callback.summary.update_s == 8 * accumulate


def test_a_failed_gathering_leaves_the_local_rank(model: Model, strategy: Strategy) -> None:
    strategy.gather_json = lambda record: None
    callback = GoodputCallback()
    trainer_for(strategy, callback).fit(model, loader(model))
    assert callback.summary.ranks == 1


class Peer(Strategy):
    """Passes for rank 3, which prints nothing."""

    is_global_zero = False
    global_rank = 3


@pytest.mark.parametrize(
    ("kind", "options", "printed"),
    [(Strategy, {}, 1), (Strategy, {"print_summary": False}, 0), (Peer, {}, 0)],
)
def test_rank_0_prints_the_summary_if_it_is_wanted(
    model: Model, clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    kind: type[Strategy], options: dict[str, Any], printed: int,
) -> None:  # fmt: skip
    callback = GoodputCallback(log_dir=tmp_path, **options)
    trainer = trainer_for(kind(clock), callback)
    trainer.fit(model, loader(model))
    assert capsys.readouterr().out.count("Goodput ") == printed
    assert [path.name for path in tmp_path.iterdir()] == [f"goodput-rank{trainer.global_rank}.jsonl"]


@pytest.mark.parametrize("bar", [RichProgressBar, TQDMProgressBar])
def test_the_summary_comes_after_the_last_bar(
    model: Model, strategy: Strategy, capsys: pytest.CaptureFixture[str], bar: type
) -> None:
    trainer_for(strategy, GoodputCallback(), bar(), enable_progress_bar=True).fit(model, loader(model))
    output = capsys.readouterr().out
    assert 0 <= output.rindex("Epoch") < output.index("Goodput ")


@pytest.mark.parametrize("method", ["validate", "test"])
def test_only_a_fit_is_summarised(
    model: Model, strategy: Strategy, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    model.test_step = model.validation_step
    callback = GoodputCallback()
    getattr(trainer_for(strategy, callback), method)(model, loader(model), verbose=False)
    assert "Goodput" not in capsys.readouterr().out
    assert callback.summary is None


def test_an_error_after_the_fit_does_not_print_it_twice(
    model: Model, strategy: Strategy, capsys: pytest.CaptureFixture[str]
) -> None:
    def teardown(stage: str) -> None:
        raise RuntimeError("disk removed")

    model.teardown = teardown
    with pytest.raises(RuntimeError, match="disk removed"):
        trainer_for(strategy, GoodputCallback()).fit(model, loader(model))
    assert capsys.readouterr().out.count("Goodput ") == 1


def test_the_bar_shows_the_live_goodput(model: Model, strategy: Strategy) -> None:
    seen = []
    model.on_train_batch_end = lambda *_: seen.append(model.trainer.progress_bar_metrics["goodput"])
    trainer = trainer_for(strategy, GoodputCallback(), TQDMProgressBar(), enable_progress_bar=True)
    trainer.fit(model, loader(model))
    # 1 + 2 s before training, then 0.5 s for a batch and 8 s in the step
    assert seen == pytest.approx([8 * batch / (3 + 8.5 * batch) for batch in (1, 2, 3, 4)])
    assert "goodput" not in trainer.logged_metrics


def test_the_live_goodput_is_renewed_once_a_second(strategy: Strategy, clock: Clock) -> None:
    class QuickModel(Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            clock.wait(0.1)
            return self.layer(batch).sum()

    seen = []
    model = QuickModel(clock)
    model.on_train_batch_end = lambda *_: seen.append(model.trainer.progress_bar_metrics["goodput"])
    trainer_for(strategy, GoodputCallback(), TQDMProgressBar(), enable_progress_bar=True).fit(model, loader(model))
    first, third = 0.1 / 3.6, 0.3 / 4.8
    assert seen == pytest.approx([first, first, third, third])


@pytest.mark.parametrize(("option", "bar"), [(False, True), (True, False)])
def test_without_option_or_bar_nothing_is_logged(model: Model, strategy: Strategy, option: bool, bar: bool) -> None:
    callback = GoodputCallback(progress_bar_metric=option, print_summary=False)
    trainer = trainer_for(strategy, callback, enable_progress_bar=bar)
    trainer.fit(model, loader(model))
    assert "goodput" not in trainer.callback_metrics
    assert "loss" in trainer.callback_metrics


class CountingStrategy(Strategy):
    """Counts the collectives that Lightning asks for."""

    # Else Lightning leaves out the reduction of logged values
    is_distributed = True

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.calls: Counter[str] = Counter()

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self.calls["barrier"] += 1

    def broadcast(self, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls["broadcast"] += 1
        return obj

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls["reduce"] += 1
        return tensor

    def all_gather(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls["all_gather"] += 1
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        self.calls["reduce_boolean_decision"] += 1
        return decision


def test_it_adds_no_collective(clock: Clock, tmp_path: Path) -> None:
    def calls(*callbacks: GoodputCallback) -> Counter[str]:
        strategy, model = CountingStrategy(clock), FaultyModel(clock, 1)
        saver = ModelCheckpoint(dirpath=tmp_path / str(len(callbacks)))
        options = {"enable_progress_bar": True, "enable_checkpointing": True, "use_distributed_sampler": False}
        trainer = trainer_for(strategy, saver, *callbacks, **options)
        trainer.fit(model, loader(model), loader(model))
        return strategy.calls

    plain = calls()
    assert plain["barrier"] > 0
    assert calls(GoodputCallback()) == plain


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf")])
def test_impossible_restart_seconds_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match=f"restart_seconds must be .* at least 0, got {seconds!r}; leave it None"):
        GoodputCallback(restart_seconds=seconds)


def test_options_are_keyword_only() -> None:
    with pytest.raises(TypeError):
        GoodputCallback(False)
