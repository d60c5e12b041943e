"""Traces: which ranks fail, at which step, and how; they follow from the seed alone."""

from __future__ import annotations

import random

from benchmarks.failbench.preset import Preset
from benchmarks.failbench.record import InjectedFault


def schedule(trace: str, *, seed: int, preset: Preset, warned: bool = False) -> tuple[InjectedFault, ...]:
    """The faults of a trace, the same for every architecture and mechanism.

    Rank 0 is spared: the paper strikes workers, never a parameter server, and its clock times the run.

    Args:
        trace: One of :data:`~benchmarks.failbench.cell.TRACES`.
        seed: Of the draw.
        preset: When faults may strike, and how many ranks there are.
        warned: Announce each fault; ``preempt`` always does, and a hang never.

    Raises:
        ValueError: if there is no such trace.
    """
    if trace == "none":
        return ()
    draw = random.Random(f"failbench {trace} {seed}")
    step = draw.randint(*preset.fault_steps)
    rank = draw.randrange(1, preset.ranks - 2)
    warning = preset.warning_s if warned or trace == "preempt" else 0.0
    if trace == "hang":
        return (InjectedFault(kind="hang", rank=rank, step=step),)
    if trace == "preempt":
        return (InjectedFault(kind="preempt", rank=rank, step=step, warning_s=warning),)
    if trace == "F1":
        return (_kill(rank, step, warning),)
    if trace == "F2":
        return (_kill(rank, step, warning), _kill(rank + 2, step, warning))
    if trace == "F3":
        victims = draw.sample(range(1, preset.ranks), 3)
        return tuple(_kill(victim, step + index * preset.spacing, warning) for index, victim in enumerate(victims))
    raise ValueError(f"trace={trace!r} has no schedule")


def _kill(rank: int, step: int, warning: float) -> InjectedFault:
    return InjectedFault(kind="kill", rank=rank, step=step, warning_s=warning)
