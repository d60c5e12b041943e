"""Connections destroyed from outside the processes: no micro-batch runs twice, and no bit changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jobs_external
import pytest
from cluster import free_port, run_ranks, values

from benchmarks.destroyer import Connection, SocketDestroyer, can_destroy, connections

pytestmark = pytest.mark.skipif(not can_destroy(), reason="ss -K needs root and a kernel with INET_DIAG_DESTROY")


def of_the_ranks(folder: Path, control_port: int) -> list[Connection]:
    """The training connections of the ranks that have started."""
    pids = [int(text) for text in (file.read_text() for file in folder.glob("pid*")) if text]
    return connections(pids, spared_ports=[control_port])


def test_destroyed_connections_cost_no_work(tmp_path: Path, reference: Any) -> None:
    options = {"updates": 60, "max_repairs_per_update": 50}
    port = free_port()
    with SocketDestroyer(lambda: of_the_ranks(tmp_path, port), every=0.5) as destroyer:
        results = values(
            run_ranks(jobs_external.fit, 4, str(tmp_path), options, env={"MASTER_PORT": str(port)})
        )
    assert destroyer.destroyed > 3
    expected = reference(**options)
    for rank, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        assert result["digest"] == wanted["digest"], f"rank {rank} differs"
        assert result["logged"] == wanted["logged"]
        assert result["incidents"]
        assert [incident["redone_micro_batches"] for incident in result["incidents"]] == [0] * len(result["incidents"])
