"""The position of each of several ranks; that of one, from every moment of an epoch, is in ``tests/test_position.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import restarted
from cluster import run_ranks, values

JOB = {"TORCHELASTIC_RUN_ID": "a-job", "TORCHELASTIC_RESTART_COUNT": "0"}
RELAUNCHED = {**JOB, "TORCHELASTIC_RESTART_COUNT": "1"}
UPDATES = 11  # an epoch has 6


def run(folder: Path, ends: str, env: dict[str, str], trainer: Any, saves: Any, **options: Any) -> list[Any]:
    folder.mkdir(exist_ok=True)
    options = {"updates": UPDATES, "trainer_options": trainer, "checkpoint_options": saves, **options}
    return run_ranks(restarted.fit_with, 2, folder, ends, options, env=env, timeout=90)


def test_before_a_validation_whose_result_is_reduced(tmp_path: Path) -> None:
    assert_it_goes_on(tmp_path, {"val_check_interval": 4}, {"every_n_train_steps": 2}, 9, 8)


def test_workers_read_the_epoch_that_they_are_in(tmp_path: Path) -> None:
    """A worker begins to read as soon as there is an iterator, which must not be before the sampler knows the epoch."""
    assert_it_goes_on(tmp_path, {}, {"every_n_train_steps": 7}, 8, 7, workers=1)


def assert_it_goes_on(folder: Path, trainer: Any, saves: Any, stop: int, resumed: int, **options: Any) -> None:
    whole = values(run(folder / "whole", "-", JOB, trainer, saves, resume="never", **options))
    stopped = run(folder / "parts", f"stop@{stop}", JOB, trainer, saves, **options)
    assert [result.exit_code for result in stopped] == [86] * 2, stopped[0].output
    again = run(folder / "parts", "-", RELAUNCHED, trainer, saves, **options)
    assert f"at update {resumed}" in again[0].output
    for rank, (one, wanted) in enumerate(zip(values(again), whole, strict=True)):
        assert list(one["seen"]) == list(range(resumed + 1, UPDATES + 1)), rank
        for update, seen in one["seen"].items():
            assert seen == wanted["seen"][update], (rank, update)
        assert one["after"] == wanted["after"], rank
