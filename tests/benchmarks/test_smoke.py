"""The benchmarks run from the command line, at sizes too small for the times to mean anything."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from benchmarks import guard_overhead, repair, retention, soak
from benchmarks.destroyer import can_destroy
from benchmarks.lab import Lab, why_not
from benchmarks.pairs import Blocks, added, median_range, per_update

ROOT = Path(__file__).parents[2]
PHASES = ("detect", "admit", "agree", "retire", "rebuild", "rebind", "validate", "total")


def run(benchmark: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=240, cwd=ROOT)


@cache
def figures(benchmark: str, *arguments: str) -> dict[str, Any]:
    """The JSON object in the last line."""
    result = run(benchmark, "--json", "--width", "4", *arguments)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def repair_figures() -> dict[str, Any]:
    return figures("repair", "--layers", "2", "--faults", "2")


def overhead_figures(*arguments: str) -> dict[str, Any]:
    return figures("guard_overhead", "--layers", "2", "--pairs", "2", "--block", "2", *arguments)


def retention_figures() -> dict[str, Any]:
    return figures("retention", "--layers", "2", "--pairs", "2", "--block", "2")


def test_retention() -> None:
    found = retention_figures()
    assert found["kept_bytes"] > 0 < found["shard_bytes"]
    assert found["share_of_update"] == pytest.approx(found["added_wall_ms"] / found["plain_update_ms"], abs=1e-4)
    assert 0 < found["keeping_ms"] < found["plain_update_ms"]  # the collectives themselves do not count
    assert found["keeping_share"] == pytest.approx(found["keeping_ms"] / found["plain_update_ms"], abs=1e-4)


def test_repair() -> None:
    found = repair_figures()
    assert found["bit_exact"] is True
    assert (found["repairs"], found["ranks"], found["layers"]) == (2, 4, 2)
    measured = [*(f"{phase}_ms" for phase in PHASES), "plain_update_ms", "fault_to_commit_ms", "references"]
    for name in measured:
        low, high = found["ranges"][name]
        assert 0 < low <= found[name] <= high, name
    # No phase is longer than the repair, nor the repair than the way to the next update
    assert max(found["ranges"][f"{phase}_ms"][1] for phase in PHASES[1:-1]) <= found["ranges"]["total_ms"][1]
    assert found["total_ms"] < found["fault_to_commit_ms"]
    assert found["redone_micro_batches"] == 1


def test_repair_in_place() -> None:
    found = repair_figures()["retry"]
    assert found["bit_exact"] is True
    assert found["ranges"]["redone_micro_batches"] == [0, 0]
    assert 0 < found["total_ms"] <= found["fault_to_resumed_ms"] < found["fault_to_commit_ms"]


@pytest.mark.skipif(not can_destroy(), reason="ss -K needs root and a kernel with INET_DIAG_DESTROY")
def test_external_faults() -> None:
    found = figures("external_faults", "--layers", "2", "--updates", "60", "--every", "0.3")
    assert found["bit_exact"] is True
    assert found["destroyed"] > 0 < found["repairs"]
    assert found["redone_micro_batches"] == 0


def test_soak() -> None:
    found = figures("soak", "--layers", "2", "--faults", "20")
    assert found["bit_exact"] is True
    assert found["faults"] >= 20
    assert found["repairs"] >= found["faults"] - len(found["not_struck"]) - 5  # two may fall into one repair
    assert set(found["actions"]) <= {"preserve", "roll_forward", "retry", "redo"}
    assert found["schedule"] == [str(fault) for fault in soak.schedule(0, 20, 4)]
    # Some 15 repairs lie in between: one thing left open by each would be 15. A retired group ends in the background.
    for resource in ("files", "threads"):
        early, late = found[resource]
        assert late <= early + 8


@pytest.mark.skipif(bool(reason := why_not()), reason=reason or "never")
def test_faults_on_two_nodes() -> None:
    kinds = ("data sockets destroyed", "killed", "link cut 2 s", "lock held 5 s")
    result = run("faults", "--json", "--phase", "backward", *(part for kind in kinds for part in ("--kind", kind)))
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert (found["cells"], found["bit_exact"], found["fail_stop"]) == (4, 3, 1)
    assert found["hung"] == found["wrong"] == found["false_alarms"] == found["unexpected"] == 0
    assert [row["redone_micro_batches"] for row in found["rows"]] == [0] * 4


@pytest.mark.skipif(bool(reason), reason=reason or "never")
def test_the_nodes_are_gone_afterwards() -> None:
    with Lab() as lab:
        names = [lab.name(node) for node in lab.nodes]
        assert all(name in _namespaces() for name in names)
    assert not any(name in _namespaces() for name in names)


@pytest.mark.skipif(bool(reason), reason=reason or "never")
def test_the_nodes_are_gone_after_a_kill() -> None:
    script = "import time\nfrom benchmarks.lab import Lab\nwith Lab():\n    print('up', flush=True)\n    time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout.readline() == "up\n"
    mine = f"accelpact-{process.pid}-"
    assert mine in _namespaces()
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while mine in _namespaces() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert mine not in _namespaces()


def _namespaces() -> str:
    return subprocess.run(["ip", "netns"], check=True, capture_output=True, text=True).stdout


def test_references_grow_with_the_layers() -> None:
    """Each sharded block names its two communicators, so the count is taken from the model and not a constant."""
    larger = figures("repair", "--layers", "4", "--faults", "1")
    assert larger["references"] - repair_figures()["references"] == 2 * 2


@pytest.mark.parametrize("arguments", [(), ("--boundary",)])
def test_guard_overhead(arguments: tuple[str, ...]) -> None:
    found = overhead_figures(*arguments)
    assert (found["pairs"], found["block"], found["ranks"], found["boundary"]) == (2, 2, 4, bool(arguments))
    assert found["plain_update_ms"] > 0
    for name in ("added_wall_ms", "added_cpu_ms"):
        low, high = found["ranges"][name]
        assert low <= found[name] <= high
    for name, length in (("share_50ms", 50), ("share_1s", 1000), ("share_220s", 220_000)):
        assert found[name] == pytest.approx(found["added_wall_ms"] / length, abs=1e-5)


@pytest.mark.parametrize(
    ("table", "first_line"),
    [
        (lambda: repair.render(repair_figures()), "Twice 2 repairs, 4 ranks, 2 layers: bit-exact"),
        (lambda: retention.render(retention_figures()), "Kept inputs: 2 pairs of 2 updates"),
        (lambda: guard_overhead.render(overhead_figures()), "Guarded minus plain updates: 2 pairs of 2 updates"),
    ],
)
def test_table(table: Callable[[], Table], first_line: str) -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table())
    text = " ".join(console.export_text().split())
    assert first_line in text
    assert "_ms" in text


@pytest.mark.parametrize("arguments", [("repair", "--faults", "0"), ("guard_overhead", "--pairs", "0")])
def test_nothing_to_measure_is_refused(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert "0 must be at least 1" in result.stderr


def test_a_constant_cost_comes_out_of_the_pairs() -> None:
    """3 ms more in each guarded update, on top of updates that grow slower and slower."""
    blocks = Blocks(pairs=4, length=2)
    clock = [0.0]
    for block in range(8):
        clock.append(clock[-1] + 2 * (0.100 + 0.001 * block + 0.003 * blocks.with_it(block)))
    differences = added(blocks, per_update(blocks, [clock, clock]))
    assert differences == pytest.approx([2.0, 4.0, 2.0, 4.0])  # the drift adds and subtracts 1 ms in turn


def test_range_of_the_median() -> None:
    assert median_range([3.0, 1.0, 2.0]) == [1.0, 3.0]
    low, high = median_range([float(value) for value in range(100)])
    assert 38 <= low < 49.5 < high <= 61
