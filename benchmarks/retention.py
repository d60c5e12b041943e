"""What keeping the inputs of collectives costs, so that they can be run again in place, measured in pairs inside one run.

``python -m benchmarks.retention --json``: 4 ranks on Gloo train in blocks of updates, with and without it in turn. The
meaning of each figure is in ``docs/benchmarks.md``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import lightning.pytorch as pl
from rich.table import Table

from benchmarks import pairs as paired
from benchmarks.arguments import parser as arguments_of
from benchmarks.pairs import Alternation, Blocks
from benchmarks.ranks import run_ranks
from benchmarks.training import Workload, fit
from lightning_accelpact.recovery.c10d import Collective
from lightning_accelpact.recovery.retry import Retry


class Timed(Retry):
    """Adds up the wall-clock time that it takes by itself, without the collectives."""

    seconds = 0.0

    def run(self, collective: Collective) -> Any:
        begun = time.perf_counter()
        try:
            return super().run(collective)
        finally:
            self.seconds += time.perf_counter() - begun

    def _run(self, collective: Collective) -> Any:
        begun = time.perf_counter()
        try:
            return super()._run(collective)
        finally:
            self.seconds -= time.perf_counter() - begun


class Forgetful(Retry):
    """Runs collectives and keeps nothing."""

    def run(self, collective: Collective) -> Any:
        return collective.plain()


class Retaining(Alternation):
    """Updates whose collectives keep their inputs, and updates whose collectives do not, in turn."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep both forms of what is switched."""
        machine = trainer.strategy.machine
        self.timed = Timed(machine)
        self._retries = {True: self.timed, False: Forgetful(machine)}

    def switch(self, trainer: pl.Trainer, with_it: bool) -> None:
        trainer.strategy.machine.retry = self._retries[with_it]


def train(workload: Workload, blocks: Blocks) -> dict[str, Any]:
    """The job of one rank: wall clock and process CPU time (seconds) at each end of a block, and the sizes."""
    alternation = Retaining(blocks)
    trainer = fit(workload, callbacks=[alternation])
    shards = [parameter.to_local().nbytes for parameter in trainer.lightning_module.parameters()]
    return {
        "clocks": alternation.clocks,
        "keeping_ms": 1e3 * alternation.timed.seconds / (blocks.pairs * blocks.length),
        "kept_bytes": alternation.timed.nbytes,
        "shard_bytes": sum(shards),
    }


def measure(*, ranks: int, layers: int, width: int, batch: int, pairs: int, block: int) -> dict[str, Any]:
    """Train in alternating blocks and compare them; medians over the pairs."""
    blocks = Blocks(pairs=pairs, length=block)
    workload = Workload(updates=blocks.updates, layers=layers, width=width, batch=batch)
    results = run_ranks(train, ranks, workload, blocks)
    figures = paired.compared(blocks, [result["clocks"] for result in results])
    keeping = fmean(result["keeping_ms"] for result in results)
    return {
        **figures,
        "share_of_update": round(figures["added_wall_ms"] / figures["plain_update_ms"], 5),
        "keeping_ms": round(keeping, 3),
        "keeping_share": round(keeping / figures["plain_update_ms"], 5),
        "kept_bytes": max(result["kept_bytes"] for result in results),
        "shard_bytes": max(result["shard_bytes"] for result in results),
        "ranks": ranks,
        "layers": layers,
        "width": width,
        "batch": batch,
    }


def render(figures: dict[str, Any]) -> Table:
    """The figures as a table for people."""
    table = Table("figure", "value", title=f"Kept inputs: {figures['pairs']} pairs of {figures['block']} updates")
    for name in ("added_wall_ms", "added_cpu_ms"):
        low, high = figures["ranges"][name]
        table.add_row(name, f"{figures[name]:.3f} ({low:.3f} to {high:.3f})")
    table.add_row("share_of_update", f"{figures['share_of_update']:.2%} of {figures['plain_update_ms']:.1f} ms")
    table.add_row("keeping_ms", f"{figures['keeping_ms']:.3f}, {figures['keeping_share']:.2%}")
    table.add_row("kept_bytes", f"{figures['kept_bytes']:,} beside {figures['shard_bytes']:,} of parameter shards")
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = arguments_of("retention", __doc__, layers=8, width=512, batch=512)
    return paired.run_benchmark(parser, arguments, measure, render)


if __name__ == "__main__":
    raise SystemExit(main())
