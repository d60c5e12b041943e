"""How much of the paper's table was really run, and in how many of its cells a recovery was seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.failbench import compatibility
from benchmarks.failbench.aggregation import CellSummary
from benchmarks.failbench.cell import NO_MECHANISM, Cell
from benchmarks.failbench.compatibility import Kind
from benchmarks.failbench.record import Evidence, Outcome

_SURVIVED = (Outcome.RECOVERED, Outcome.CONTINUED)


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Counts of the tuples of the 7 x 9 x 3 table.

    Args:
        tuples: All of them.
        candidates: Without the degenerate ones; the paper's 180.
        viable: What this harness calls viable.
        run: Viable ones with a record.
        recovered: Viable ones in which a mechanism recovered the run, executed and measured in all of their runs.
        from_scratch: Of the recovered ones, those in which nothing was left to restore in some run, and training began
            again at step 0.
        continued: Viable ones in which the architecture went on by itself, measured in all of their runs.
        halted: Viable ones without a mechanism that halted, which is what there is to be measured in them.
        failed: Viable ones of which a run did something else.
    """

    tuples: int
    candidates: int
    viable: int
    run: int
    recovered: int
    from_scratch: int
    continued: int
    halted: int
    failed: int

    @property
    def recoverable(self) -> int:
        """Viable ones in which there is a recovery or a continuation to be measured."""
        return self.viable - self.halted

    @property
    def measured_share(self) -> float:
        """Of the recoverable ones, how many of which a recovery or continuation was measured."""
        return (self.recovered + self.continued) / self.recoverable if self.recoverable else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "recoverable": self.recoverable, "measured_share": round(self.measured_share, 4)}

    def __str__(self) -> str:
        return (
            f"Recovery or continuation measured in {self.recovered + self.continued} of {self.recoverable} viable cells"
            f" that have one ({self.measured_share:.1%}; the paper: 10 of 133). Of {self.tuples} tuples"
            f" {self.candidates} are not degenerate and {self.viable} viable here; {self.run} of them were run:"
            f" {self.recovered} recovered ({self.from_scratch} of them from scratch), {self.continued} continued,"
            f" {self.halted} halted for want of a mechanism, {self.failed} failed."
        )


def coverage(summaries: Mapping[Cell, CellSummary]) -> Coverage:
    """Count the tuples of the paper's table in what was run."""
    table = list(compatibility.paper_cells())
    viable = [cell for cell in table if compatibility.here(cell.architecture, cell.mechanism).kind is Kind.VIABLE]
    degenerate = [cell for cell in table if _paper_kind(cell) is Kind.DEGENERATE]
    seen = [summaries[cell] for cell in viable if cell in summaries]
    return Coverage(
        tuples=len(table),
        candidates=len(table) - len(degenerate),
        viable=len(viable),
        run=len(seen),
        recovered=sum(_all(one, Outcome.RECOVERED) for one in seen),
        from_scratch=sum(_all(one, Outcome.RECOVERED) and bool(one.mean("fresh_starts")) for one in seen),
        continued=sum(_all(one, Outcome.CONTINUED) for one in seen),
        halted=sum(_all(one, Outcome.HALTED) and one.cell.mechanism == NO_MECHANISM for one in seen),
        failed=sum(not _as_expected(one) for one in seen),
    )


def _paper_kind(cell: Cell) -> Kind | None:
    found = compatibility.in_paper(cell.architecture, cell.mechanism)
    return found.kind if found else None


def _all(summary: CellSummary, outcome: Outcome) -> bool:
    """Whether all runs ended so, measured."""
    return set(summary.outcomes) == {outcome} and summary.evidence is Evidence.MEASURED


def _as_expected(summary: CellSummary) -> bool:
    halted = _all(summary, Outcome.HALTED) and summary.cell.mechanism == NO_MECHANISM
    return halted or any(_all(summary, outcome) for outcome in _SURVIVED)
