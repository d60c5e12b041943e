"""Wherever in an epoch a checkpoint was written, the run that goes on from it takes the same steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import restarted
from cluster import run_ranks, values

JOB = {"TORCHELASTIC_RUN_ID": "a-job", "TORCHELASTIC_RESTART_COUNT": "0"}
RELAUNCHED = {**JOB, "TORCHELASTIC_RESTART_COUNT": "1"}
UPDATES = 14  # an epoch has 6

# Options of the Trainer and of its ModelCheckpoint, the update after which it stops, and of that it goes on from
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int, int]] = {
    "batch in the first epoch": ({}, {"every_n_train_steps": 2}, 5, 4),
    "batch before a validation": ({"val_check_interval": 4}, {"every_n_train_steps": 2}, 9, 8),
    "last batch of an epoch": ({}, {"every_n_train_steps": 6}, 8, 6),
    "validation in an epoch": ({"val_check_interval": 4}, {"every_n_train_steps": 0, "monitor": "val"}, 9, 8),
    "validation at an epoch's end": ({}, {"every_n_train_steps": 0, "every_n_epochs": 1}, 8, 6),
    "end of an epoch": ({}, {"every_n_train_steps": 0, "every_n_epochs": 1, "save_on_train_epoch_end": True}, 8, 6),
}


def run(folder: Path, ends: str, env: dict[str, str], trainer: Any, saves: Any, **options: Any) -> list[Any]:
    folder.mkdir(exist_ok=True)
    options = {"updates": UPDATES, "trainer_options": trainer, "checkpoint_options": saves, **options}
    return run_ranks(restarted.fit_with, 2, folder, ends, options, env=env, timeout=90)


@pytest.mark.parametrize("case", CASES)
def test_it_goes_on_from(case: str, tmp_path: Path) -> None:
    trainer, saves, stop, resumed = CASES[case]
    assert_it_goes_on(tmp_path, trainer, saves, stop, resumed)


def test_workers_begin_with_the_same_seeds(tmp_path: Path) -> None:
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
