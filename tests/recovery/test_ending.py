"""How a script ends is told to the run that it has made; each case in an interpreter of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SETUP = """
import os, sys, threading
from lightning_accelpact.recovery import ending

class Run:
    def __init__(self, name):
        self.name = name
    def on_exception(self, error):
        print(self.name, "exception", type(error).__name__, flush=True)
    def on_exit(self):
        print(self.name, "exit", flush=True)

class Stops(Run):
    def on_exception(self, error):
        raise SystemExit(86)
class StopsAtExit(Run):
    def on_exit(self):
        raise SystemExit(86)

"""

CASES: dict[str, tuple[str, int, list[str]]] = {
    "well": ("ending.watch(Run('it'))", 0, ["it exit"]),
    "unwatched": ("", 0, []),
    "an error": ("ending.watch(Run('it')); raise ValueError", 1, ["it exception ValueError", "it exit"]),
    "an interrupt": (
        "ending.watch(Run('it')); raise KeyboardInterrupt", -2, ["it exception KeyboardInterrupt", "it exit"]
    ),
    "sys.exit is no error": ("ending.watch(Run('it')); sys.exit(3)", 3, ["it exit"]),
    "the latest one counts": ("ending.watch(Run('old')); ending.watch(Run('new'))", 0, ["new exit"]),
    "a child's end is not its own": (
        "ending.watch(Run('it')); child = os.fork()\nif child: os.waitpid(child, 0)\nelse: print('child')",
        0, ["child", "it exit"],
    ),
    "an error stops it": ("ending.watch(Stops('it')); raise ValueError", 86, ["it exit"]),
    "it stops at the exit": ("ending.watch(StopsAtExit('it')); print('last words')", 86, ["last words"]),
}  # fmt: skip


def run(code: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return subprocess.run([sys.executable, "-c", SETUP + code], env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("case", CASES)
def test_the_run_is_told_how_the_script_ends(case: str) -> None:
    code, status, told = CASES[case]
    result = run(code)
    assert (result.returncode, result.stdout.splitlines()) == (status, told), result.stderr


def test_the_error_is_printed_as_always() -> None:
    error = run("ending.watch(Run('it')); raise ValueError('the cause')").stderr
    assert error.startswith("Traceback")
    assert error.endswith("ValueError: the cause\n")
