"""The switch of ``accelerate launch``: flags, the section of a configuration file, and what is wrong with them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accelerate_plugin.launch import variables

SCRIPT = """
import os
print({name: value for name, value in os.environ.items() if "ACCELPACT" in name})
"""
BASE = """
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
num_processes: 1
use_cpu: true
mixed_precision: 'no'
"""


def launch(folder: Path, section: str, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Accelerate's own command, as a user calls it."""
    (folder / "config.yaml").write_text(BASE + section)
    (folder / "script.py").write_text(SCRIPT)
    command = [str(Path(sys.executable).with_name("accelerate")), "launch"]
    return subprocess.run(
        [*command, "--config_file", str(folder / "config.yaml"), *flags, str(folder / "script.py")],
        capture_output=True, text=True, timeout=120, env={**os.environ, **environment},
    )  # fmt: skip


def test_the_section_reaches_the_script(tmp_path: Path) -> None:
    section = "accelpact_config:\n  use_accelpact: true\n  collective_timeout: 60\n"
    result = launch(tmp_path, section, "--accelpact_repair_budget", "70")
    assert result.returncode == 0, result.stderr
    said = {"ACCELERATE_USE_ACCELPACT": "true", "ACCELPACT_COLLECTIVE_TIMEOUT": "60", "ACCELPACT_REPAIR_BUDGET": "70"}
    for name, value in said.items():
        assert f"'{name}': '{value}'" in result.stdout


def test_the_environment_switches_off_what_the_section_switches_on(tmp_path: Path) -> None:
    result = launch(tmp_path, "accelpact_config:\n  use_accelpact: true\n", ACCELERATE_USE_ACCELPACT="false")
    assert result.returncode == 0, result.stderr
    assert "'ACCELERATE_USE_ACCELPACT': 'false'" in result.stdout


def test_a_misspelt_section_is_an_error(tmp_path: Path) -> None:
    result = launch(tmp_path, "acelpact_config:\n  use_accelpact: true\n")
    assert result.returncode != 0
    assert "unknown keys (['acelpact_config'])" in result.stderr


def test_without_the_entry_point_the_section_is_an_error(tmp_path: Path) -> None:
    result = launch(tmp_path, "accelpact_config:\n  use_accelpact: true\n", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.returncode != 0
    assert "unknown keys (['accelpact_config'])" in result.stderr


def test_flags_come_before_the_section() -> None:
    flags = {"use_accelpact": None, "accelpact_shard": "2", "accelpact_replicate": None}
    assert variables(flags, {"use_accelpact": True, "shard": 4, "faults": ["vote@1", "step@2:3"]}) == {
        "ACCELERATE_USE_ACCELPACT": "true", "ACCELPACT_SHARD": "2", "ACCELPACT_FAULTS": "vote@1,step@2:3",
    }  # fmt: skip


def test_the_environment_comes_before_the_section_and_after_flags() -> None:
    section = {"use_accelpact": True, "shard": 4, "repair_budget": 700}
    environment = {"ACCELERATE_USE_ACCELPACT": "false", "ACCELPACT_SHARD": "2"}
    assert variables({}, section, environment) == {"ACCELPACT_REPAIR_BUDGET": "700"}
    assert variables({"use_accelpact": True, "accelpact_shard": "8"}, section, environment) == {
        "ACCELERATE_USE_ACCELPACT": "true", "ACCELPACT_SHARD": "8", "ACCELPACT_REPAIR_BUDGET": "700",
    }  # fmt: skip


def test_nothing_said_is_nothing_done() -> None:
    assert variables({"use_accelpact": None, "accelpact_shard": None}, {}) == {}


@pytest.mark.parametrize(
    ("flags", "section", "words"),
    [
        ({}, {"use_accelpact": True, "colective_timeout": 60}, "accelpact_config.colective_timeout is no option"),
        ({}, {"collective_timeout": 60}, "has no use_accelpact"),
        ({}, {"use_accelpact": "maybe"}, "must be true or false"),
        ({}, {"use_accelpact": True, "shard": 0}, "shard=0"),
        ({"accelpact_shard": "2"}, {}, "without --use_accelpact"),
        ({"use_accelpact": True, "accelpact_shard": "two"}, {}, "--accelpact_shard='two'"),
    ],
)
def test_what_is_wrong_is_said(flags: dict[str, Any], section: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        variables(flags, section)


def python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python with these environment variables."""
    command = [sys.executable, "-c", code] if not arguments else [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"ACCELERATE_USE_ACCELPACT": "true"}, True),
        ({}, False),
        ({"ACCELERATE_USE_ACCELPACT": "true", "ACCELPACT_AUTOLOAD": "0"}, False),
    ],
)
def test_an_unchanged_script_is_looked_after_if_its_environment_says_so(
    environment: dict[str, str], expected: bool
) -> None:
    code = "import sys, accelerate; print('accelerate_plugin.adapter' in sys.modules)"
    result = python(code, **environment)
    assert (result.returncode, result.stdout.strip()) == (0, str(expected)), result.stderr


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"ACCELERATE_USE_ACCELPACT": "tru"}, "ACCELERATE_USE_ACCELPACT='tru' must be true or false"),
        ({"ACCELERATE_USE_ACCELPACT": "true", "ACCELPACT_SHRAD": "2"}, "did you mean ACCELPACT_SHARD"),
    ],
)
def test_a_misspelt_environment_ends_an_unchanged_script(environment: dict[str, str], words: str) -> None:
    result = python("from accelerate import Accelerator; Accelerator(cpu=True)", **environment)
    assert result.returncode != 0
    assert words in result.stderr


def test_a_script_can_be_run_by_the_package(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nprint(sys.argv[1:], os.environ['ACCELERATE_USE_ACCELPACT'], __name__, sys.path[0])"
    )
    result = python("", "-m", "accelerate_plugin", str(script), "--updates", "3")
    assert result.stdout.strip() == f"['--updates', '3'] true __main__ {tmp_path}", result.stderr
