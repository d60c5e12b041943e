"""The summary at the end of a fit: all ranks' records put together, and its form for the terminal."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import median
from typing import Any

from rich import box
from rich.console import Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lightning_accelpact.goodput.ledger import TimeClass
from lightning_accelpact.goodput.model import Recovery, saved_against_restart

# Incidents shown in the terminal; the log keeps all
MAX_ROWS = 20

_REPAIR_PHASES = ("admit_s", "agree_s", "retire_s", "rebuild_s", "rebind_s", "validate_s")
_DURATIONS = ("detect_s", *_REPAIR_PHASES, "total_s", "redo_s")


@dataclass(frozen=True, kw_only=True)
class IncidentSummary:
    """One incident as all ranks saw it. Durations are seconds, each the highest of any rank.

    Args:
        generation: Number of the repair that ended it.
        frontier: Committed frontier, the highest of any rank.
        fault_ranks: The ranks whose own collective failed, or all of them if everybody learnt it by a notice.
        phase: Where those ranks stood; several phases are joined by ``/``.
        action: The incident's name.
        outcome: ``recovered``, ``fail_stop``, or empty if it was still under way.
        detect_s: From the fault to its observation.
        admit_s: Local admission.
        agree_s: Exchange of the reports.
        retire_s: Retirement of the old communicators.
        rebuild_s: Their replacement.
        rebind_s: Redirecting references.
        validate_s: Validation and release.
        total_s: From observation to release.
        redo_s: Running micro-batches again.
        redone_micro_batches: How many were run again, the highest of any rank.
        checkpoint: Frontier of the newest checkpoint at the time, None if there was none.
    """

    generation: int
    frontier: int
    fault_ranks: tuple[int, ...]
    phase: str
    action: str
    outcome: str
    detect_s: float
    admit_s: float
    agree_s: float
    retire_s: float
    rebuild_s: float
    rebind_s: float
    validate_s: float
    total_s: float
    redo_s: float
    redone_micro_batches: int
    checkpoint: int | None

    @property
    def checkpoint_age(self) -> int:
        """Updates that a restart would have replayed; without a checkpoint, all of them."""
        return self.frontier - (self.checkpoint or 0)

    def to_dict(self) -> dict[str, Any]:
        """The incident as plain JSON values, with the checkpoint's age."""
        return {**asdict(self), "fault_ranks": list(self.fault_ranks), "checkpoint_age": self.checkpoint_age}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> IncidentSummary:
        """The inverse of :meth:`to_dict`.

        Raises:
            KeyError: if a field is missing.
            TypeError: if a value has another form.
        """
        return cls(**{**_own(cls, values), "fault_ranks": tuple(values["fault_ranks"])})


@dataclass(frozen=True, kw_only=True)
class GoodputSummary:
    """What a run's time went to and what its incidents cost.

    Args:
        ranks: Ranks whose records are in it.
        world_size: Ranks of the run.
        elapsed_s: Rank-seconds, that is, summed over the ranks.
        attempts: How often the run was started, the most of any rank.
        wall_s: Seconds from the start of the program (of the first attempt), the longest of any rank.
        totals: Rank-seconds of every class.
        updates: Updates committed by every rank since the program started.
        replayed: Updates that ran again after a restart, since the checkpoint did not have them; the most of any rank.
        update_s: Productive seconds of a typical update: the median over ranks of each one's median, which a slow
            first update does not move; 0 without updates. A replay takes more (it loads data, too), so an estimate
            made from it errs on the low side.
        guard_s: Seconds spent in the boundary guard, the highest of any rank.
        incidents: In the order in which they happened.
        restart_s: Seconds that a relaunch and reload would take, None if unknown.
        saved_s: Estimated wall-clock seconds saved against restarts from the last checkpoint
            (:func:`~.model.saved_against_restart`); a lower bound where ``restart_s`` is None.
    """

    ranks: int
    world_size: int
    attempts: int
    elapsed_s: float
    wall_s: float
    totals: dict[TimeClass, float]
    updates: int
    update_s: float
    guard_s: float
    incidents: tuple[IncidentSummary, ...]
    restart_s: float | None
    saved_s: float
    replayed: int = 0

    @property
    def goodput(self) -> float:
        """Productive share of the elapsed time, 0 to 1."""
        return self.totals[TimeClass.PRODUCTIVE] / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def recovered(self) -> tuple[IncidentSummary, ...]:
        """The incidents after which the run went on from memory."""
        return tuple(incident for incident in self.incidents if incident.outcome == "recovered")

    def with_restarts_of(self, restart_s: float | None) -> GoodputSummary:
        """The same, with the time saved against restarts that take so long.

        Raises:
            ValueError: if ``restart_s`` is negative or not finite.
        """
        recoveries = _recoveries(self.incidents)
        saved_s = saved_against_restart(recoveries, update_s=self.update_s, restart_s=restart_s, guard_s=self.guard_s)
        return replace(self, restart_s=restart_s, saved_s=saved_s)

    def to_dict(self) -> dict[str, Any]:
        """The summary as plain JSON values, with the goodput."""
        totals = {cls.value: seconds for cls, seconds in self.totals.items()}
        incidents = [incident.to_dict() for incident in self.incidents]
        return {**asdict(self), "totals": totals, "incidents": incidents, "goodput": self.goodput}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GoodputSummary:
        """The inverse of :meth:`to_dict`.

        Raises:
            KeyError: if a field is missing.
            TypeError, AttributeError: if a value has another form.
            ValueError: if a class of time is unknown.
        """
        totals = {TimeClass(name): seconds for name, seconds in values["totals"].items()}
        incidents = tuple(map(IncidentSummary.from_dict, values["incidents"]))
        values = {"replayed": 0, **values}  # not in those of earlier versions
        return cls(**{**_own(cls, values), "totals": totals, "incidents": incidents})


def _own(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass, without the values that follow from them and whatever else there may be."""
    return {field.name: values[field.name] for field in fields(cls)}


def summarize(rank_records: Sequence[Mapping[str, Any]], *, restart_s: float | None = None) -> GoodputSummary:
    """Put the records of several ranks together. Incidents of one generation (of one attempt) on different ranks are one incident.

    Args:
        rank_records: Per rank a mapping of plain JSON values: ``rank``, ``world_size``, ``elapsed`` (seconds),
            ``totals`` (seconds by the value of :class:`TimeClass`; absent ones are 0), ``updates`` (committed since
            the program started), ``update_s`` (median productive seconds of an update; 0 without updates),
            ``incidents`` (each an ``Incident.to_dict()``, and ``checkpoint``: the frontier of the newest
            checkpoint at its time, or None) and, if they are not 1 and 0, ``attempts`` and ``replayed``.
        restart_s: Seconds to relaunch the job and reload the checkpoint, None if unknown.

    Raises:
        ValueError: if there is no record, or one has an unknown class or a negative amount.
        KeyError: if a record lacks a field.
    """
    if not rank_records:
        raise ValueError("summarize() needs the record of at least one rank, got none")
    totals = _add_totals(record["totals"] for record in rank_records)
    update_s = median(record["update_s"] for record in rank_records)
    guard_s = max(record["totals"].get(TimeClass.GUARD.value, 0.0) for record in rank_records)
    incidents = _merge_incidents(rank_records)
    return GoodputSummary(
        ranks=len(rank_records),
        world_size=max(record["world_size"] for record in rank_records),
        attempts=max(record.get("attempts", 1) for record in rank_records),
        elapsed_s=sum(record["elapsed"] for record in rank_records),
        wall_s=max(record["elapsed"] for record in rank_records),
        totals=totals,
        updates=min(record["updates"] for record in rank_records),
        replayed=max(record.get("replayed", 0) for record in rank_records),
        update_s=update_s,
        guard_s=guard_s,
        incidents=incidents,
        restart_s=restart_s,
        saved_s=saved_against_restart(_recoveries(incidents), update_s=update_s, restart_s=restart_s, guard_s=guard_s),
    )


def _add_totals(totals: Iterable[Mapping[str, float]]) -> dict[TimeClass, float]:
    added = dict.fromkeys(TimeClass, 0.0)
    for of_rank in totals:
        for name, seconds in of_rank.items():
            added[TimeClass(name)] += seconds
    return added


def _recoveries(incidents: Iterable[IncidentSummary]) -> list[Recovery]:
    return [
        Recovery(
            checkpoint_age=incident.checkpoint_age,
            detect_s=incident.detect_s,
            repair_s=incident.total_s,
            redo_s=incident.redo_s,
        )
        for incident in incidents
        if incident.outcome == "recovered"
    ]


def _merge_incidents(rank_records: Iterable[Mapping[str, Any]]) -> tuple[IncidentSummary, ...]:
    groups: defaultdict[tuple[int, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for record in rank_records:
        # An incident that was never repaired may carry its predecessor's generation: one rank's are never merged
        seen: Counter[tuple[int, int]] = Counter()
        for incident in record["incidents"]:
            repair = (incident.get("attempt", 0), incident["generation"])
            if incident["outcome"] == "fail_stop":  # the attempt's last one; not all ranks learn of it the same way
                groups[repair[:1]].append(incident)
                continue
            groups[*repair, seen[repair]].append(incident)
            seen[repair] += 1
    in_time = sorted(groups.values(), key=lambda incidents: min(incident["time"] for incident in incidents))
    return tuple(_merge(incidents) for incidents in in_time)


def _merge(incidents: Sequence[Mapping[str, Any]]) -> IncidentSummary:
    """One incident from its records on different ranks."""
    origins = [incident for incident in incidents if incident["source"] == "exception"] or incidents
    checkpoints = [incident["checkpoint"] for incident in incidents]
    return IncidentSummary(
        generation=incidents[0]["generation"],
        frontier=max(incident["frontier"] for incident in incidents),
        fault_ranks=tuple(sorted(incident["rank"] for incident in origins)),
        phase=_join(incident["phase"] for incident in origins),
        action=_join(incident["action"] for incident in incidents),
        outcome=_join(incident["outcome"] for incident in incidents),
        **{name: max(incident[name] for incident in incidents) for name in _DURATIONS},
        redone_micro_batches=max(incident["redone_micro_batches"] for incident in incidents),
        # A checkpoint counts once every rank has written its part
        checkpoint=None if None in checkpoints else min(checkpoints),
    )


def _join(values: Iterable[str]) -> str:
    """The different values in the order of their first appearance; normally there is one."""
    return "/".join(dict.fromkeys(value for value in values if value))


def render(summary: GoodputSummary) -> RenderableType:
    """The summary for a terminal of 80 columns or more. Its words are ASCII, so that it can be printed anywhere."""
    parts: list[RenderableType] = [Text(_headline(summary), style="bold"), _time_table(summary)]
    if summary.incidents:
        shown = summary.incidents[-MAX_ROWS:]
        parts += [_incident_table(shown), Text(_INCIDENT_KEY, style="dim"), _repair_table(shown)]
        if len(shown) < len(summary.incidents):
            parts.append(Text(f"The last {len(shown)} of {len(summary.incidents)} incidents are shown."))
    if summary.attempts > 1:
        parts.append(Text(_replays(summary)))
    return Padding(Group(*parts, Text(_savings(summary))), (1, 0))


_INCIDENT_KEY = """\
update: the committed frontier. rank: where the fault was raised. redone: micro-
batches run again, and the time it took. age: updates that a restart would have
replayed, from the last checkpoint or, without one, from update 0."""


def _headline(summary: GoodputSummary) -> str:
    ranks = str(summary.ranks) if summary.ranks == summary.world_size else f"{summary.ranks} of {summary.world_size}"
    attempts = f", {summary.attempts} attempts" if summary.attempts > 1 else ""
    return (
        f"Goodput {summary.goodput:.1%}: {_count(summary.updates, 'update')} committed in {_seconds(summary.wall_s)} s"
        f" ({ranks} {'ranks' if summary.world_size > 1 else 'rank'}{attempts})"
    )


def _time_table(summary: GoodputSummary) -> RenderableType:
    table = _table()
    _add_columns(table, "class", justify="left")
    _add_columns(table, "rank-seconds", "share", justify="right")
    badput = sorted((cls for cls in TimeClass if cls is not TimeClass.PRODUCTIVE), key=lambda c: -summary.totals[c])
    for cls in (TimeClass.PRODUCTIVE, *badput):
        seconds = summary.totals[cls]
        if seconds > 0 or cls is TimeClass.PRODUCTIVE:
            style = "green" if cls is TimeClass.PRODUCTIVE else None
            table.add_row(_words(cls.value), _seconds(seconds), _share(seconds, summary.elapsed_s), style=style)
    table.add_section()
    table.add_row("elapsed", _seconds(summary.elapsed_s), "")
    return _titled("Where the time went", table)


def _incident_table(incidents: Iterable[IncidentSummary]) -> RenderableType:
    table = _table()
    _add_columns(table, "update", "rank", justify="right")
    _add_columns(table, "phase", "action", "outcome", justify="left")
    _add_columns(table, "redone", "in s", "age", justify="right")
    for one in incidents:
        names = (one.phase.replace("/", "/\n"), _words(one.action), _words(one.outcome))
        redone = (str(one.redone_micro_batches), _seconds(one.redo_s))
        table.add_row(str(one.frontier), _ranges(one.fault_ranks), *names, *redone, str(one.checkpoint_age))
    return _titled("Incidents", table)


def _repair_table(incidents: Iterable[IncidentSummary]) -> RenderableType:
    names = ("detect_s", *_REPAIR_PHASES, "total_s")
    table = _table()
    _add_columns(table, "update", *(name.removesuffix("_s") for name in names), justify="right")
    for one in incidents:
        table.add_row(str(one.frontier), *(_milliseconds(getattr(one, name)) for name in names))
    return _titled("Detection and repair in ms, on the slowest rank (total: without detection)", table)


def _replays(summary: GoodputSummary) -> str:
    seconds = _seconds(summary.totals[TimeClass.REPLAYED_UPDATES])
    replayed = _count(summary.replayed, "update")
    return f"\n{_count(summary.attempts - 1, 'restart')} from a checkpoint: {replayed} replayed, {seconds} rank-seconds."


def _savings(summary: GoodputSummary) -> str:
    recovered = summary.recovered
    if not recovered:
        return f"\nNothing was recovered from memory. The boundary guard took {_seconds(summary.guard_s)} s."
    kept = any(one.checkpoint is not None for one in recovered)
    origin = "the last checkpoint" if kept else "update 0 (no checkpoint)"
    replay = _count(sum(one.checkpoint_age for one in recovered), "update")
    bound = (
        "Lower bound: relaunch and reload are counted as 0 s."
        if summary.restart_s is None
        else f"Relaunch and reload are counted as {_seconds(summary.restart_s)} s, {_count(len(recovered), 'restart')}."
    )
    return (
        f"\nEstimated time saved against a restart from {origin}:\n"
        f"{_seconds(summary.saved_s)} s: {replay} of {_seconds(summary.update_s)} s not replayed,"
        f" less repairs, redone work and guard.\n{bound}"
    )


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)


def _add_columns(table: Table, *names: str, justify: JustifyMethod) -> None:
    for name in names:
        table.add_column(name, justify=justify, overflow="fold")


def _titled(title: str, table: Table) -> RenderableType:
    return Padding(Group(Text(title, style="bold"), table), (1, 0, 0, 0))


def _words(name: str) -> str:
    return name.replace("_", " ")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _seconds(seconds: float) -> str:
    if abs(seconds) >= 1000:
        return f"{seconds:,.0f}"
    return "<0.01" if 0 < seconds < 0.005 else f"{seconds:.2f}"


def _milliseconds(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:,.0f}" if milliseconds >= 1000 else f"{milliseconds:.1f}"


def _share(part: float, whole: float) -> str:
    share = part / whole if whole > 0 else 0.0
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def _ranges(ranks: Sequence[int]) -> str:
    """Sorted ranks as in ``0-3,8``; of more than four ranges the first three and how many ranks are left out."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = runs if len(runs) <= 4 else runs[:3]
    names = [str(first) if first == last else f"{first}-{last}" for first, last in shown]
    left_out = len(ranks) - sum(last - first + 1 for first, last in shown)
    return ",".join([*names, f"+{left_out}"] if left_out else names)
