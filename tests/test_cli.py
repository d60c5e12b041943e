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
    return {**record.to_dict(), "checkpoint": None, "offset": 0, **changes}


def rank_record(rank: int, world_size: int, **changes: Any) -> dict[str, Any]:
    totals = {"productive": 6.0, "group_repair": 2.0, "guard": 2.0}
    incidents = [incident(rank)]
    base = {"rank": rank, "world_size": world_size, "elapsed": 10.0, "totals": totals, "updates": 6}
    return {**base, "update_s": 0.75, "incidents": incidents, **changes}


def write(path: Path, records: Sequence[dict[str, Any]], rank: int, *, ended: str | None = "completed") -> Path:
    """What one rank appends in one attempt: its own record, and the summary of these ranks' records."""
    own = next(one for one in records if one["rank"] == rank)
    place = {"rank": rank, "world_size": own["world_size"], "step": 0}
    kept = {"totals": own["totals"], "updates": own["updates"],
            "update_s": own["update_s"], "unfinished_s": 0.0, "ended": ended}  # fmt: skip
    append_jsonl(path, [{"kind": "start", "time": 50.0, **place}])
    append_jsonl(path, [{"kind": "incident", **one} for one in own["incidents"]])
    append_jsonl(path, [{"kind": "totals", "time": 50.0 + own["elapsed"], **kept}])
    append_jsonl(path, [{"kind": "summary", "time": 200.0, **summarize(records, restart_s=7.0).to_dict()}])
    return path


def reported(capsys: pytest.CaptureFixture[str], *files: Path | str) -> list[dict[str, Any]]:
    """The summaries that ``accelpact report --json`` prints."""
    assert main(["report", "--json", *map(str, files)]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(one.pop("run") for one in found)
    return found


def as_json(*records: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(summarize(records, restart_s=7.0).to_dict()))


def test_whole_run_from_the_file_of_any_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [rank_record(rank, 4) for rank in range(4)]
    files = [write(tmp_path / f"goodput-rank{rank}.jsonl", records, rank) for rank in range(4)]
    expected = [as_json(*records)]
    assert reported(capsys, files[2]) == reported(capsys, *files) == reported(capsys, tmp_path) == expected


def test_text_shows_goodput_and_incident(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "goodput-rank3.jsonl", [rank_record(3, 1)], 3)
    assert main(["report", str(file)]) == 0
    text = capsys.readouterr().out
    for expected in ("60.0%", "backward", "redo", "group repair", "7.00 s"):
        assert expected in text


def test_failed_run_is_put_together_from_its_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [rank_record(rank, 4, totals={"productive": 6.0, "guard": 4.0 + rank}) for rank in range(4)]
    records = [{**one, "elapsed": sum(one["totals"].values())} for one in records]
    files = [write(tmp_path / f"goodput-rank{one['rank']}.jsonl", [one], one["rank"], ended="failed") for one in records]
    assert reported(capsys, *files) == [as_json(*records)]
    assert reported(capsys, *files[1:]) == [as_json(*records[1:])]


def test_last_run_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "goodput-rank0.jsonl"
    write(path, [rank_record(0, 1, incidents=[incident(0, frontier=99)])], 0)
    last = rank_record(0, 1, updates=11, incidents=[incident(0, frontier=5)])
    write(path, [last], 0)
    assert reported(capsys, path) == [as_json(last)]


def test_several_runs_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [rank_record(0, 1), rank_record(0, 1, updates=9)]
    for name, record in zip(("first", "second"), records, strict=True):
        write(tmp_path / name / "goodput-rank0.jsonl", [record], 0)
    folders = [tmp_path / "first", tmp_path / "second"]
    assert reported(capsys, *folders) == [as_json(one) for one in records]
    assert main(["report", *map(str, folders)]) == 0
    text = capsys.readouterr().out
    assert text.index("- first -") < text.index("6 updates") < text.index("- second -") < text.index("9 updates")


def test_restart_seconds_can_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Of one rank of two, whose file holds the summary of both
    path = write(tmp_path / "goodput-rank0.jsonl", [rank_record(rank, 2) for rank in range(2)], 0)
    (plain,) = reported(capsys, path)
    (given,) = reported(capsys, path, "--restart-seconds", "100")
    assert given["saved_s"] - plain["saved_s"] == pytest.approx(100 - 7)


def test_says_what_it_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "goodput-rank0.jsonl", [rank_record(0, 1)], 0)
    with path.open("a") as file:
        file.write('{"kind": "inci')
    assert main(["report", str(path)]) == 0
    assert "skipped what rank 0 left unfinished when it was killed (lines: 1)" in capsys.readouterr().err


def test_files_of_different_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, size in enumerate((2, 4)):
        write(tmp_path / f"goodput-rank{rank}.jsonl", [rank_record(rank, size)], rank)
    assert main(["report", str(tmp_path)]) == 1
    assert "runs with [2, 4] ranks; give each run a folder" in capsys.readouterr().err


def test_two_files_of_one_rank_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [write(tmp_path / name, [rank_record(0, 1)], 0) for name in ("a.jsonl", "b.jsonl")]
    assert main(["report", *map(str, files)]) == 1
    assert "several files are of the ranks [0]" in capsys.readouterr().err


def test_a_run_that_has_not_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "goodput-rank0.jsonl"
    append_jsonl(path, [{"kind": "incident", **incident(0)}])
    assert main(["report", str(path)]) == 1
    assert f"{path} holds no run: its training has not begun" in capsys.readouterr().err


def test_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 1
    assert "holds no goodput-rank<rank>.jsonl: give the folder that was the log_dir" in capsys.readouterr().err


def test_a_root_folder_says_where_its_runs_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "accelpact" / "20260101-000000"
    run.mkdir(parents=True)
    write(run / "goodput-rank0.jsonl", [rank_record(0, 1)], 0)
    assert main(["report", str(tmp_path)]) == 1
    assert f"give one of {run}" in capsys.readouterr().err
    assert main(["report", str(run)]) == 0

@pytest.mark.parametrize("change", [{"totals": {"unheard_of": 1.0}}, {"totals": 3}, {"time": None}])
def test_other_version_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]) -> None:
    path = write(tmp_path / "goodput-rank0.jsonl", [rank_record(0, 1)], 0)
    append_jsonl(path, [{"kind": "totals", "time": 1.0, "updates": 1, **change}])
    assert main(["report", str(path)]) == 1
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
