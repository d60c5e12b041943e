"""The runner: one cell, from its schedule to its record."""

from __future__ import annotations

import platform
import random
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.failbench import registry
from benchmarks.failbench.accounting import account
from benchmarks.failbench.cell import Cell
from benchmarks.failbench.coordinator import Coordinator, RunFailed
from benchmarks.failbench.preset import Preset
from benchmarks.failbench.preset import preset as preset_of
from benchmarks.failbench.record import Evidence, Outcome, Record
from benchmarks.failbench.trace import schedule


def measure(
    cell: Cell,
    *,
    preset: str | Preset = "tiny",
    seed: int = 0,
    detect_timeout_s: float | None = None,
    folder: Path | None = None,
) -> Record:
    """Run a cell with real processes and real faults.

    Args:
        cell: What to run.
        preset: Sizes, or the name of a preset.
        seed: Of weights, data and schedule.
        detect_timeout_s: What process groups wait for a silent peer, seconds; None for the preset's.
        folder: Where checkpoints go, in a folder of their own that is removed afterwards; None for the system's
            temporary one.

    Returns:
        The record. A run that came to no proper end is one, too: ``outcome`` is ``failed``.

    Raises:
        ValueError: if there is no such preset, architecture or mechanism.
    """
    sizes = preset_of(preset) if isinstance(preset, str) else preset
    if detect_timeout_s is not None:
        sizes = replace(sizes, detect_timeout_s=detect_timeout_s)
    architecture, mechanism = registry.architecture(cell.architecture), registry.mechanism(cell.mechanism)
    blank = Record(
        cell=cell,
        seed=seed,
        preset=sizes.name,
        versions=_versions(),
        world_size=sizes.ranks,
        outcome=Outcome.FAILED,
        evidence=Evidence.MEASURED,
        detect_timeout_seconds=sizes.detect_timeout_s,
        save_interval_steps=mechanism.save_interval(sizes.interval),
    )
    if why := mechanism.why_not(architecture):
        return replace(blank, outcome=Outcome.INFEASIBLE, evidence=Evidence.INFEASIBLE, reason=why)
    faults = schedule(cell.trace, seed=seed, preset=sizes, warned=mechanism.needs_warning)
    offset_s = random.Random(f"offset {seed}").uniform(0.0, sizes.offset_s)
    scratch = Path(tempfile.mkdtemp(prefix="failbench-", dir=folder))
    run = Coordinator(cell, sizes, seed, faults, offset_s, scratch)
    try:
        run.run()
    except RunFailed as error:
        blank = replace(blank, reason=str(error))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # a member that was killed may have left anything
    return account(
        blank, run.timeline, faults, sizes, degrades=architecture.degrades, contributors=architecture.contributors
    )


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__, "backend": "gloo", "device": "cpu"}
