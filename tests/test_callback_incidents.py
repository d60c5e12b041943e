"""What the callback makes of incidents, checkpoints, errors and further fits."""

# ruff: noqa: F811 - fixtures are imported by name

from __future__ import annotations

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
    fault,
    loader,
    model,
    nonzero,
    startup_is_counted_already,
    strategy,
    trainer_for,
)
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization

from lightning_accelpact.callback import GoodputCallback
from lightning_accelpact.goodput import TimeClass, read_jsonl


def incidents_in(path: Path) -> list[dict[str, Any]]:
    """The incidents that a rank has written down so far."""
    return [one for one in read_jsonl(path)[0] if one["kind"] == "incident"]


def test_an_incident_is_logged_and_summarised(
    strategy: Strategy, clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = FaultyModel(clock, 1, 3)
    lines_after_batch = []
    path = tmp_path / "logs" / "goodput-rank0.jsonl"
    model.on_train_batch_end = lambda *_: lines_after_batch.append(len(incidents_in(path)))
    callback = GoodputCallback(log_dir=tmp_path / "logs", restart_seconds=50)
    trainer_for(strategy, callback).fit(model, loader(model))

    lines, skipped = read_jsonl(path)
    assert (skipped, lines_after_batch) == (0, [0, 1, 1, 2])
    assert [one["kind"] for one in lines if one["kind"] != "totals"] == ["start", "incident", "incident", "summary"]
    records = [one for one in lines if one["kind"] in ("incident", "summary")]
    assert [one.get("frontier") for one in records] == [1, 3, None]
    assert records[0]["reason"] == "RuntimeError: connection reset"
    assert records[2]["goodput"] == callback.summary.goodput
    # Ages 1 and 3 of 8 s, twice 50 s, less twice 0.03 s
    assert records[2]["saved_s"] == pytest.approx(4 * 8 + 100 - 0.06)
    assert [line.split()[:4] for line in capsys.readouterr().out.splitlines() if "backward" in line] == [
        ["1", "0", "backward", "redo"], ["3", "0", "backward", "redo"],
    ]  # fmt: skip


def test_two_incidents_in_one_micro_batch_are_both_kept(strategy: Strategy, clock: Clock, tmp_path: Path) -> None:
    callback = GoodputCallback(log_dir=tmp_path)
    model = FaultyModel(clock, 0, 0, 2, 2)
    trainer_for(strategy, callback).fit(model, loader(model))
    assert [one.frontier for one in callback.summary.incidents] == [0, 0, 2, 2]
    assert [one["frontier"] for one in incidents_in(tmp_path / "goodput-rank0.jsonl")] == [0, 0, 2, 2]


def test_a_checkpoint_sets_the_age(strategy: Strategy, clock: Clock, tmp_path: Path) -> None:
    callback = GoodputCallback()
    model = FaultyModel(clock, 1, 2, 3)
    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2)
    trainer_for(strategy, saver, callback, enable_checkpointing=True).fit(model, loader(model))
    assert [(one.checkpoint, one.checkpoint_age) for one in callback.summary.incidents] == [(None, 1), (2, 0), (2, 1)]


def test_a_checkpoint_of_weights_alone_is_none_to_restart_from(
    strategy: Strategy, clock: Clock, tmp_path: Path
) -> None:
    callback = GoodputCallback()
    model = FaultyModel(clock, 3)
    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, save_weights_only=True)
    trainer_for(strategy, saver, callback, enable_checkpointing=True).fit(model, loader(model))
    assert callback.summary.incidents[0].checkpoint is None


def test_a_checkpoint_written_after_the_fault_does_not_count(strategy: Strategy, clock: Clock, tmp_path: Path) -> None:
    class SavesLater(FaultyModel):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            if self.trainer.global_step in self.faults:
                self.trainer.save_checkpoint(tmp_path / "later.ckpt")
            return loss

    callback = GoodputCallback()
    model = SavesLater(clock, 2)
    trainer_for(strategy, callback).fit(model, loader(model))
    assert callback.summary.incidents[0].checkpoint is None


def test_a_clock_set_back_does_not_make_an_age_negative(strategy: Strategy, clock: Clock, tmp_path: Path) -> None:
    class FaultOfUpdate1(Model):
        """Has an incident whose time, but not whose frontier, lies after the checkpoint of update 2."""

        def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> None:
            if batch_idx == 3:
                fault(self.trainer.strategy, 1)

    callback = GoodputCallback()
    model = FaultOfUpdate1(clock)
    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2)
    trainer_for(strategy, saver, callback, enable_checkpointing=True).fit(model, loader(model))
    assert callback.summary.incidents[0].checkpoint_age == 1


def test_a_resumed_run_counts_from_its_checkpoint(clock: Clock, tmp_path: Path) -> None:
    model = Model(clock)
    first = trainer_for(Strategy(clock))
    first.fit(model, loader(model))
    first.save_checkpoint(tmp_path / "four.ckpt")

    callback = GoodputCallback()
    model = FaultyModel(clock, 5, 9)
    trainer = trainer_for(Strategy(clock), callback, max_epochs=2)
    trainer.fit(model, loader(model), ckpt_path=tmp_path / "four.ckpt")
    assert callback.summary.updates == 4
    # A second fit goes on from memory, not from a checkpoint
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, loader(model))
    assert callback.summary.updates == 8
    assert [(one.checkpoint, one.checkpoint_age) for one in callback.summary.incidents] == [(4, 1), (4, 5)]


def test_a_second_fit_adds_to_the_first(model: Model, strategy: Strategy, capsys: pytest.CaptureFixture[str]) -> None:
    callback = GoodputCallback()
    trainer = trainer_for(strategy, callback)
    model.on_train_end = lambda: model.clock.wait(32)
    trainer.fit(model, loader(model))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader(model))
    assert callback.summary.updates == 8
    assert callback.summary.totals[TimeClass.PRODUCTIVE] == 8 * 8
    assert callback.summary.totals[TimeClass.OTHER] == 32
    output = capsys.readouterr().out
    assert [output.count(f"{updates} updates committed") for updates in (4, 8)] == [1, 1]


class RunByRun(Strategy):
    """Counts updates and incidents from 0 in every fit."""

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        self.incidents = []
        self.frontier = lambda: trainer.global_step - before
        before = trainer.global_step

    @property
    def committed_updates(self) -> int:
        return self.frontier()


def test_a_second_fit_may_count_from_zero_again(clock: Clock, tmp_path: Path) -> None:
    class FaultAfterThree(Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if batch_idx == 3:
                fault(self.trainer.strategy, 3)
            return super().training_step(batch, batch_idx)

    callback, model = GoodputCallback(log_dir=tmp_path), FaultAfterThree(clock)
    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2)
    trainer = trainer_for(RunByRun(clock), callback, saver, enable_checkpointing=True)
    trainer.fit(model, loader(model))
    trainer.callbacks.remove(saver)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader(model))
    assert callback.summary.updates == 8
    # What the first fit saved as its updates 2 and 4 is not the second's
    assert [one.checkpoint for one in callback.summary.incidents] == [2, None]
    records, _ = read_jsonl(tmp_path / "goodput-rank0.jsonl")
    kinds = [one["kind"] for one in records if one["kind"] in ("start", "incident", "summary")]
    assert kinds == ["start", "incident", "summary", "incident", "summary"]


def test_another_trainer_is_accounted_for_by_itself(clock: Clock) -> None:
    callback = GoodputCallback()
    for _ in range(2):
        model = FaultyModel(clock, 1)
        trainer_for(Strategy(clock), callback).fit(model, loader(model))
        assert (callback.summary.updates, len(callback.summary.incidents)) == (4, 1)
        assert callback.summary.totals[TimeClass.PRODUCTIVE] == 4 * 8


class BrokenModel(FaultyModel):
    """Is given up in its third training step, with an incident that nobody has logged yet."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2:
            fault(self.trainer.strategy, 2, outcome="fail_stop", action="restart")
            raise RuntimeError("no replica left")
        return super().training_step(batch, batch_idx)


def test_an_error_prints_what_is_known_without_asking_a_peer(
    strategy: Strategy, clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def gather_json(record: dict[str, Any]) -> None:
        pytest.fail("a peer was asked after an error")

    strategy.gather_json = gather_json
    model = BrokenModel(clock, 1)
    callback = GoodputCallback(log_dir=tmp_path)
    with pytest.raises(RuntimeError, match="no replica left"):
        trainer_for(strategy, callback).fit(model, loader(model))
    assert callback.summary.updates == 2
    records, _ = read_jsonl(tmp_path / "goodput-rank0.jsonl")
    assert [one["outcome"] for one in records if one["kind"] == "incident"] == ["recovered", "fail_stop"]
    assert [one["kind"] for one in records[-2:]] == ["totals", "summary"]
    assert records[-2]["ended"] == "failed"
    output = capsys.readouterr().out
    assert output.count("2 updates committed") == 1
    assert "fail stop" in output


def test_an_error_in_a_later_fit_is_summarised_anew(
    strategy: Strategy, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    model, broken = Model(clock), BrokenModel(clock)
    trainer = trainer_for(strategy, GoodputCallback())
    trainer.fit(model, loader(model))
    trainer.fit_loop.max_epochs = 2
    with pytest.raises(RuntimeError, match="no replica left"):
        trainer.fit(broken, loader(broken))
    output = capsys.readouterr().out
    assert [output.count(f"{updates} updates committed") for updates in (4, 6)] == [1, 1]


class RunsAgain(_AutomaticOptimization):
    """Runs a micro-batch once more when its first run, of 8 s, ends with a reset connection."""

    def run(self, optimizer: Any, batch_idx: int, kwargs: Any) -> Any:
        try:
            return super().run(optimizer, batch_idx, kwargs)
        except ConnectionResetError:
            fault(self.trainer.strategy, self.trainer.global_step, detect_s=0.25, redo_s=7.75)
            return super().run(optimizer, batch_idx, kwargs)


class ResetModel(Model):
    """Loses its connection in the backward pass of the second micro-batch."""

    def on_after_backward(self) -> None:
        if self.steps == 2:
            raise ConnectionResetError


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_training_step_may_run_again(strategy: Strategy, clock: Clock, accumulate: int) -> None:
    model = ResetModel(clock)
    callback = GoodputCallback()
    trainer = trainer_for(strategy, callback, enable_progress_bar=True, accumulate_grad_batches=accumulate)
    trainer.fit_loop.epoch_loop.automatic_optimization = RunsAgain(trainer)
    trainer.fit(model, loader(model))
    assert model.steps == 5
    assert callback.summary.updates == 4 // accumulate
    totals = nonzero(callback)
    assert totals[TimeClass.PRODUCTIVE] == 4 * 8
    assert (totals[TimeClass.DETECTION], totals[TimeClass.REDONE_WORK]) == (0.25, 7.75)
    assert trainer.progress_bar_metrics["goodput"] == pytest.approx(32 / clock.now)


def test_all_ranks_are_in_the_summary(strategy: Strategy, clock: Clock) -> None:
    def gather_json(record: dict[str, Any]) -> list[dict[str, Any]]:
        peer = {**record, "rank": 1, "incidents": [{**one, "rank": 1} for one in record["incidents"]]}
        return [{**record, "world_size": 2}, {**peer, "world_size": 2}]

    strategy.gather_json = gather_json
    callback = GoodputCallback()
    model = FaultyModel(clock, 1)
    trainer_for(strategy, callback).fit(model, loader(model))
    assert (callback.summary.ranks, callback.summary.updates) == (2, 4)
    assert callback.summary.totals[TimeClass.PRODUCTIVE] == 2 * 4 * 8
    assert [one.fault_ranks for one in callback.summary.incidents] == [(0, 1)]


def test_a_log_that_cannot_be_written_does_not_end_the_fit(
    strategy: Strategy, clock: Clock, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    model = FaultyModel(clock, 1)
    callback = GoodputCallback(log_dir=tmp_path / "file")
    with pytest.warns(UserWarning, match=r"could not write 1 goodput records to .*goodput-rank0\.jsonl"):
        trainer_for(strategy, callback).fit(model, loader(model))
    assert callback.summary.updates == 4
