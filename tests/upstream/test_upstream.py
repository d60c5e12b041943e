"""The command that runs Lightning's tests: what it changes about them, and that it tells passed from failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.upstream.checkout import Checkout
from tests.upstream.exclusions import NOT_APPLICABLE, reason_against, unknown
from tests.upstream.execution import outcome_of
from tests.upstream.translation import translate

ROOT = Path(__file__).parents[2]

UNIT = """
from {package}.strategies import ModelParallelStrategy
from {suite}.helpers import RunIf

@RunIf(min_torch="2.4", min_cuda_gpus=2, standalone=True)
def test_name():
    assert "HSDP" in ModelParallelStrategy.__mro__[1].__name__
    assert ModelParallelStrategy.__name__ == "ModelParallelStrategy"

def test_wrong():
    assert "gpu" == "cuda" == "tpu"

def test_set_timeout():
    raise AssertionError("never run")
"""

TWO_RANKS = """
import os
import torch
from {package}.strategies import ModelParallelStrategy
from lightning.fabric import Fabric

def _on_two_ranks():
    fabric = Fabric(accelerator="cuda", devices=2, strategy="ddp")
    fabric.launch()
    return fabric

def test_all_ranks_pass():
    assert _on_two_ranks().device == torch.device("cuda", int(os.environ["LOCAL_RANK"]))

def test_one_rank_fails():
    assert _on_two_ranks().global_rank == 0
"""

HELPERS = """
import pytest

def RunIf(min_torch):
    return pytest.mark.skipif(min_torch != "2.4", reason="another condition")
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the files of a checkout, but tests of our own in it."""
    files = {"pyproject.toml": "[tool.pytest.ini_options]", "src/version.info": "1.2.3"}
    for suite, package in (("tests_fabric", "lightning.fabric"), ("tests_pytorch", "lightning.pytorch")):
        names = {"suite": suite, "package": package}
        folder = f"tests/{suite}"
        files |= {f"{folder}/{name}": "" for name in ("__init__.py", "conftest.py", "strategies/__init__.py")}
        files[f"{folder}/helpers/__init__.py"] = HELPERS
        files[f"{folder}/strategies/test_model_parallel.py"] = UNIT.format(**names)
        files[f"{folder}/strategies/test_model_parallel_integration.py"] = ""
    files["tests/tests_fabric/strategies/test_model_parallel_integration.py"] = TWO_RANKS.format(
        package="lightning.fabric"
    )
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def command(*arguments: object) -> subprocess.CompletedProcess:
    words = [sys.executable, "-m", "tests.upstream", *map(str, arguments)]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)


def test_it_tells_passed_from_failed_and_not_applicable(checkout: Path) -> None:
    done = command(checkout, "-k", "model_parallel.py")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("tests of lightning 1.2.3, run with lightning ")
    for suite in ("tests_fabric", "tests_pytorch"):
        module = f"{suite}/strategies/test_model_parallel.py"
        assert f"passed: {module}::test_name" in lines
        assert any(line.startswith(f"failed: {module}::test_wrong: ") for line in lines)
        assert any(line.startswith(f"not applicable: {module}::test_set_timeout: because ") for line in lines)
    assert "2 passed, 2 failed, 2 not applicable" in lines
    assert done.returncode == 1


def test_every_rank_counts(checkout: Path) -> None:
    lines = command(checkout, "-k", "rank", "--limit", "60").stdout.splitlines()
    module = "tests_fabric/strategies/test_model_parallel_integration.py"
    assert f"passed on 2 ranks: {module}::test_all_ranks_pass" in lines
    assert any(line.startswith(f"failed on 2 ranks: {module}::test_one_rank_fails: ") for line in lines)


def test_a_rank_that_did_not_come_to_the_end_is_a_failure() -> None:
    phase = {"when": "teardown", "outcome": "passed", "reason": "", "world_size": 2}
    assert outcome_of(0, [phase, phase], "").verdict == "passed"
    assert outcome_of(0, [phase], "").verdict == "failed"
    assert outcome_of(0, [], "").verdict == "failed"
    assert outcome_of(86, [phase, phase], "").verdict == "failed"
    assert "time limit" in outcome_of(None, [phase], "").reason


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    done = command(tmp_path)
    assert done.returncode == 2
    assert f"{tmp_path} is not a checkout of Lightning's sources" in done.stderr
    assert not done.stdout


def test_tests_that_cannot_be_imported_are_an_error(checkout: Path) -> None:
    (checkout / "tests/tests_fabric/strategies/test_model_parallel.py").write_text("import nothing_like_it")
    done = command(checkout)
    assert done.returncode == 2
    assert "No module named 'nothing_like_it'" in done.stderr


def test_nothing_but_the_device_changes_without_a_substitute() -> None:
    source = 'from a import ModelParallelStrategy\nx = torch.device("cuda", rank)\nf(accelerator="auto", devices=2)\n'
    assert translate(source, substitute=None) == (
        "from a import ModelParallelStrategy\nx = torch.device('cpu')\nf(accelerator='cpu', devices=2)"
    )


def test_what_parallelizes_a_model_shards_its_layers() -> None:
    source = "def _parallelize_it(model, device_mesh):\n    return anything(model)\n"
    assert translate(source, substitute="TrainerSubstitute") == (
        "def _parallelize_it(model, device_mesh):\n    from tests.upstream.substitutes import shard_layers\n"
        "    return shard_layers(model, device_mesh)"
    )


def test_exclusions_are_of_the_tests_there_are() -> None:
    modules = {name.partition("::")[0] for name in NOT_APPLICABLE}
    assert modules == set(Checkout.modules)
    first, *others = sorted(NOT_APPLICABLE)
    assert unknown([f"{first}[1-2]", *others]) == []
    assert unknown(others) == [first]
    assert reason_against(f"{first}[1-2]") == NOT_APPLICABLE[first]
