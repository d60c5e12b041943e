"""A few cells end to end: real processes, real faults."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from functools import cache

import pytest

from benchmarks.failbench.cell import Cell
from benchmarks.failbench.preset import PRESETS
from benchmarks.failbench.record import Evidence, Outcome, Record
from benchmarks.failbench.runner import measure

TINY = PRESETS["tiny"]


@cache
def record(cell: str) -> Record:
    return measure(Cell.parse(cell), preset="tiny", seed=0)


@pytest.mark.parametrize("cell", ["A1/FT10/F1", "A2/FT1/F1", "A3/FT4/F2", "A4/FT2/F3", "A6/FT3/F1", "A7/FT10/F1"])
def test_restored_exactly(cell: str) -> None:
    disturbed, plain = record(cell), record(str(Cell.parse(cell).baseline))
    assert plain.outcome is Outcome.UNDISTURBED, plain.reason
    assert (disturbed.outcome, disturbed.evidence, disturbed.reason) == (Outcome.RECOVERED, Evidence.MEASURED, "")
    assert disturbed.weights_sha256 == plain.weights_sha256
    assert disturbed.losses == plain.losses
    recoveries = 3 if "F3" in cell else 1
    assert len(disturbed.detect_seconds) == len(disturbed.recover_seconds) == recoveries
    assert len(disturbed.restore_seconds) == len(disturbed.respawn_seconds) == recoveries
    assert all(fault.actual_s is not None for fault in disturbed.faults)
    assert disturbed.world_after == TINY.ranks


def test_what_is_trained_learns() -> None:
    for architecture in ("A1", "A2", "A4", "A6", "A7"):
        losses = record(f"{architecture}/FT9/none").losses
        assert len(losses) == TINY.steps
        assert losses[-1] < 0.95 * losses[0], architecture


def test_sums_are_the_same_whoever_makes_them() -> None:
    ring, tree = record("A2/FT9/none").losses, record("A3/FT9/none").losses
    assert ring == pytest.approx(tree, rel=1e-4)


def test_lost_steps() -> None:
    assert record("A1/FT10/F1").lost_steps == 0  # replicas stand at the frontier
    assert record("A3/FT4/F2").lost_steps == 0  # the warning came in time
    assert record("A3/FT4/F2").emergency_seconds
    assert 0 < record("A2/FT1/F1").lost_steps <= record("A2/FT1/F1").save_interval_steps


def test_without_a_mechanism_they_halt() -> None:
    for cell in ("A3/FT9/F1", "A4/FT9/F1"):
        found = record(cell)
        assert (found.outcome, found.evidence) == (Outcome.HALTED, Evidence.MEASURED), found.reason
        assert len(found.detect_seconds) == 1
        assert found.steps < TINY.steps and found.weights_sha256 is None


def test_some_go_on_by_themselves() -> None:
    for cell in ("A6/FT9/F1", "A1-async/FT9/F1"):
        found = record(cell)
        assert (found.outcome, found.evidence, found.reason) == (Outcome.CONTINUED, Evidence.MEASURED, "")
        assert found.steps == TINY.steps
        assert found.world_after == TINY.ranks - 1


def test_those_that_are_left_share_the_batch_or_not() -> None:
    shared, smaller = record("A3/FT7/F1"), record("A3/FT8/F1")
    for found in (shared, smaller):
        assert (found.outcome, found.world_after, found.lost_steps) == (Outcome.RECOVERED, TINY.ranks - 1, 0)
    # Up to the fault both are the same, and the batches differ from then on
    fault = shared.faults[0].step
    assert shared.losses[:fault] == smaller.losses[:fault]
    assert shared.losses[-1] != smaller.losses[-1]


def test_what_nobody_holds_is_begun_again() -> None:
    found = record("A4/FT8/F1")
    assert found.outcome is Outcome.RECOVERED
    assert "no survivor holds stage" in found.reason and "began again at step 0" in found.reason
    assert found.lost_steps == found.faults[0].step


def test_a_hang_is_noticed_after_the_timeout() -> None:
    found = measure(Cell.parse("A3/FT9/hang"), preset=replace(TINY, answer_s=1.0), seed=0, detect_timeout_s=2.0)
    assert found.outcome is Outcome.HALTED, found.reason
    assert found.detect_seconds[0] > 0.9 * found.detect_timeout_seconds


def test_the_same_seed_gives_the_same_run() -> None:
    first, again = record("A4/FT2/F3"), measure(Cell.parse("A4/FT2/F3"), preset="tiny", seed=0)
    assert [(one.rank, one.step) for one in first.faults] == [(one.rank, one.step) for one in again.faults]
    assert first.weights_sha256 == again.weights_sha256
    assert measure(Cell.parse("A4/FT9/none"), preset="tiny", seed=1).weights_sha256 != first.weights_sha256


def test_no_process_is_left() -> None:
    record("A3/FT9/F1")
    assert multiprocessing.active_children() == []
