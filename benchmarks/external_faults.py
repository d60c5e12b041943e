"""Training while connections are destroyed from outside, again and again: what it costs, and that no bit changes.

``python -m benchmarks.external_faults --json``: 4 ranks on Gloo. Needs root and ``ss`` with ``-K``. The meaning of each
figure is in ``docs/benchmarks.md``.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.arguments import parser as arguments_of
from benchmarks.arguments import show
from benchmarks.destroyer import Connection, SocketDestroyer, can_destroy, connections
from benchmarks.ranks import run_ranks
from benchmarks.training import Workload, fit
from lightning_accelpact.recovery.digest import state_digest


def train(workload: Workload, folder: str) -> dict[str, Any]:
    """The job of one rank."""
    place = {"pid": os.getpid(), "control_port": int(os.environ["MASTER_PORT"])}
    Path(folder, f"rank{os.environ['RANK']}").write_text(json.dumps(place))
    begun = time.perf_counter()
    trainer = fit(workload)
    return {
        "digest": state_digest(trainer.lightning_module, trainer.optimizers),
        "seconds": time.perf_counter() - begun,
        "incidents": [incident.to_dict() for incident in trainer.strategy.incidents],
    }


def training_connections(folder: Path) -> list[Connection]:
    """Those of the ranks that have started, but for the control plane's."""
    places = [json.loads(text) for text in (file.read_text() for file in folder.glob("rank*")) if text]
    return connections([place["pid"] for place in places], {place["control_port"] for place in places})


def measure(*, ranks: int, layers: int, width: int, updates: int, every: float, seed: int) -> dict[str, Any]:
    """Train undisturbed, then with a connection destroyed at even intervals."""
    workload = Workload(updates=updates, layers=layers, width=width)
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = run_ranks(train, ranks, workload, folder)
    with tempfile.TemporaryDirectory() as folder:
        destroyer = SocketDestroyer(lambda: training_connections(Path(folder)), every=every, seed=seed)
        with destroyer:
            records = run_ranks(train, ranks, workload, folder)
    incidents = [incident for record in records for incident in record["incidents"]]
    return {
        "bit_exact": [record["digest"] for record in records] == [record["digest"] for record in undisturbed],
        "destroyed": destroyer.destroyed,
        "repairs": len(records[0]["incidents"]),
        "redone_micro_batches": sum(incident["redone_micro_batches"] for incident in incidents),
        "repair_ms": round(1e3 * median(incident["total_s"] for incident in incidents), 3) if incidents else None,
        "seconds": round(max(record["seconds"] for record in records), 3),
        "undisturbed_seconds": round(max(record["seconds"] for record in undisturbed), 3),
        "ranks": ranks, "layers": layers, "width": width, "updates": updates, "every_s": every, "seed": seed,
    }  # fmt: skip


def render(figures: dict[str, Any]) -> Table:
    """The figures as a table for people."""
    table = Table("figure", "value", title="Connections destroyed from outside")
    for name, value in figures.items():
        table.add_row(name, str(value))
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if the end state differs from that of the undisturbed run."""
    parser = arguments_of("external_faults", __doc__, layers=8, width=64)
    parser.add_argument("--updates", type=int, default=600, help="updates, about a minute's (default 600)")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two destructions (default 0.5)")
    parser.add_argument("--seed", type=int, default=0, help="decides which connections (default 0)")
    options = vars(parser.parse_args(arguments))
    as_json = options.pop("json")
    if not options["every"] > 0:
        parser.error(f"--every {options['every']} must be a number of seconds above 0")
    if not can_destroy():
        parser.error("ss -K cannot destroy a socket here: it needs root, and a kernel with INET_DIAG_DESTROY")
    figures = measure(**options)
    show(figures, render(figures), as_json)
    return 0 if figures["bit_exact"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
