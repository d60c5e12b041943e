"""What a run may repair is what the envelope in force qualifies; on real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jobs
import pytest
from cluster import RankResult, run_ranks, values

from lightning_accelpact.recovery.action import Action, Phase
from lightning_accelpact.recovery.envelope import Entry, Envelope
from lightning_accelpact.recovery.fault import Fault, FaultPoint
from lightning_accelpact.recovery.stack import Stack

BACKWARD = [Fault(point=FaultPoint.BACKWARD, update=1, rank=1)]


def fit(envelope: Path | str, faults: list[Fault] = BACKWARD, **options: Any) -> list[RankResult]:
    return run_ranks(jobs.fit_with, 2, {"faults": faults, "updates": 3, "envelope": envelope, **options})


def test_auto_measures_once_and_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    results = run_ranks(jobs.fit_with, 2, {"faults": BACKWARD, "updates": 3}, env={"XDG_CACHE_HOME": str(tmp_path)})
    assert [value["incidents"][0]["action"] for value in values(results)] == ["retry", "retry"]
    assert "this stack is new here" in results[0].output
