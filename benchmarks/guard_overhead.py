"""What guarding an update costs, measured in pairs inside one run.

``python -m benchmarks.guard_overhead --json``: 4 ranks on Gloo train in blocks of updates, guarded and plain in turn.
The meaning of each figure, and what "plain" leaves out, is in ``docs/benchmarks.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from rich.table import Table

from benchmarks import pairs as paired
from benchmarks.arguments import parser as arguments_of
from benchmarks.pairs import Alternation, Blocks
from benchmarks.ranks import run_ranks
from benchmarks.training import Workload, fit
from lightning_accelpact.recovery import c10d

_PLAIN_COLLECTIVES = c10d.replaceable()  # the strategy replaces them when it starts
_UPDATE_LENGTHS = {"share_50ms": 50.0, "share_1s": 1000.0, "share_220s": 220_000.0}


class Guarding(Alternation):
    """Guarded and plain updates in turn.

    Plain is Lightning's own optimization loop in the place of the one with a window, no commit vote, and torch's own
    collectives and waits for them. What the strategy does once per run, such as its sleeping monitor thread, stays.

    Args:
        blocks: When to switch.
        boundary: Switch only the window and the vote; collectives are torch's own throughout.
    """

    def __init__(self, blocks: Blocks, boundary: bool) -> None:
        super().__init__(blocks)
        self._boundary = boundary

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep both forms of what is switched."""
        windowed = trainer.fit_loop.epoch_loop.automatic_optimization
        plain = _AutomaticOptimization(trainer)
        plain.optim_progress = windowed.optim_progress
        self._loops = {True: windowed, False: plain}
        guarded = _PLAIN_COLLECTIVES if self._boundary else c10d.replaceable()
        self._collectives = {True: guarded, False: _PLAIN_COLLECTIVES}

    def switch(self, trainer: pl.Trainer, with_it: bool) -> None:
        trainer.fit_loop.epoch_loop.automatic_optimization = self._loops[with_it]
        trainer.strategy.machine.guarding = with_it
        for holder, name, function in self._collectives[with_it]:
            setattr(holder, name, function)


def train(workload: Workload, blocks: Blocks, boundary: bool) -> list[tuple[float, float]]:
    """The job of one rank: wall clock and process CPU time (seconds) at each end of a block."""
    alternation = Guarding(blocks, boundary)
    fit(workload, callbacks=[alternation])
    return alternation.clocks


def measure(*, ranks: int, layers: int, width: int, pairs: int, block: int, boundary: bool = False) -> dict[str, Any]:
    """Train in alternating blocks and compare them; medians over the pairs."""
    blocks = Blocks(pairs=pairs, length=block)
    clocks = run_ranks(train, ranks, Workload(updates=blocks.updates, layers=layers, width=width), blocks, boundary)
    figures = paired.compared(blocks, clocks)
    shares = {name: round(figures["added_wall_ms"] / length, 7) for name, length in _UPDATE_LENGTHS.items()}
    return {**figures, **shares, "ranks": ranks, "layers": layers, "width": width, "boundary": boundary}


def render(figures: dict[str, Any]) -> Table:
    """The figures as a table for people."""
    table = Table(title=f"Guarded minus plain updates: {figures['pairs']} pairs of {figures['block']} updates")
    for column in ("figure", "median", "range"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for name, (low, high) in figures["ranges"].items():
        table.add_row(name, f"{figures[name]:.3f}", f"{low:.3f} to {high:.3f}")
    for name in _UPDATE_LENGTHS:
        table.add_row(name, f"{figures[name]:.4%}", "")
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = arguments_of("guard_overhead", __doc__, layers=8, width=64)
    parser.add_argument("--boundary", action="store_true", help="the window and the vote alone, without collectives")
    return paired.run_benchmark(parser, arguments, measure, render)


if __name__ == "__main__":
    raise SystemExit(main())
