"""Two ways of running an update, compared in pairs of blocks inside one run, so that a drift of the machine cancels out."""

from __future__ import annotations

import argparse
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import lightning.pytorch as pl
from rich.table import Table

from benchmarks.arguments import show


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """How the run is divided: pairs of one block with what is measured and one without, whose order is swapped from pair to pair.

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

    def with_it(self, block: int) -> bool:
        """Whether a block (counted from 0) has what is measured: yes no, no yes, and so on."""
        return (block + block // 2) % 2 == 0

    def starting_at(self, update: int) -> int | None:
        """The block that begins with this update, or would if it were not the end; ``None`` inside a block."""
        block, inside = divmod(update - self.warm_up, self.length)
        return block if block >= 0 and inside == 0 else None


class Alternation(pl.Callback, ABC):
    """Switches this rank between both ways, and reads the clocks in between.

    Args:
        blocks: When to switch.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self.clocks: list[tuple[float, float]] = []

    @abstractmethod
    def switch(self, trainer: pl.Trainer, with_it: bool) -> None:
        """From the next update on, run with or without what is measured; on all ranks alike."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Between two updates."""
        block = self._blocks.starting_at(trainer.global_step)
        if block is not None:
            self.clocks.append((time.perf_counter(), time.process_time()))
            self.switch(trainer, self._blocks.with_it(block))


def per_update(blocks: Blocks, clocks: Sequence[Sequence[float]]) -> list[float]:
    """Milliseconds per update of each block, from one clock of all ranks; mean over the ranks."""
    seconds = [fmean(rank[block + 1] - rank[block] for rank in clocks) for block in range(2 * blocks.pairs)]
    return [1e3 * second / blocks.length for second in seconds]


def added(blocks: Blocks, figures: Sequence[float]) -> list[float]:
    """With minus without, for each pair of neighbouring blocks."""
    return [
        figures[block] - figures[block + 1] if blocks.with_it(block) else figures[block + 1] - figures[block]
        for block in range(0, len(figures), 2)
    ]


def median_range(values: Sequence[float]) -> list[float]:
    """Where the median lies with 95 % confidence: order statistics by the sign test, all values if they are few."""
    ordered, half_width = sorted(values), 0.98 * math.sqrt(len(values))
    low = max(0, math.floor(len(values) / 2 - half_width))
    high = min(len(values) - 1, math.ceil(len(values) / 2 + half_width))
    return [round(ordered[low], 3), round(ordered[high], 3)]


def compared(blocks: Blocks, clocks: Sequence[Sequence[Sequence[float]]]) -> dict[str, Any]:
    """What the clocks of all ranks say; medians over the pairs."""
    wall, cpu = (per_update(blocks, [[stamp[clock] for stamp in rank] for rank in clocks]) for clock in (0, 1))
    added_wall, added_cpu = added(blocks, wall), added(blocks, cpu)
    plain = [figure for index, figure in enumerate(wall) if not blocks.with_it(index)]
    return {
        "added_wall_ms": round(median(added_wall), 3),
        "added_cpu_ms": round(median(added_cpu), 3),
        "ranges": {"added_wall_ms": median_range(added_wall), "added_cpu_ms": median_range(added_cpu)},
        "plain_update_ms": round(median(plain), 3),
        "pairs": blocks.pairs,
        "block": blocks.length,
    }


def run_benchmark(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    measure: Callable[..., dict[str, Any]],
    render: Callable[[dict[str, Any]], Table],
) -> int:
    """Read the command line, with the options of :class:`Blocks` besides those of ``parser``, measure and print."""
    parser.add_argument("--pairs", type=int, default=60, help="pairs of blocks (default 60)")
    parser.add_argument("--block", type=int, default=5, help="updates in a block (default 5)")
    options = vars(parser.parse_args(arguments))
    as_json = options.pop("json")
    for name in ("pairs", "block"):
        if options[name] < 1:
            parser.error(f"--{name} {options[name]} must be at least 1")
    figures = measure(**options)
    show(figures, render(figures), as_json)
    return 0
