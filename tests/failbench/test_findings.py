"""Findings hold on records like the paper's, do not on others, and are not measured without any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from failbench_records import halted, hang, made, paper_like

from benchmarks.failbench.aggregation import summarize
from benchmarks.failbench.cell import Cell
from benchmarks.failbench.compatibility import Kind, here, paper_cells
from benchmarks.failbench.coverage import coverage
from benchmarks.failbench.findings import Finding, Verdict, findings
from benchmarks.failbench.record import Outcome, Record

Change = Callable[[Record], Record]


def found(records: list[Record], claim: str) -> Finding:
    (one,) = [one for one in findings(records) if claim in one.claim]
    return one


def only(mechanism: str, **values: object) -> Change:
    """Changes the records of a mechanism on A2."""
    return lambda one: (
        replace(one, **values) if one.cell.mechanism == mechanism and one.cell.architecture == "A2" else one
    )


def at(cell: str, **values: object) -> Change:
    """Changes the records of a cell."""
    return lambda one: replace(one, **values) if str(one.cell) == cell else one


@pytest.mark.parametrize("one", findings(paper_like()), ids=lambda one: one.claim)
def test_holds_on_records_like_the_papers(one: Finding) -> None:
    assert one.verdict is Verdict.HOLDS, one.because


@pytest.mark.parametrize("one", findings([]), ids=lambda one: one.claim)
def test_is_not_measured_without_records(one: Finding) -> None:
    assert one.verdict is Verdict.NOT_MEASURED
    assert one.because.startswith("there is no record of ")


def slower_hang(one: Record) -> Record:
    return hang(one.detect_timeout_seconds, detect_seconds=(9.0,), seed=one.seed) if one.cell.trace == "hang" else one


def faster_gossip(one: Record) -> Record:
    falling = tuple(2.0 - 0.02 * step for step in range(30))
    return replace(one, losses=falling) if str(one.cell) == "A6/FT9/F1" else one


def fast_groups(one: Record) -> Record:
    return replace(one, reform_seconds=(0.001,), respawn_seconds=()) if one.reform_seconds else one


@pytest.mark.parametrize(("claim", "change", "because"), [
    ("halt without", at("A4/FT9/F1", outcome=Outcome.CONTINUED), "A4 continued"),
    ("Detection follows", slower_hang, "1 s: 9.00 s"),
    ("lowest steady-state", only("FT3", save_seconds=(0.004,)), "FT3 came out lower"),
    ("restores fastest", only("FT1", restore_seconds=(0.001,)), "FT1 came out lower"),
    ("no periodic cost", only("FT4", save_seconds=(0.1,)), "saved in advance on A2"),
    ("FT5 is dominated", only("FT5", save_seconds=(0.0001,)), "none has both"),
    ("compresses", fast_groups, "FT1 9.12x alone"),
    ("A6 gains", at("A6/FT9/F1", throughput_after=60.0), "did not rise"),
    ("A6 gains", faster_gossip, "fell faster, too"),
    ("depends strongly", at("A5/FT2/F1", save_seconds=(0.0038,)), "FT2's take"),
    ("by A6 only", at("A3/FT1/F2", outcome=Outcome.RECOVERED), "1 of 1"),
])  # fmt: skip
def test_does_not_hold_where_the_records_say_so(claim: str, change: Change, because: str) -> None:
    one = found([change(record) for record in paper_like()], claim)
    assert one.verdict is Verdict.DOES_NOT
    assert because in one.because


def test_a_difference_within_the_noise_is_named() -> None:
    records = [
        replace(one, restore_seconds=(0.001 + one.seed,)) if "/FT1/" in str(one.cell) else one for one in paper_like()
    ]
    one = found(records, "restores fastest")
    assert one.verdict is Verdict.HOLDS
    assert "within the spread of FT1" in one.because


def test_what_a_comparison_between_runs_is_worth_is_said() -> None:
    def blurred(one: Record) -> Record:
        return replace(one, step_seconds_before=(0.1 + 0.05 * one.seed,) * 10) if str(one.cell) == "A2/FT9/F1" else one

    one = found([blurred(record) for record in paper_like()], "lowest steady-state")
    assert one.verdict is Verdict.HOLDS
    assert "runs without a mechanism differ by" in one.because


def full() -> list[Record]:
    """Each viable cell: halted without a mechanism but for A6, recovered with one."""
    cells = [cell for cell in paper_cells() if here(cell.architecture, cell.mechanism).kind is Kind.VIABLE]
    return [_record(cell) for cell in cells]


def _record(cell: Cell) -> Record:
    if cell.mechanism != "FT9":
        return made(str(cell))
    return (
        halted(cell.architecture, cell.trace)
        if cell.architecture != "A6"
        else made(str(cell), outcome=Outcome.CONTINUED)
    )


def test_coverage_of_a_full_matrix() -> None:
    seen = coverage(summarize(full()))
    assert (seen.tuples, seen.candidates, seen.viable, seen.run, seen.failed) == (189, 180, 180, 180, 0)
    assert (seen.recovered, seen.from_scratch, seen.continued, seen.halted) == (159, 0, 3, 18)
    assert seen.measured_share == 1.0
    assert "162 of 162" in str(seen)


def test_what_failed_or_was_not_run_is_not_covered() -> None:
    records = full()
    broken = next(index for index, one in enumerate(records) if one.cell == Cell.parse("A3/FT1/F2"))
    records[broken] = replace(records[broken], outcome=Outcome.FAILED)
    halting = next(index for index, one in enumerate(records) if one.cell == Cell.parse("A3/FT2/F2"))
    records[halting] = replace(records[halting], outcome=Outcome.HALTED)
    again = next(index for index, one in enumerate(records) if one.cell == Cell.parse("A4/FT8/F1"))
    records[again] = replace(records[again], fresh_starts=1)
    seen = coverage(summarize(records[:-1]))
    assert (seen.run, seen.failed, seen.from_scratch) == (179, 2, 1)
    assert seen.measured_share < 0.99
