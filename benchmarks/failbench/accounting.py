"""From what was seen of a run to its record."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.failbench.cell import NO_MECHANISM
from benchmarks.failbench.messages import StepLog
from benchmarks.failbench.preset import Preset
from benchmarks.failbench.record import InjectedFault, Outcome, Record
from benchmarks.failbench.timeline import Recovery, Timeline


def account(
    blank: Record,
    timeline: Timeline,
    faults: Sequence[InjectedFault],
    preset: Preset,
    *,
    degrades: bool,
    contributors: Callable[[int], int],
) -> Record:
    """Fill in a record.

    Args:
        blank: With all that was known before the run; its reason is not empty if the run failed.
        timeline: What was seen.
        faults: The schedule.
        preset: Sizes.
        degrades: Whether the architecture goes on natively.
        contributors: How many ranks of so many take samples.
    """
    log = timeline.log
    first, last = _struck(timeline), _resumed(timeline)
    before = [one for one in log if one.step >= preset.warm_up and (first is None or one.end < first)]
    after = [one for one in log if last is not None and one.begin >= last]
    committed = {one.step: one for one in log}
    rerun = _repeated(timeline, log)
    complete = sorted(timeline.done) if timeline.done else []
    record = replace(
        blank,
        faults=tuple(_with_times(fault, timeline) for fault in faults),
        state_bytes_per_rank=max(
            (one.state_bytes for one in timeline.done.values()), default=_reported_bytes(timeline)
        ),
        steps=len(committed),
        samples_per_step=log[0].samples if log else None,
        step_seconds_before=tuple(one.end - one.begin for one in before),
        step_seconds_after=tuple(one.end - one.begin for one in after),
        save_seconds=tuple(one.saved for one in log if one.saved),
        emergency_seconds=_emergencies(timeline),
        detect_seconds=_detections(timeline),
        restore_seconds=_restores(timeline),
        reform_seconds=tuple(_last_formed(one) - one.formed_from for one in _carried_out(timeline) if one.formed_from),
        respawn_seconds=tuple(one.ready - one.spawned for one in _carried_out(timeline) if one.ready and one.spawned),
        recover_seconds=_recoveries(timeline, log),
        fresh_starts=sum(any(said.fresh for said in one.restored.values()) for one in _carried_out(timeline)),
        lost_steps=len(rerun) if faults else None,
        lost_seconds=sum(one.end - one.begin for one in rerun) if faults else None,
        throughput_before=_throughput(before),
        throughput_after=_throughput(after, left=_left(timeline, preset, contributors)),
        losses=tuple(committed[step].loss for step in sorted(committed)),
        weights_sha256=_together([timeline.done[member].weights_sha256 for member in complete]) if complete else None,
        world_after=timeline.world_after or None,
    )
    return _judged(record, timeline, degrades)


def _judged(record: Record, timeline: Timeline, degrades: bool) -> Record:
    """With its outcome."""
    if record.reason:  # a run that failed
        return record
    if record.faults and not timeline.strikes:
        return replace(record, reason="no fault struck")
    missed = [fault.rank for fault in record.faults if fault.actual_s is None]
    notes = [
        one
        for recovery in timeline.recoveries
        for one in sorted({said.reason for said in recovery.restored.values()})
        if one
    ]
    if missed:
        notes.append(f"faults of ranks {', '.join(map(str, missed))} struck nobody, since these did not train any more")
    reason = "; ".join(notes)
    if not record.faults:
        return replace(record, outcome=Outcome.UNDISTURBED, reason=reason)
    if record.cell.mechanism == NO_MECHANISM and not degrades:
        halted = bool(timeline.recoveries) and not timeline.done
        return replace(record, outcome=Outcome.HALTED if halted else Outcome.FAILED, reason=reason)
    if not timeline.recoveries and not degrades:
        return replace(record, reason="nobody noticed the fault")
    if not timeline.recoveries:
        return replace(record, outcome=Outcome.CONTINUED, reason=reason)
    return replace(record, outcome=Outcome.RECOVERED, reason=reason)


def _struck(timeline: Timeline) -> float | None:
    """When the first fault struck."""
    return min((one.at for one in timeline.strikes.values()), default=None)


def _resumed(timeline: Timeline) -> float | None:
    """When training went on after the last fault."""
    carried_out = _carried_out(timeline)
    if carried_out:
        return max(one.restored for one in carried_out[-1].restored.values())
    return max((one.known for one in timeline.lost_peers), default=None)


def _carried_out(timeline: Timeline) -> list[Recovery]:
    return [one for one in timeline.recoveries if one.restored]


def _with_times(fault: InjectedFault, timeline: Timeline) -> InjectedFault:
    strike = timeline.strikes.get(fault.rank)
    if strike is None:
        return fault
    return replace(fault, planned_s=strike.planned - timeline.began, actual_s=strike.at - timeline.began)


def _strike_of(recovery: Recovery, timeline: Timeline) -> float | None:
    return min((timeline.strikes[one].at for one in recovery.lost if one in timeline.strikes), default=None)


def _detections(timeline: Timeline) -> tuple[float, ...]:
    """From each fault until the last survivor knew, or those that had to do with the lost rank."""
    found = []
    for recovery in timeline.recoveries:
        strike = _strike_of(recovery, timeline)
        if strike is not None and recovery.left:
            found.append(max(one.known for one in recovery.left.values()) - strike)
    for victim, strike in sorted(timeline.strikes.items(), key=lambda item: item[1].at):
        told = [one.known for one in timeline.lost_peers if one.member == victim]
        if told:
            found.append(max(told) - strike.at)
    return tuple(found)


def _emergencies(timeline: Timeline) -> tuple[float, ...]:
    """Of each emergency save the slowest rank's time, over ranks that were there for all of them."""
    told = [one.emergency for one in timeline.done.values()]
    told = told or [one.emergency for recovery in timeline.recoveries[-1:] for one in recovery.left.values()]
    count = max(map(len, told), default=0)
    return tuple(max(one[index] for one in told if len(one) == count) for index in range(count))


def _restores(timeline: Timeline) -> tuple[float, ...]:
    """Effective restores; an emergency save is a part of them (section V-F)."""
    emergencies = _emergencies(timeline)
    found = []
    for index, recovery in enumerate(_carried_out(timeline)):
        slowest = max(one.restored - one.formed for one in recovery.restored.values())
        found.append(slowest + (emergencies[index] if index < len(emergencies) else 0.0))
    return tuple(found)


def _last_formed(recovery: Recovery) -> float:
    return max(one.formed for one in recovery.restored.values())


def _recoveries(timeline: Timeline, log: Sequence[StepLog]) -> tuple[float, ...]:
    """From each fault until the first step after it was committed."""
    found = []
    for recovery in _carried_out(timeline):
        strike = _strike_of(recovery, timeline)
        resumed = max(one.restored for one in recovery.restored.values())
        ends = [one.end for one in log if one.end > resumed]
        if strike is not None and ends:
            found.append(min(ends) - strike)
    return tuple(found)


def _repeated(timeline: Timeline, log: Sequence[StepLog]) -> list[StepLog]:
    """Steps that were done and had to be done again."""
    latest = {one.step: one.begin for one in log}
    return [one for one in log if one.begin < latest[one.step]]


def _throughput(steps: Sequence[StepLog], *, left: float = 1.0) -> float | None:
    """Samples a second.

    Args:
        steps: Whose samples are those of all ranks that there were when the groups were formed.
        left: Share of these samples whose ranks are left.
    """
    took = sum(one.end - one.begin for one in steps)
    return left * sum(one.samples for one in steps) / took if took else None


def _left(timeline: Timeline, preset: Preset, contributors: Callable[[int], int]) -> float:
    """Share of the samples that is still taken where training goes on without its lost ranks."""
    return contributors(timeline.world_after) / contributors(preset.ranks) if timeline.lost_peers else 1.0


def _reported_bytes(timeline: Timeline) -> int | None:
    return max((one.state_bytes for recovery in timeline.recoveries for one in recovery.left.values()), default=None)


def _together(digests: Sequence[str]) -> str:
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()
