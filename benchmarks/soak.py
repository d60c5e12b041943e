"""Many random faults in one run: the end state is exact, and memory, open files and threads stay what they were.

``python -m benchmarks.soak --json``: 4 ranks on Gloo. The schedule follows from ``--seed`` and is part of the result, so
that any failure can be run again. The meaning of each figure is in ``docs/benchmarks.md``.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from rich.table import Table

from benchmarks.arguments import parser as arguments_of
from benchmarks.arguments import show
from benchmarks.ranks import run_ranks
from benchmarks.training import Workload, fit
from lightning_accelpact.recovery.communicator import await_endings
from lightning_accelpact.recovery.digest import state_digest
from lightning_accelpact.recovery.fault import Fault, FaultKind, FaultPoint

_WARM_UP = 3
_SPACING = 2  # updates from one fault to the next
# A repair must be under way for the last two to strike in it, so they come on top of another fault of the same update
_POINTS = [point for point in FaultPoint if point not in (FaultPoint.REPAIR, FaultPoint.VALIDATE)]
_SETTLING_S = 90.0
_IN_A_REPAIR = 0.1  # share of the faults that are followed by one in their repair


def schedule(seed: int, faults: int, ranks: int) -> list[Fault]:
    """Random faults, one in every other update, some with a second one in their repair."""
    draw = random.Random(seed)
    plan = []
    for index in range(faults):
        update = _WARM_UP + index * _SPACING
        plan.append(
            Fault(point=draw.choice(_POINTS), update=update, rank=draw.randrange(ranks), kind=draw.choice(list(FaultKind)))
        )
        if draw.random() < _IN_A_REPAIR:
            # It is at this frontier or the next one, whichever comes
            plan.append(Fault(point=FaultPoint.VALIDATE, update=update, rank=draw.randrange(ranks)))
    return plan


class Resources(pl.Callback):
    """Memory, open files and threads of this process after every update."""

    def __init__(self) -> None:
        self.samples: list[dict[str, int]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self._look()

    def settle(self) -> None:
        """Once more when all that was retired has ended; a wait that was given up holds it up for its whole timeout."""
        await_endings(_SETTLING_S)
        self._look()

    def _look(self) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.samples.append(
            {
                "resident_kb": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
                "files": len(os.listdir("/proc/self/fd")),
                "threads": threading.active_count(),
            }
        )


def train(workload: Workload, plan: list[Fault]) -> dict[str, Any]:
    """The job of one rank."""
    resources = Resources()
    begun = time.perf_counter()
    trainer = fit(workload, faults=plan, callbacks=[resources])
    seconds = time.perf_counter() - begun
    resources.settle()
    return {
        "digest": state_digest(trainer.lightning_module, trainer.optimizers),
        "seconds": seconds,
        "incidents": [incident.to_dict() for incident in trainer.strategy.incidents],
        "pending": [str(fault) for fault in trainer.strategy.pending_faults],
        "samples": resources.samples,
    }


def growth(records: Sequence[dict[str, Any]], name: str) -> list[int]:
    """What a resource is after a quarter of the run and at its end, at the most on any rank.

    Of ten updates the lowest counts: a retired group keeps its files and threads for a moment, a leak keeps them for good.
    """

    def lowest(record: dict[str, Any], begin: int) -> int:
        return min(sample[name] for sample in record["samples"][begin:][:10])

    begins = len(records[0]["samples"]) // 4, -10
    return [max(lowest(record, begin) for record in records) for begin in begins]


def measure(*, ranks: int, layers: int, width: int, faults: int, seed: int) -> dict[str, Any]:
    """Train with the faults and without."""
    plan = schedule(seed, faults, ranks)
    workload = Workload(updates=_WARM_UP + faults * _SPACING + 2, layers=layers, width=width)
    records = run_ranks(train, ranks, workload, plan)
    undisturbed = run_ranks(train, ranks, workload, [])
    actions = [incident["action"] for incident in records[0]["incidents"]]
    return {
        "bit_exact": [record["digest"] for record in records] == [record["digest"] for record in undisturbed],
        "faults": len(plan),
        "not_struck": [text for record in records for text in record["pending"]],
        "repairs": len(actions),
        "actions": {action: actions.count(action) for action in sorted(set(actions))},
        "resident_kb": growth(records, "resident_kb"),
        "files": growth(records, "files"),
        "threads": growth(records, "threads"),
        "seconds": round(max(record["seconds"] for record in records), 1),
        "ranks": ranks, "layers": layers, "width": width, "seed": seed,
        "schedule": [str(fault) for fault in plan],
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; 1 if the end state differs from that of the undisturbed run."""
    parser = arguments_of("soak", __doc__, layers=4, width=32)
    parser.add_argument("--faults", type=int, default=200, help="random faults (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="decides which (default 0)")
    options = vars(parser.parse_args(arguments))
    as_json = options.pop("json")
    if options["faults"] < 1:
        parser.error(f"--faults {options['faults']} must be at least 1")
    figures = measure(**options)
    table = Table("figure", "value", title="Random faults in one run")
    for name, value in figures.items():
        table.add_row(name, str(value))
    show(figures, table, as_json)
    return 0 if figures["bit_exact"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
