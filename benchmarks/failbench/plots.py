"""Records as pictures. Needs matplotlib, which the extra ``plots`` installs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.failbench.aggregation import CellSummary, Estimate, pooled
from benchmarks.failbench.cell import NO_FAULT
from lightning_accelpact.goodput.plots import figure_class

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = "osD^vP*X<>h"


@dataclass(frozen=True)
class Point:
    """A mechanism on one architecture.

    Args:
        mechanism: Name.
        overhead: Share of time that training stands still for saves; what happens within steps is not contained.
        restore: Effective restore, seconds.
    """

    mechanism: str
    overhead: Estimate
    restore: Estimate


def points(summaries: Iterable[CellSummary], architecture: str) -> list[Point]:
    """The mechanisms with both figures, over all traces with faults."""
    found: dict[str, list[CellSummary]] = {}
    for one in summaries:
        if one.cell.architecture == architecture and one.cell.trace != NO_FAULT:
            found.setdefault(one.cell.mechanism, []).append(one)
    made = [(name, pooled(cells, "stalled_share"), pooled(cells, "restore")) for name, cells in found.items()]
    return [Point(name, overhead, restore) for name, overhead, restore in made if overhead and restore]


def pareto_front(candidates: Sequence[Point]) -> list[Point]:
    """Those that no other beats in overhead and restore at once, by rising overhead."""
    ordered = sorted(candidates, key=lambda one: (one.overhead.mean, one.restore.mean))
    front: list[Point] = []
    for one in ordered:
        if not front or one.restore.mean < front[-1].restore.mean:
            front.append(one)
    return front


def write_plots(summaries: Mapping[object, CellSummary], folder: Path) -> list[Path]:
    """Draw the cost of saves against restore for each architecture that has two points or more.

    Args:
        summaries: Of the cells.
        folder: Where to; made if missing.

    Returns:
        The files, as SVG.

    Raises:
        PlotsUnavailable: without matplotlib.
        OSError: if a file cannot be written.
    """
    figure_of = figure_class()
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for architecture in sorted({one.cell.architecture for one in summaries.values()}):
        found = points(summaries.values(), architecture)
        if len(found) < 2:
            continue
        figure = figure_of(figsize=(6.5, 4.5), layout="constrained")
        _draw(figure.subplots(), found, architecture)
        files.append(folder / f"pareto-{architecture}.svg")
        figure.savefig(files[-1], metadata={"Date": None})
    return files


def _draw(axes: Axes, found: Sequence[Point], architecture: str) -> None:
    for number, one in enumerate(sorted(found, key=lambda point: point.mechanism)):
        axes.errorbar(
            100 * one.overhead.mean,
            1e3 * one.restore.mean,
            xerr=100 * one.overhead.half,
            yerr=1e3 * one.restore.half,
            fmt=_MARKERS[number % len(_MARKERS)],
            capsize=2,
            linewidth=0.8,
            label=one.mechanism,
        )
    front = pareto_front(found)
    axes.plot(
        [100 * one.overhead.mean for one in front],
        [1e3 * one.restore.mean for one in front],
        drawstyle="steps-post",
        color="0.5",
        linewidth=0.8,
        label="Pareto front",
    )
    axes.set(
        title=architecture,
        xlabel="standing still for saves, % of the time without",
        ylabel="effective restore, ms",
        yscale="log",
    )
    axes.grid(alpha=0.3, which="both", linewidth=0.5)
    axes.legend(fontsize="small", frameon=False)
