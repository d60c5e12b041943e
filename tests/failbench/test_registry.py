"""An architecture and a mechanism in a user's own file, made known by entry points, are like the packaged ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.failbench import registry
from benchmarks.failbench.record import Outcome, Record

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "examples" / "failbench_plugin.py"
PAGE = (ROOT / "docs" / "failbench.md").read_text()


def documented(language: str, beginning: str) -> str:
    """The code block of the page with such a beginning."""
    (block,) = [block for block in PAGE.split(f"```{language}\n")[1:] if block.startswith(beginning)]
    return block.partition("```")[0]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What an installation of the user's package leaves behind, with the entry points of the page."""
    metadata = tmp_path / "failbench_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: failbench-plugin\nVersion: 1.0\n")
    points = documented("toml", '[project.entry-points."accelpact.failbench.architectures"]')
    points = points.replace('project.entry-points."', "").replace('"]', "]").replace('"', "")
    (metadata / "entry_points.txt").write_text(points)
    (tmp_path / PLUGIN.name).write_text(PLUGIN.read_text())
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def said(installed: Path, *arguments: str) -> str:
    """By a command in a process that finds the user's package."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(installed), str(ROOT)))}
    command = [sys.executable, "-m", "benchmarks.failbench", *arguments]
    result = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=120, cwd=installed, env=environment
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_page_shows_the_file_and_it_is_short() -> None:
    assert documented("python", '"""An architecture and a mechanism') == PLUGIN.read_text()
    assert len(PLUGIN.read_text().splitlines()) <= 40


def test_they_are_behind_the_packaged_ones(installed: Path) -> None:
    assert registry.names(registry.ARCHITECTURES) == (*registry.packaged(registry.ARCHITECTURES), "butterfly")
    assert registry.names(registry.MECHANISMS) == (*registry.packaged(registry.MECHANISMS), "often")


def test_they_are_in_the_matrix(installed: Path) -> None:
    planned = said(installed, "matrix", "--dry-run").splitlines()
    assert {"butterfly/often/F1 (seed 0)", "butterfly/FT1/F3 (seed 0)", "A2/often/F2 (seed 0)"} <= set(planned)
    pairs = json.loads(said(installed, "list", "--json"))["compatibility"]
    assert pairs["butterfly/often"]["here"]["kind"] == "viable"
    assert pairs["butterfly/often"]["paper"] is None


def test_they_run(installed: Path) -> None:
    without, disturbed = map(
        Record.from_json, said(installed, "run", "butterfly/FT9/none", "butterfly/often/F1", "--json").splitlines()
    )
    assert (without.outcome, disturbed.outcome) == (Outcome.UNDISTURBED, Outcome.RECOVERED)
    assert disturbed.weights_sha256 == without.weights_sha256
    assert disturbed.save_interval_steps == 1
    assert len(disturbed.save_seconds) == disturbed.steps + disturbed.lost_steps


def test_a_name_that_is_taken_is_refused(installed: Path) -> None:
    points = installed / "failbench_plugin-1.0.dist-info" / "entry_points.txt"
    points.write_text("[accelpact.failbench.architectures]\nA2 = failbench_plugin:Butterfly\n")
    with pytest.raises(ValueError, match="two entry points of accelpact.failbench.architectures have the name 'A2'"):
        registry.names(registry.ARCHITECTURES)


def test_a_class_that_is_not_there_is_named(installed: Path) -> None:
    points = installed / "failbench_plugin-1.0.dist-info" / "entry_points.txt"
    points.write_text("[accelpact.failbench.mechanisms]\nmine = failbench_plugin:Nothing\n")
    with pytest.raises(
        ValueError, match="mine = failbench_plugin:Nothing of accelpact.failbench.mechanisms leads nowhere"
    ):
        registry.mechanism("mine")
