"""Schedules follow from the seed alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.failbench.cell import TRACES
from benchmarks.failbench.preset import PRESETS
from benchmarks.failbench.trace import schedule

TINY = PRESETS["tiny"]


@pytest.mark.parametrize("trace", TRACES)
def test_the_same_seed_gives_the_same_schedule(trace: str) -> None:
    assert schedule(trace, seed=3, preset=TINY) == schedule(trace, seed=3, preset=TINY)


def test_seeds_differ() -> None:
    assert len({schedule("F3", seed=seed, preset=TINY) for seed in range(10)}) > 5


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("seed", range(20))
def test_the_paper_s_traces(name: str, seed: int) -> None:
    preset = PRESETS[name]
    (one,) = schedule("F1", seed=seed, preset=preset)
    first, second = schedule("F2", seed=seed, preset=preset)
    cascade = schedule("F3", seed=seed, preset=preset)
    assert first.step == second.step and second.rank == first.rank + 2
    assert len({fault.rank for fault in cascade}) == 3
    assert [fault.step - cascade[0].step for fault in cascade] == [0, preset.spacing, 2 * preset.spacing]
    for fault in (one, first, second, *cascade):
        assert 0 < fault.rank < preset.ranks and preset.warm_up < fault.step < preset.steps


def test_warnings() -> None:
    assert [fault.warning_s for fault in schedule("preempt", seed=0, preset=TINY)] == [TINY.warning_s]
    assert [fault.warning_s for fault in schedule("F2", seed=0, preset=TINY, warned=True)] == [TINY.warning_s] * 2
    assert [fault.warning_s for fault in schedule("hang", seed=0, preset=TINY, warned=True)] == [0.0]


def test_what_cannot_be_scheduled() -> None:
    with pytest.raises(ValueError, match="F9"):
        schedule("F9", seed=0, preset=TINY)
    with pytest.raises(ValueError, match="would strike at step"):
        replace(TINY, steps=20)
    with pytest.raises(ValueError, match="layers=4"):
        replace(TINY, layers=4)
