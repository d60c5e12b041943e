"""The console script, on files like those that the callback writes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_accelpact.cli import main
from lightning_accelpact.goodput import append_jsonl, summarize
from lightning_accelpact.recovery.incident import Incident


def incident(rank: int, **changes: Any) -> dict[str, Any]:
    record = Incident(
        rank=rank,
        number=1,
        generation=1,
        time=100.0,
        source="exception" if rank == 3 else "notice",
        reason="RuntimeError: connection reset",
        phase="backward",
        frontier=3,
        action="redo",
        outcome="recovered",
        total_s=0.02 + rank / 1000,
        redo_s=0.5,
    )
    return {**record.to_dict(), "checkpoint": None, **changes}


def rank_record(rank: int, world_size: int, **changes: Any) -> dict[str, Any]:
    totals = {"productive": 6.0, "group_repair": 2.0, "guard": 2.0}
    incidents = [incident(rank)]
    base = {"rank": rank, "world_size": world_size, "elapsed": 10.0, "totals": totals, "updates": 6}
    return {**base, "update_s": 0.75, "incidents": incidents, **changes}


def write(path: Path, records: Sequence[dict[str, Any]], *, incidents: Sequence[dict[str, Any]] = ()) -> Path:
    """What one rank appends for a run whose summary is made of these ranks' records."""
    append_jsonl(path, [{"kind": "incident", **one} for one in incidents])
    append_jsonl(path, [{"kind": "summary", "time": 200.0, **summarize(records, restart_s=7.0).to_dict()}])
    return path


def reported(capsys: pytest.CaptureFixture[str], *files: Path) -> list[dict[str, Any]]:
    """The summaries that ``accelpact report --json`` prints."""
    assert main(["report", "--json", *map(str, files)]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def as_json(*records: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(summarize(records, restart_s=7.0).to_dict()))


def test_whole_run_from_the_file_of_any_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [rank_record(rank, 4) for rank in range(4)]
    files = [write(tmp_path / f"goodput-rank{rank}.jsonl", records, incidents=[incident(rank)]) for rank in range(4)]
    assert reported(capsys, files[2]) == reported(capsys, *files) == [as_json(*records)]


def test_text_shows_goodput_and_incident(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "log.jsonl", [rank_record(3, 1)])
    assert main(["report", str(file)]) == 0
    text = capsys.readouterr().out
    for expected in ("60.0%", "backward", "redo", "group repair", "7.00 s"):
        assert expected in text


def test_failed_run_is_put_together_from_its_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [rank_record(rank, 4, elapsed=10.0 + rank) for rank in range(4)]
    files = [write(tmp_path / f"{one['rank']}.jsonl", [one], incidents=one["incidents"]) for one in records]
    assert reported(capsys, *files) == [as_json(*records)]
    assert reported(capsys, *files[1:]) == [as_json(*records[1:])]


def test_last_run_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.jsonl"
    write(path, [rank_record(0, 2)], incidents=[incident(0, frontier=99)])
    last = rank_record(0, 2, updates=11, incidents=[incident(0, frontier=5)])
    write(path, [last], incidents=last["incidents"])
    assert reported(capsys, path) == [as_json(last)]


def test_says_what_it_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "log.jsonl", [rank_record(0, 1)])
    append_jsonl(path, [{"kind": "incident", **incident(0)}])
    with path.open("a") as file:
        file.write('{"kind": "inci')
    assert main(["report", str(path)]) == 0
    errors = capsys.readouterr().err
    assert "left unfinished (lines: 1)" in errors
    assert "skipped a later run" in errors


def test_files_of_different_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [write(tmp_path / f"{size}.jsonl", [rank_record(0, size)]) for size in (2, 4)]
    assert main(["report", *map(str, files)]) == 1
    assert "runs with [2, 4] ranks, are not of one run" in capsys.readouterr().err


def test_missing_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.jsonl"
    append_jsonl(path, [{"kind": "incident", **incident(0)}])
    assert main(["report", str(path)]) == 1
    assert f"{path} holds no summary" in capsys.readouterr().err


CHANGES = [{"totals": {"unheard_of": 1.0}}, {"incidents": [{"fault_ranks": []}]}, {"totals": 3}]


@pytest.mark.parametrize("change", CHANGES)
def test_other_version_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]) -> None:
    append_jsonl(tmp_path / "log.jsonl", [{"kind": "summary", **as_json(rank_record(0, 1)), **change}])
    assert main(["report", str(tmp_path / "log.jsonl")]) == 1
    assert "another version of accelpact" in capsys.readouterr().err


def test_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "nothing.jsonl")]) == 1
    assert "nothing.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["report"], ["repor", "x"]])
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2


def test_needs_no_torch() -> None:
    code = "import sys; from lightning_accelpact import cli; assert 'torch' not in sys.modules; cli.main(['--version'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("accelpact ")
