"""What the callback sends to the trainer's loggers, and when it asks the peers for it."""

# ruff: noqa: F811 - fixtures are imported by name

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from clocked import (  # noqa: F401
    Clock,
    FaultyModel,
    Model,
    Strategy,
    clock,
    loader,
    model,
    startup_is_counted_already,
    strategy,
    trainer_for,
)
from cluster import run_ranks, values
from jobs import Regressor
from lightning.pytorch.loggers import CSVLogger, Logger

from lightning_accelpact.callback import GoodputCallback
from lightning_accelpact.goodput.metric import GoodputMetric


class Recorder(Logger):
    """Keeps the goodput's rows, on every rank."""

    name, version = "recorder", 0

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.others: list[str] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "goodput" in metrics:
            self.rows.append((step, metrics))
        else:
            self.others += metrics

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.rows]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def test_every_logger_gets_the_goodput_so_far(model: Model, strategy: Strategy, recorder: Recorder) -> None:
    loggers = [recorder, Recorder()]
    callback = GoodputCallback(log_every_n_updates=2)
    trainer_for(strategy, callback, logger=loggers).fit(model, loader(model))
    # 1 + 2 s before training, then 0.5 s for a batch and 8 s in the step
    assert recorder.rows[:2] == [
        (step - 1, {"goodput": 8 * step / (3 + 8.5 * step), "goodput/elapsed_s": 3 + 8.5 * step, "goodput/incidents": 0,
                "goodput/productive_s": 8.0 * step, "goodput/initialization_s": 1, "goodput/training_prep_s": 2,
                "goodput/data_loading_s": 0.5 * step})
        for step in (2, 4)
    ]  # fmt: skip
    assert recorder.steps == [1, 3, 4]  # as Lightning counts: that of the last update's loss is 3
    assert loggers[1].rows == recorder.rows


def test_the_last_row_is_the_summary(
    model: Model, strategy: Strategy, recorder: Recorder, tmp_path: Path
) -> None:
    callback = GoodputCallback(log_every_n_updates=100)
    saver = pl.callbacks.ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=100)
    trainer_for(strategy, callback, saver, logger=recorder, enable_checkpointing=True).fit(model, loader(model))
    totals = {f"goodput/{cls.value}_s": seconds for cls, seconds in callback.summary.totals.items() if seconds}
    assert totals["goodput/checkpoint_save_s"] == 16
    (step, row) = recorder.rows[-1]
    assert (step, row) == (4, {"goodput": callback.summary.goodput, "goodput/incidents": 0, **totals,
                               "goodput/elapsed_s": callback.summary.elapsed_s})  # fmt: skip


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"log_every_n_steps": 3}, [2, 5, 8]),
        ({"log_every_n_steps": 50}, [8]),
        ({"log_every_n_steps": 1, "accumulate_grad_batches": 3}, [0, 1, 2, 3, 4]),
        ({"log_every_n_steps": 0}, []),
    ],
)
def test_by_default_it_follows_the_trainer(
    model: Model, strategy: Strategy, recorder: Recorder, options: dict[str, Any], steps: list[int]
) -> None:
    trainer_for(strategy, GoodputCallback(), logger=recorder, max_epochs=2, **options).fit(model, loader(model))
    assert recorder.steps == steps


@pytest.mark.parametrize(("every", "logging"), [(0, True), (1, False)])
def test_nobody_is_asked_for_what_is_not_logged(
    model: Model, strategy: Strategy, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, every: int, logging: bool
) -> None:
    monkeypatch.setattr(GoodputMetric, "compute", lambda self: pytest.fail("the peers were asked"))
    callback = GoodputCallback(log_every_n_updates=every)
    trainer_for(strategy, callback, logger=recorder if logging else False).fit(model, loader(model))
    assert callback.summary.updates == 4
    assert recorder.rows == []


def test_other_values_are_as_without_it(clock: Clock) -> None:
    def seen(every: int) -> tuple[Any, ...]:
        recorder, model = Recorder(), Model(clock)
        trainer = trainer_for(Strategy(clock), GoodputCallback(log_every_n_updates=every), logger=recorder)
        trainer.fit(model, loader(model))
        return recorder.others, sorted(trainer.logged_metrics), sorted(trainer.callback_metrics)

    assert seen(1) == seen(0)
    assert "loss" in seen(1)[0]


def test_incidents_of_all_fits_are_counted(clock: Clock, recorder: Recorder) -> None:
    model = FaultyModel(clock, 1, 2, 2, 5)
    trainer = trainer_for(Strategy(clock), GoodputCallback(), logger=recorder)
    trainer.fit(model, loader(model))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader(model))
    assert [row["goodput/incidents"] for _, row in recorder.rows] == [0, 1, 3, 3, 3, 3, 4, 4, 4, 4]


def test_an_error_asks_nobody(strategy: Strategy, clock: Clock, recorder: Recorder) -> None:
    class Broken(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise RuntimeError("no replica left")
            return super().training_step(batch, batch_idx)

    broken = Broken(clock)
    with pytest.raises(RuntimeError, match="no replica left"):
        trainer_for(strategy, GoodputCallback(), logger=recorder).fit(broken, loader(broken))
    assert recorder.steps == [0, 1]


def fit_with_ddp(folder: str) -> dict[str, Any]:
    """A fit under Lightning's own strategy on this rank."""
    recorder, callback = Recorder(), GoodputCallback(print_summary=False, log_every_n_updates=2)
    trainer = trainer_for(
        "ddp", callback, logger=[recorder, CSVLogger(folder)], devices=int(os.environ["WORLD_SIZE"]), max_steps=4
    )
    trainer.fit(Regressor())
    return {"rows": recorder.rows, "own": callback.summary.elapsed_s}


def test_it_covers_all_ranks_under_any_strategy(tmp_path: Path) -> None:
    first, second = values(run_ranks(fit_with_ddp, 2, str(tmp_path), timeout=90))
    assert first["rows"] == second["rows"]
    assert [step for step, _ in first["rows"]] == [1, 3, 4]
    last = first["rows"][-1][1]
    assert max(first["own"], second["own"]) < last["goodput/elapsed_s"] < first["own"] + second["own"]
    assert "goodput" in next(tmp_path.rglob("metrics.csv")).read_text()


@pytest.mark.parametrize("every", [-1, 1.5, True, "often", None])
def test_an_impossible_interval_is_refused(every: Any) -> None:
    with pytest.raises(ValueError, match=f"log_every_n_updates must be .* or 'auto', got {every!r}; 0 keeps"):
        GoodputCallback(log_every_n_updates=every)
