"""How long a repair takes, phase by phase, and how long from the fault to the next committed update.

``python -m benchmarks.repair --json``: 4 ranks on Gloo; the figures come from the incident records that the strategy
keeps. The meaning of each figure is in ``docs/benchmarks.md``.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import lightning.pytorch as pl
from rich.table import Table

from benchmarks.arguments import parser as arguments_of
from benchmarks.arguments import show
from benchmarks.ranks import run_ranks
from benchmarks.training import Workload, fit
from lightning_accelpact.recovery.digest import state_digest
from lightning_accelpact.recovery.fault import Fault, FaultKind, FaultPoint

# Phases that the incident record has a timer for; detection is taken from the strike itself
_PHASES = ("admit", "agree", "retire", "rebuild", "rebind", "validate", "total")
_WARM_UP = 3  # updates at the start that do not count: FSDP and the optimizer set themselves up there
_SPACING = 4  # updates from one fault to the next


class CommitTimes(pl.Callback):
    """When each update was committed on this rank (Unix time)."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.times.append(time.time())


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """What one rank hands in.

    Args:
        digest: SHA-256 of weights and optimizer state at the end.
        committed: When each update was committed (Unix time).
        incidents: Its incident records.
    """

    digest: str
    committed: list[float]
    incidents: list[dict[str, Any]]


def train(workload: Workload, faults: list[Fault], uncommitted: str) -> RankRecord:
    """The job of one rank."""
    commits = CommitTimes()
    trainer = fit(workload, faults=faults, callbacks=[commits], uncommitted=uncommitted)
    return RankRecord(
        digest=state_digest(trainer.lightning_module, trainer.optimizers),
        committed=commits.times,
        incidents=[incident.to_dict() for incident in trainer.strategy.incidents],
    )


# For each value of ``uncommitted`` the faults that it is for, in turn: links, and what unwinds or does not unwind a pass
_KINDS = {
    "redo": (FaultKind.SOCKETS, FaultKind.EXCEPTION),
    "retry": (FaultKind.SOCKETS, FaultKind.COLLECTIVE),
}


def plan(count: int, ranks: int, kinds: Sequence[FaultKind]) -> list[Fault]:
    """Mid-backward faults on changing ranks."""
    return [
        Fault(
            point=FaultPoint.BACKWARD,
            update=_WARM_UP + index * _SPACING,
            rank=(index + index // ranks) % ranks,
            kind=kinds[index % 2],
        )
        for index in range(count)
    ]


class Repair:
    """One repair, as all ranks recorded it.

    Args:
        incidents: The incident record of every rank.

    Raises:
        RuntimeError: if the records are not one of every rank, or one of them did not end in recovery.
    """

    def __init__(self, incidents: Sequence[dict[str, Any]], world_size: int) -> None:
        ranks = sorted(incident["rank"] for incident in incidents)
        outcomes = {incident["outcome"] for incident in incidents}
        if ranks != list(range(world_size)) or outcomes != {"recovered"}:
            raise RuntimeError(f"a repair has records of ranks {ranks} with outcomes {outcomes}: {list(incidents)}")
        self._incidents = incidents
        # The victim's record goes back to the strike, which comes before all else
        self.struck_at = min(incident["time"] - incident["detect_s"] for incident in incidents)
        self.update = max(incident["frontier"] for incident in incidents)

    def figures(self, committed: Sequence[Sequence[float]]) -> dict[str, float]:
        """Milliseconds, each of the slowest rank, and the number of references.

        Args:
            committed: For every rank, when each update was committed.
        """
        slowest = {f"{phase}_ms": 1e3 * self._most(f"{phase}_s") for phase in _PHASES}
        return {
            "detect_ms": 1e3 * (self._most("time") - self.struck_at),
            **slowest,
            "fault_to_resumed_ms": 1e3 * (max(one["time"] + one["total_s"] for one in self._incidents) - self.struck_at),
            "fault_to_commit_ms": 1e3 * (max(times[self.update] for times in committed) - self.struck_at),
            "references": self._most("references"),
            "redone_micro_batches": self._most("redone_micro_batches"),
        }

    def _most(self, name: str) -> float:
        return max(incident[name] for incident in self._incidents)


def repairs(records: Iterable[RankRecord], world_size: int) -> list[Repair]:
    """The incident records of all ranks, put together by the generation that ended them."""
    by_generation: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        for incident in record.incidents:
            by_generation[incident["generation"]].append(incident)
    return [Repair(incidents, world_size) for _, incidents in sorted(by_generation.items())]


def plain_updates(records: Sequence[RankRecord], struck: set[int]) -> list[float]:
    """Seconds from commit to commit on the slowest rank, of every warm update that no fault struck."""
    updates = range(_WARM_UP, len(records[0].committed))
    return [
        max(record.committed[update] - record.committed[update - 1] for record in records)
        for update in updates
        if update not in struck
    ]


def measure(*, ranks: int, layers: int, width: int, faults: int) -> dict[str, Any]:
    """Train with faults and without, and put the figures together; medians over the repairs.

    Raises:
        RuntimeError: if a fault was not repaired by all ranks together.
    """
    workload = Workload(updates=_WARM_UP + faults * _SPACING, layers=layers, width=width)
    undisturbed = [record.digest for record in run_ranks(train, ranks, workload, [], "retry")]
    redo, retry = (_disturbed(workload, ranks, faults, way, undisturbed) for way in ("redo", "retry"))
    sizes = {"repairs": faults, "ranks": ranks, "layers": layers, "width": width}
    return {**redo, "retry": retry, **sizes, "bit_exact": redo["bit_exact"] and retry["bit_exact"]}


def _disturbed(workload: Workload, ranks: int, faults: int, way: str, undisturbed: list[str]) -> dict[str, Any]:
    """The figures of one run with faults, which are answered one way."""
    injected = plan(faults, ranks, _KINDS[way])
    records = run_ranks(train, ranks, workload, injected, way)
    found = repairs(records, ranks)
    if len(found) != faults:
        raise RuntimeError(f"{faults} faults were injected, but {len(found)} repairs are on record")
    committed = [record.committed for record in records]
    figures = [repair.figures(committed) for repair in found]
    plain = [1e3 * seconds for seconds in plain_updates(records, {fault.update for fault in injected})]
    columns = {name: [figure[name] for figure in figures] for name in figures[0]} | {"plain_update_ms": plain}
    return {
        **{name: round(median(values), 3) for name, values in columns.items()},
        "ranges": {name: [round(min(values), 3), round(max(values), 3)] for name, values in columns.items()},
        "bit_exact": [record.digest for record in records] == undisturbed,
    }


def render(figures: dict[str, Any]) -> Table:
    """The figures as a table for people."""
    bits = "bit-exact" if figures["bit_exact"] else "NOT bit-exact"
    title = f"Twice {figures['repairs']} repairs, {figures['ranks']} ranks, {figures['layers']} layers: {bits}"
    table = Table("figure (slowest rank)", title=title)
    for way in ("redo", "retry"):
        table.add_column(f"{way}: median (lowest to highest)", justify="right")
    for name in figures["ranges"]:
        table.add_row(name, *(_cell(part, name) for part in (figures, figures["retry"])))
    return table


def _cell(figures: dict[str, Any], name: str) -> str:
    low, high = figures["ranges"][name]
    return f"{figures[name]:.2f} ({low:.2f} to {high:.2f})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if the end state differs from that of the undisturbed run."""
    parser = arguments_of("repair", __doc__, layers=32, width=64)
    parser.add_argument("--faults", type=int, default=12, help="injected faults (default 12)")
    options = vars(parser.parse_args(arguments))
    as_json = options.pop("json")
    if options["faults"] < 1:
        parser.error(f"--faults {options['faults']} must be at least 1")
    figures = measure(**options)
    show(figures, render(figures), as_json)
    return 0 if figures["bit_exact"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
