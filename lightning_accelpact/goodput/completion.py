"""How long a job is expected to take, faults and checkpoints included."""

from __future__ import annotations

import math

from lightning_accelpact.goodput.model import check_amounts


def completion_time(
    *, work_s: float, overhead: float, recovery_s: float, lost_work_s: float, between_failures_s: float
) -> float:
    """FailBench's expected completion time ``T0 * (1 + o) + (T0 / M) * (T_rec + W)``, seconds.

    A first-order model: failures are counted over the undisturbed time, and none strikes during a recovery. FailBench
    (section IX) gives it in words; this form reproduces its crossovers between mechanisms (``M`` of 4.2 s and 9.7 s).

    Args:
        work_s: ``T0``, seconds that the job takes without faults and fault tolerance.
        overhead: ``o``, the mechanism's steady-state overhead as a share (0.0048 is 0.48 %).
        recovery_s: ``T_rec``, seconds per failure for detection, restore, new process groups and initialization.
        lost_work_s: ``W``, seconds of work per failure that is done again: about half an interval for periodic
            checkpoints, near 0 for a mechanism that is warned.
        between_failures_s: ``M``, mean seconds between failures; more than 0.

    Raises:
        ValueError: if a value is not finite, or one other than ``overhead`` is negative, or ``between_failures_s`` is 0.
    """
    _check_model(between_failures_s, overhead, work_s=work_s, recovery_s=recovery_s, lost_work_s=lost_work_s)
    return work_s * (1 + overhead) + work_s / between_failures_s * (recovery_s + lost_work_s)


def crossover(*, overhead: float, failure_s: float, other_overhead: float, other_failure_s: float) -> float | None:
    """The mean time between failures ``M`` at which two mechanisms take equally long, seconds.

    Below it the one with the lower cost per failure finishes first, above it the one with the lower overhead.

    Args:
        overhead: Steady-state overhead of the one, a share.
        failure_s: Its seconds per failure, recovery and lost work together.
        other_overhead: Overhead of the other.
        other_failure_s: Its seconds per failure.

    Returns:
        None if one of them is at least as good in both respects, and so at every ``M``.

    Raises:
        ValueError: if seconds are negative or not finite.
    """
    check_amounts(failure_s=failure_s, other_failure_s=other_failure_s)
    dearer, slower = other_overhead - overhead, failure_s - other_failure_s
    return slower / dearer if dearer * slower > 0 else None


def daly_completion_time(
    *, work_s: float, interval_s: float, checkpoint_s: float, restart_s: float, between_failures_s: float
) -> float:
    """Daly's complete model ``M * exp(R / M) * (exp((tau + delta) / M) - 1) * T0 / tau``, seconds.

    Failures come one by one at a constant rate (Poisson) and may strike during a checkpoint and a restart. Source: as
    for :func:`~.intervals.daly_interval`, equation 20.

    Args:
        work_s: ``T0``, seconds that the job takes without faults and checkpoints.
        interval_s: ``tau``, seconds of training between two checkpoints; more than 0.
        checkpoint_s: ``delta``, seconds that training stands still for one.
        restart_s: ``R``, seconds from a failure until training goes on from the checkpoint.
        between_failures_s: ``M``, mean seconds between failures; more than 0.

    Raises:
        ValueError: if a value is negative or not finite, or one that must be more than 0 is 0.
    """
    _check_model(between_failures_s, 0.0, work_s=work_s, checkpoint_s=checkpoint_s, restart_s=restart_s)
    check_amounts(interval_s=interval_s)
    if not interval_s:
        raise ValueError("interval_s must be more than 0, got 0: checkpoints without training between them never end")
    attempts = math.expm1((interval_s + checkpoint_s) / between_failures_s)
    return between_failures_s * math.exp(restart_s / between_failures_s) * attempts * work_s / interval_s


def _check_model(between_failures_s: float, overhead: float, **amounts: float) -> None:
    check_amounts(between_failures_s=between_failures_s, **amounts)
    if not between_failures_s:
        raise ValueError("between_failures_s must be more than 0, got 0: nothing is ever finished then")
    if not math.isfinite(overhead):
        raise ValueError(f"overhead must be a finite share such as 0.002 for 0.2 %, got {overhead!r}")
