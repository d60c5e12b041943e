"""Failure rates out of own runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from written import write_run

from lightning_accelpact.cli import main
from lightning_accelpact.goodput.failures import FailureClass
from lightning_accelpact.goodput.observed import observed_failures, poisson_interval
from lightning_accelpact.goodput.presets import LLAMA_3
from lightning_accelpact.goodput.run import read_runs


# Exact limits, from the chi-square distribution with 2 n and 2 n + 2 degrees of freedom at 5 % and 95 %
@pytest.mark.parametrize(
    ("count", "low", "high"), [(0, 0, 2.996), (3, 0.818, 7.754), (10, 5.425, 16.962), (100, 84.139, 118.079)]
)
def test_limits_of_a_rate(count: int, low: float, high: float) -> None:
    assert poisson_interval(count) == (pytest.approx(low, rel=0.02), pytest.approx(high, rel=0.02))


def test_a_run_with_incidents_and_a_restart(tmp_path: Path) -> None:
    (run,) = read_runs([write_run(tmp_path)])
    summary = run.summary()
    failures = observed_failures([summary])
    # Three incidents and a restart
    assert failures.per_gpu_day.likely == pytest.approx(4 / (4 * summary.wall_s / 86_400))
    assert failures.per_gpu_day.low < failures.per_gpu_day.likely < failures.per_gpu_day.high
    assert failures.shares[FailureClass.NETWORK] == 0.75
    node, job = failures.shares[FailureClass.NODE], failures.shares[FailureClass.JOB]
    assert node / job == pytest.approx(LLAMA_3.shares[FailureClass.NODE] / LLAMA_3.shares[FailureClass.JOB])


def test_the_planner_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    assert main(["plan", "--workload", "paper16", "--log", str(tmp_path), "--days", "0", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["failures"]
    (run,) = read_runs([tmp_path])
    assert told["name"] == "observed"
    assert told["per_day"]["likely"] == pytest.approx(4 / 4 / run.summary().wall_s * 86_400 * 16)


@pytest.mark.parametrize("log", ["quiet", "missing"])
def test_a_log_without_failures_is_no_help(tmp_path: Path, capsys: pytest.CaptureFixture[str], log: str) -> None:
    write_run(tmp_path / "quiet", faults=(), killed_after=120)
    assert main(["plan", "--workload", "paper16", "--log", str(tmp_path / log)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert ("nothing has failed in" in line and "--failures-per-day" in line) or "missing" in line
