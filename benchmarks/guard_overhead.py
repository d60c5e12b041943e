"""What guarding an update costs, measured in pairs inside one run.

``python -m benchmarks.guard_overhead --json``: 4 ranks on Gloo train in blocks of updates, guarded and plain in turn.
The meaning of each figure, and what "plain" leaves out, is in ``docs/benchmarks.md``.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from rich.console import Console
from rich.table import Table
from torch.distributed import _functional_collectives

from benchmarks.arguments import parser as arguments_of
from benchmarks.ranks import run_ranks
from benchmarks.training import Workload, fit

# Waits for a collective, which the strategy makes interruptible when it starts
_WAITS = ((dist.Work, "wait"), (_functional_collectives, "wait_tensor"))
_PLAIN_WAITS = [getattr(holder, name) for holder, name in _WAITS]
_UPDATE_LENGTHS = {"share_50ms": 50.0, "share_1s": 1000.0, "share_220s": 220_000.0}


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """How the run is divided: pairs of one guarded and one plain block, whose order is swapped from pair to pair.

    Args:
        pairs: Number of pairs.
        length: Updates in one block.
        warm_up: Updates before the first pair.
    """

    pairs: int
    length: int
    warm_up: int = 5

    @property
    def updates(self) -> int:
        """Updates of the whole run."""
        return self.warm_up + 2 * self.pairs * self.length

    def guarded(self, block: int) -> bool:
        """Whether a block (counted from 0) is guarded: yes no, no yes, and so on."""
        return (block + block // 2) % 2 == 0

    def starting_at(self, update: int) -> int | None:
        """The block that begins with this update, or would if it were not the end; ``None`` inside a block."""
        block, inside = divmod(update - self.warm_up, self.length)
        return block if block >= 0 and inside == 0 else None


class Alternation(pl.Callback):
    """Switches this rank between guarded and plain updates, and reads the clocks in between.

    Plain is Lightning's own optimization loop in the place of the one with a window, no commit vote, and torch's own
    waits for a collective. What the strategy does once per run, such as its sleeping monitor thread, stays.

    Args:
        blocks: When to switch.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self.clocks: list[tuple[float, float]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep both forms of what is switched."""
        windowed = trainer.fit_loop.epoch_loop.automatic_optimization
        plain = _AutomaticOptimization(trainer)
        plain.optim_progress = windowed.optim_progress
        self._loops = {True: windowed, False: plain}
        self._waits = {True: [getattr(holder, name) for holder, name in _WAITS], False: _PLAIN_WAITS}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Between two updates."""
        block = self._blocks.starting_at(trainer.global_step)
        if block is None:
            return
        self.clocks.append((time.perf_counter(), time.process_time()))
        guarded = self._blocks.guarded(block)
        trainer.fit_loop.epoch_loop.automatic_optimization = self._loops[guarded]
        trainer.strategy.machine.guarding = guarded
        for (holder, name), wait in zip(_WAITS, self._waits[guarded], strict=True):
            setattr(holder, name, wait)


def train(workload: Workload, blocks: Blocks) -> list[tuple[float, float]]:
    """The job of one rank: wall clock and process CPU time (seconds) at each end of a block."""
    alternation = Alternation(blocks)
    fit(workload, callbacks=[alternation])
    return alternation.clocks


def per_update(blocks: Blocks, clocks: Sequence[Sequence[float]]) -> list[float]:
    """Milliseconds per update of each block, from one clock of all ranks; mean over the ranks."""
    seconds = [fmean(rank[block + 1] - rank[block] for rank in clocks) for block in range(2 * blocks.pairs)]
    return [1e3 * second / blocks.length for second in seconds]


def added(blocks: Blocks, figures: Sequence[float]) -> list[float]:
    """Guarded minus plain, for each pair of neighbouring blocks."""
    return [
        figures[block] - figures[block + 1] if blocks.guarded(block) else figures[block + 1] - figures[block]
        for block in range(0, len(figures), 2)
    ]


def median_range(values: Sequence[float]) -> list[float]:
    """Where the median lies with 95 % confidence: order statistics by the sign test, all values if they are few."""
    ordered, half_width = sorted(values), 0.98 * math.sqrt(len(values))
    low = max(0, math.floor(len(values) / 2 - half_width))
    high = min(len(values) - 1, math.ceil(len(values) / 2 + half_width))
    return [round(ordered[low], 3), round(ordered[high], 3)]


def measure(*, ranks: int, layers: int, width: int, pairs: int, block: int) -> dict[str, Any]:
    """Train in alternating blocks and compare them; medians over the pairs."""
    blocks = Blocks(pairs=pairs, length=block)
    clocks = run_ranks(train, ranks, Workload(updates=blocks.updates, layers=layers, width=width), blocks)
    wall, cpu = (per_update(blocks, [[stamp[clock] for stamp in rank] for rank in clocks]) for clock in (0, 1))
    added_wall, added_cpu = added(blocks, wall), added(blocks, cpu)
    plain = [figure for index, figure in enumerate(wall) if not blocks.guarded(index)]
    return {
        "added_wall_ms": round(median(added_wall), 3),
        "added_cpu_ms": round(median(added_cpu), 3),
        **{name: round(median(added_wall) / length, 7) for name, length in _UPDATE_LENGTHS.items()},
        "ranges": {"added_wall_ms": median_range(added_wall), "added_cpu_ms": median_range(added_cpu)},
        "plain_update_ms": round(median(plain), 3),
        "pairs": pairs,
        "block": block,
        "ranks": ranks,
        "layers": layers,
        "width": width,
    }


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
    parser.add_argument("--pairs", type=int, default=60, help="pairs of blocks (default 60)")
    parser.add_argument("--block", type=int, default=5, help="updates in a block (default 5)")
    options = vars(parser.parse_args(arguments))
    as_json = options.pop("json")
    for name in ("pairs", "block"):
        if options[name] < 1:
            parser.error(f"--{name} {options[name]} must be at least 1")
    figures = measure(**options)
    if as_json:
        print(json.dumps(figures))
    else:
        Console().print(render(figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
