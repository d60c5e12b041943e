"""The examples, as a reader would run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = ("--updates", "3", "--layers", "2", "--width", "16", "--context", "16", "--batch-size", "2")


def run(example: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / example), *SMALL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("example", ["train_lightning.py", "train_fabric.py"])
def test_training_survives_a_fault_and_proves_it(example: str) -> None:
    result = run(example, "--fault", "backward@1:3", "--fault", "backward@2:0:exception", "--verify")
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.strip()]
    assert lines[-1] == "bit-exact: yes"
    assert sum("bit-exact" in line for line in lines) == 1
    for action in ("retry", "redo"):  # in the faulted run's summary, and only there
        assert sum("recovered" in line and action in line for line in lines) == 1


def test_fault_that_cannot_strike_is_refused() -> None:
    result = run("train_fabric.py", "--fault", "backward@3:1")
    assert result.returncode == 2
    assert "backward@3:1 never strikes: there are updates 0 to 2" in result.stderr


# Python runs this when it starts: as if Lightning was not installed
WITHOUT_LIGHTNING = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric"):
            raise ImportError(f"{name} is not installed")
sys.meta_path.insert(0, Blocker())
"""


def launch(example: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    accelerate = Path(sys.executable).with_name("accelerate")
    config = EXAMPLES / "accelerate_hsdp.yaml"
    command = [str(accelerate), "launch", "--config_file", str(config), str(EXAMPLES / example), *SMALL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, **environment})


def test_accelerate_survives_a_fault_and_proves_it_without_lightning(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_LIGHTNING)
    faults = ("--fault", "backward@1:3", "--fault", "backward@2:0:exception")
    result = launch("train_accelerate.py", *faults, "--verify", PYTHONPATH=str(tmp_path))
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.strip()]
    assert lines[-1] == "bit-exact: yes"
    for action in ("retry", "redo"):
        assert sum("recovered" in line and action in line for line in lines) == 1


def test_the_same_fault_ends_a_training_that_nothing_protects() -> None:
    result = launch("train_accelerate.py", "--fault", "backward@1:3", ACCELERATE_USE_ACCELPACT="false")
    assert result.returncode != 0
    assert "update 0" in result.stdout
    assert "Connection" in result.stderr
