"""A few cells end to end: real processes, real faults."""

from __future__ import annotations

from functools import cache

from benchmarks.failbench.cell import Cell
from benchmarks.failbench.record import Evidence, Outcome, Record
from benchmarks.failbench.runner import measure


@cache
def record(cell: str) -> Record:
    return measure(Cell.parse(cell), preset="tiny", seed=0)


def test_periodic_disk_restores_exactly() -> None:
    disturbed, plain = record("A2/FT1/F1"), record("A2/FT9/none")
    assert plain.outcome is Outcome.UNDISTURBED
    assert (disturbed.outcome, disturbed.evidence, disturbed.reason) == (Outcome.RECOVERED, Evidence.MEASURED, "")
    assert disturbed.weights_sha256 == plain.weights_sha256
    assert disturbed.losses == plain.losses
    assert len(disturbed.detect_seconds) == len(disturbed.recover_seconds) == 1
    assert 0 < disturbed.lost_steps <= disturbed.save_interval_steps
