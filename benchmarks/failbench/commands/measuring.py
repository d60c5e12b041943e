"""What `run` and `matrix` have in common: the preset, and the runner that they hand tasks to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.failbench import registry
from benchmarks.failbench.commands import CommandError
from benchmarks.failbench.matrix import Measure, Task
from benchmarks.failbench.record import Record

if TYPE_CHECKING:
    from benchmarks.failbench.preset import Preset


def preset_of(name: str) -> Preset:
    """The preset of a name.

    Raises:
        CommandError: if there is none.
    """
    from benchmarks.failbench.preset import PRESETS

    if name not in PRESETS:
        raise CommandError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def check_names(architectures: Sequence[str], mechanisms: Sequence[str]) -> None:
    """Find out before the first run whether there is what was asked for.

    Raises:
        UnknownName: if not.
    """
    for name in architectures:
        registry.architecture(name)
    for name in mechanisms:
        registry.mechanism(name)


def runner(preset: Preset, *, deadline_s: float | None) -> Measure:
    """What runs a task with a preset.

    Args:
        preset: Size of the workload.
        deadline_s: After this a run has failed, seconds; None for the preset's.
    """
    from benchmarks.failbench.runner import measure

    sizes = preset if deadline_s is None else replace(preset, deadline_s=deadline_s)

    def run(task: Task) -> Record:
        return measure(task.cell, preset=sizes, seed=task.seed, detect_timeout_s=task.detect_timeout_s)

    return run
