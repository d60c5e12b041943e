"""What in-memory recovery saves: the paper's net cluster time saved, and the same for the incidents of a real run.

Source of the formulas: the paper's economic model ("To quantify the operational value of in-memory recovery ...").
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


def time_saved(
    *,
    eligible: float,
    other: float,
    checkpoint_age: float,
    update_s: float,
    repair_s: float,
    detect_s: float,
    reject_s: float,
    guard_overhead: float,
    baseline_s: float,
) -> float:
    """Net time saved over a campaign, in seconds: the paper's ``dT = N_eligible * S - N_other * C - h * T0``.

    ``S`` is :func:`saved_per_recovery`, ``C`` is :func:`rejection_cost`, ``h * T0`` is :func:`guard_cost`.

    Args:
        eligible: ``N_eligible``, failures in the campaign that are recovered in memory (a count, or a rate times time).
        other: ``N_other``, failures that are rejected safely.
        checkpoint_age: ``A``, updates that a restart would replay.
        update_s: ``t_update``, seconds per update.
        repair_s: ``T_repair``, seconds per repair.
        detect_s: ``T_detect``, seconds until a failure is noticed that is then rejected.
        reject_s: ``T_reject``, seconds that its fail-stop takes.
        guard_overhead: ``h``, the boundary guard's share of the run (0.002 is 0.2 %). A measured share may be
            negative, within noise.
        baseline_s: ``T0``, seconds that the campaign takes without any fault.

    Raises:
        ValueError: if an argument is not finite, or one other than ``guard_overhead`` is negative.
    """
    saving = saved_per_recovery(checkpoint_age=checkpoint_age, update_s=update_s, repair_s=repair_s)
    rejection = rejection_cost(detect_s=detect_s, reject_s=reject_s)
    guard = guard_cost(guard_overhead=guard_overhead, baseline_s=baseline_s)
    check_amounts(eligible=eligible, other=other)
    return eligible * saving - other * rejection - guard


def time_saved_by_actions(
    *,
    preserved: float,
    redone: float,
    healed: float,
    other: float,
    checkpoint_age: float,
    update_s: float,
    restart_s: float,
    repair_s: float,
    repeated_updates: float,
    heal_s: float,
    detect_s: float,
    reject_s: float,
    guard_overhead: float,
    baseline_s: float,
) -> float:
    """The paper's ``dT`` extended by the actions that it does not have, seconds.

    ``dT = N_preserve * (B - T_repair) + N_redo * (B - T_repair - r * t_update) + N_heal * (B - T_heal - r * t_update)
    - N_other * C - h * T0``, where ``B = A * t_update + R`` is what a restart costs. With ``redone``, ``healed`` and
    ``restart_s`` at 0 it is :func:`time_saved`: the paper counts the replay of a restart, not its relaunch.

    Args:
        preserved: ``N_preserve``, failures after which nothing is repeated (``PRESERVE``, ``ROLL_FORWARD``, ``RETRY``).
        redone: ``N_redo``, failures after which one update's micro-batches run again.
        healed: ``N_heal``, lost processes that are replaced from a replica peer.
        other: ``N_other``, failures that are rejected safely.
        checkpoint_age: ``A``, updates that a restart would replay.
        update_s: ``t_update``, seconds per update.
        restart_s: ``R``, seconds to relaunch the job and reload a checkpoint.
        repair_s: ``T_repair``, seconds per repair.
        repeated_updates: ``r``, part of an update that ``REDO`` and ``HEAL`` repeat: 0 to 1, on average 0.5.
        heal_s: ``T_heal``, seconds until the replacement has joined and taken over the state.
        detect_s: ``T_detect``, see :func:`time_saved`.
        reject_s: ``T_reject``, likewise.
        guard_overhead: ``h``, likewise.
        baseline_s: ``T0``, likewise.

    Raises:
        ValueError: if an argument is not finite, one other than ``guard_overhead`` is negative, or
            ``repeated_updates`` is more than 1.
    """
    check_amounts(preserved=preserved, redone=redone, healed=healed, restart_s=restart_s)
    check_amounts(repeated_updates=repeated_updates, heal_s=heal_s)
    if repeated_updates > 1:
        raise ValueError(
            f"repeated_updates must be from 0 to 1, got {repeated_updates!r}: no more than one is repeated"
        )
    replay = {"checkpoint_age": checkpoint_age, "update_s": update_s}
    by_repair = saved_per_recovery(**replay, repair_s=repair_s) + restart_s
    by_heal = saved_per_recovery(**replay, repair_s=heal_s) + restart_s
    repeated_s = (redone + healed) * repeated_updates * update_s
    lost = other * rejection_cost(detect_s=detect_s, reject_s=reject_s)
    guard = guard_cost(guard_overhead=guard_overhead, baseline_s=baseline_s)
    check_amounts(other=other)
    return (preserved + redone) * by_repair + healed * by_heal - repeated_s - lost - guard


def saved_per_recovery(*, checkpoint_age: float, update_s: float, repair_s: float) -> float:
    """``S = A * t_update - T_repair``, seconds; negative if a repair takes longer than the replay it avoids.

    Args and errors: see :func:`time_saved`.
    """
    check_amounts(checkpoint_age=checkpoint_age, update_s=update_s, repair_s=repair_s)
    return checkpoint_age * update_s - repair_s


def rejection_cost(*, detect_s: float, reject_s: float) -> float:
    """``C = T_detect + T_reject``, seconds (the paper measured less than 0.1 s). Args and errors: see
    :func:`time_saved`."""
    check_amounts(detect_s=detect_s, reject_s=reject_s)
    return detect_s + reject_s


def guard_cost(*, guard_overhead: float, baseline_s: float) -> float:
    """``h * T0``, seconds. Args and errors: see :func:`time_saved`."""
    check_amounts(baseline_s=baseline_s)
    if not math.isfinite(guard_overhead):
        raise ValueError(f"guard_overhead must be a finite share such as 0.002 for 0.2 %, got {guard_overhead!r}")
    return guard_overhead * baseline_s


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """One incident that was recovered from memory.

    Args:
        checkpoint_age: ``A``, updates that a restart would have replayed.
        detect_s: Seconds from the fault to its observation.
        repair_s: Seconds from the observation to the release.
        redo_s: Seconds spent running micro-batches again.

    Raises:
        ValueError: if a value is negative or not finite.
    """

    checkpoint_age: float
    detect_s: float
    repair_s: float
    redo_s: float

    def __post_init__(self) -> None:
        check_amounts(**vars(self))

    @property
    def lost_s(self) -> float:
        """Seconds that the incident cost."""
        return self.detect_s + self.repair_s + self.redo_s


def saved_against_restart(
    recoveries: Iterable[Recovery], *, update_s: float, restart_s: float | None = None, guard_s: float = 0.0
) -> float:
    """Estimated wall-clock seconds that recovery from memory saved against restarts from the last checkpoint.

    The paper's ``dT`` of what really happened: each recovery saves the replay of ``A`` updates and one relaunch, and
    costs what was measured; the guard's time is taken off once.

    Args:
        recoveries: The incidents that were recovered.
        update_s: ``t_update``, seconds per update.
        restart_s: Seconds to relaunch the job and reload the checkpoint. None counts 0, and the result is then a
            lower bound.
        guard_s: Seconds that the boundary guard took in the whole run.

    Raises:
        ValueError: if a value is negative or not finite.
    """
    relaunch_s = 0.0 if restart_s is None else restart_s
    check_amounts(update_s=update_s, restart_s=relaunch_s, guard_s=guard_s)
    saved = sum(one.checkpoint_age * update_s + relaunch_s - one.lost_s for one in recoveries)
    return saved - guard_s


def check_amounts(**amounts: float) -> None:
    """Refuse what is negative, infinite or not a number, by its name.

    Raises:
        ValueError: for the first such amount.
    """
    for name, value in amounts.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be finite and at least 0, got {value!r}")
