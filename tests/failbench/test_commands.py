"""The command line: what it prints, what it says to bad input, and that it goes on after an interrupt."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from failbench_records import PAPER_LIKE, continued, halted, like, made, paper_like

from benchmarks.failbench.__main__ import main
from benchmarks.failbench.cell import TRACES
from benchmarks.failbench.commands import matrix as matrix_command
from benchmarks.failbench.commands import run as run_command
from benchmarks.failbench.matrix import Measure, Task
from benchmarks.failbench.record import Outcome, Record, append_record, read_records

DECIDE = ["decide", "--arch", "A2", "--mtbf", "3600"]


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """Records like the paper's."""
    path = tmp_path / "records.jsonl"
    for record in paper_like():
        append_record(path, record)
    return path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    """Tasks that were run, by a runner that makes its records."""
    ran: list[Task] = []

    def run(task: Task) -> Record:
        ran.append(task)
        timed = {} if task.detect_timeout_s is None else {"detect_timeout_seconds": task.detect_timeout_s}
        if task.cell.trace == "hang" or task.cell.mechanism == "FT9" and task.cell.trace != "none":
            return halted(task.cell.architecture, task.cell.trace, seed=task.seed, **timed)
        return made(str(task.cell), seed=task.seed)

    use(monkeypatch, run)
    return ran


def use(monkeypatch: pytest.MonkeyPatch, run: Callable[[Task], Record]) -> None:
    def runner(*_: Any, **__: Any) -> Measure:
        return run

    for command in (matrix_command, run_command):
        monkeypatch.setattr(command, "runner", runner)


def said(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert main(arguments) == status
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error, one line."""
    assert main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def last_line(text: str) -> Any:
    return json.loads(text.splitlines()[-1])


def test_a_matrix_ends_with_its_report(
    capsys: pytest.CaptureFixture[str], measured: list[Task], tmp_path: Path
) -> None:
    path = tmp_path / "new.jsonl"
    small = ["matrix", "--architectures", "A2", "A4", "--mechanisms", "FT1", "FT7", "FT9", "--records", str(path)]
    found = last_line(said(capsys, *small, "--json"))
    assert found["coverage"]["tuples"] == 189
    assert found["coverage"]["run"] == 2 * 3 * 3 - 3
    assert found["cells"]["A4/FT7/F1"]["outcomes"] == {"degenerate": 1}
    assert {one["verdict"] for one in found["findings"]} <= {"holds here", "does not", "not measured"}
    count = len(measured)
    assert count == 2 * 3 * 3 - 3 + 2 + 2  # and without a fault, and hangs
    said(capsys, *small)
    assert len(measured) == count  # nothing again


def test_an_interrupted_matrix_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(task: Task) -> Record:
        if task.cell.trace == "F2":
            raise KeyboardInterrupt
        return made(str(task.cell))

    use(monkeypatch, run)
    path = tmp_path / "new.jsonl"
    assert main(["matrix", "--architectures", "A3", "--mechanisms", "FT1", "--records", str(path)]) == 130
    assert "the same command goes on from there" in " ".join(capsys.readouterr().err.split())
    assert [str(one.cell) for one in read_records([path])] == ["A3/FT9/none", "A3/FT1/F1"]


def test_a_failure_is_the_exit_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use(monkeypatch, lambda task: made(str(task.cell), outcome=Outcome.FAILED, reason="not over after 90 s"))
    path = str(tmp_path / "new.jsonl")
    assert "not over after 90 s" in said(capsys, "run", "A2/FT1/F1", status=1)
    said(capsys, "matrix", "--architectures", "A3", "--mechanisms", "FT1", "--records", path, status=1)
    assert "X" in capsys.readouterr().out or Path(path).exists()


def test_a_dry_run_runs_nothing(capsys: pytest.CaptureFixture[str], measured: list[Task], tmp_path: Path) -> None:
    text = said(
        capsys,
        "matrix",
        "--dry-run",
        "--architectures",
        "A3",
        "--mechanisms",
        "FT1",
        "--records",
        str(tmp_path / "none"),
    )
    assert text.splitlines() == ["A3/FT9/none (seed 0)", *(f"A3/FT1/F{number} (seed 0)" for number in (1, 2, 3))]
    assert not measured


def test_run_prints_records_that_can_be_read(
    capsys: pytest.CaptureFixture[str], measured: list[Task], tmp_path: Path
) -> None:
    path = tmp_path / "records.jsonl"
    text = said(capsys, "run", "A2/FT1/F1", "A4/FT7/F1", "--seed", "3", "--json", "--records", str(path))
    assert [Record.from_json(line) for line in text.splitlines()] == read_records([path])
    assert [(str(task.cell), task.seed) for task in measured] == [("A2/FT1/F1", 3)]
    assert "A2/FT1/F1" in said(capsys, "run", "A2/FT1/F1")


def test_report(capsys: pytest.CaptureFixture[str], records: Path) -> None:
    text = " ".join(said(capsys, "report", "--records", str(records)).split())
    assert "holds here" in text
    assert "the paper: 10 of 133" in text
    # Two seeds; A6 continued with other weights, A5 has no run to compare with
    assert "those of the run without a fault: FT1 3 of 3, FT2 2 of 2" in text
    assert "FT9 0 of 4." in text


def test_pictures(capsys: pytest.CaptureFixture[str], records: Path, tmp_path: Path) -> None:
    said(capsys, "report", "--records", str(records), "--plots", str(tmp_path / "plots"))
    (picture,) = (tmp_path / "plots").iterdir()
    assert picture.name == "pareto-A2.svg"
    text = "".join(ElementTree.parse(picture).getroot().itertext())
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert text is not None


def test_without_matplotlib_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, records: Path, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", "--records", str(records), "--plots", str(tmp_path)]) == 1
    assert "pip install 'lightning-accelpact[plots]'" in capsys.readouterr().err


def test_decide(capsys: pytest.CaptureFixture[str], records: Path) -> None:
    assert "Take FT1." in said(capsys, *DECIDE, "--records", str(records))
    found = last_line(said(capsys, *DECIDE, "--records", str(records), "--json", "--warning-seconds", "2"))
    assert found["best"] == "FT4"
    assert {one["mechanism"] for one in found["candidates"]} == set(PAPER_LIKE)
    assert found["candidates"][1]["inputs"]["overhead"]["evidence"] == "measured"


def test_decide_without_a_choice(capsys: pytest.CaptureFixture[str], records: Path) -> None:
    text = said(capsys, *DECIDE, "--records", str(records), "--restore-cap", "0.001", status=1)
    assert "No mechanism meets the limits." in text


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "list")
    for name in ("A1-async", "A7", "FT1", "FT10", *TRACES):
        assert f"\n{name} " in text
    assert "A6 FT5, infeasible (the paper, inferred): " in text
    assert "A6 FT5, viable (this harness): Works here: " in text
    assert "A2 FT1, " not in text
    pairs = last_line(said(capsys, "list", "--json"))["compatibility"]
    assert pairs["A6/FT2"]["paper"]["kind"] == "infeasible"
    assert pairs["A6/FT2"]["here"]["kind"] == "viable"
    assert pairs["A2/FT10"]["paper"] is None


@pytest.mark.parametrize(("arguments", "message"), [
    (["run", "A9/FT1/F1"], "no architecture 'A9'; there are A1,"),
    (["run", "A2/FT0/F1"], "no mechanism 'FT0'; there are FT1,"),
    (["run", "A2/FT1/F1", "--preset", "huge"], "no preset 'huge'; there are tiny"),
    (["matrix", "--jobs", "0"], "--jobs 0 must be at least 1"),
    (["matrix", "--seeds", "0"], "seeds=0 must be at least 1"),
    (["report", "--records", "nowhere.jsonl"], "No such file"),
    ([*DECIDE[:-1], "0"], "--mtbf=0.0 must be finite and more than 0"),
    ([*DECIDE, "--restore-cap", "-1"], "--restore-cap=-1.0 must be at least 0"),
])  # fmt: skip
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert message in refused(capsys, *arguments)


def test_an_architecture_without_records_is_told_which_have_some(
    capsys: pytest.CaptureFixture[str], records: Path
) -> None:
    line = refused(capsys, "decide", "--arch", "A4", "--mtbf", "60", "--records", str(records))
    assert (
        line == "failbench: --arch='A4' has no measured recovery in the records; those with one: A1-async, A2, A5, A6"
    )


def test_records_of_several_presets_are_told_apart(capsys: pytest.CaptureFixture[str], records: Path) -> None:
    append_record(records, made("A2/FT1/F1", preset="cpu"))
    assert "choose one with --preset" in refused(capsys, "report", "--records", str(records))
    assert "A2/FT1/F1" in said(capsys, "report", "--records", str(records), "--preset", "cpu")
    assert "no records of preset huge" in refused(capsys, "report", "--records", str(records), "--preset", "huge")


@pytest.mark.parametrize("command", ["run", "matrix", "report", "decide", "list"])
def test_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_a_continuation_is_in_the_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    for record in (made("A6/FT9/none"), continued("A6"), like("FT1")):
        append_record(path, record)
    assert "continued" in said(capsys, "report", "--records", str(path))
