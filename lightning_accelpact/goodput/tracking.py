"""Goodput as flat numbers with names, for any experiment tracker. Needs neither torch nor a framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_accelpact.goodput.ledger import TimeClass


def tracked_values(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What the time of some ranks went to so far.

    For example with Accelerate, on every rank and between two updates::

        record = account.record(updates, incidents)
        values = tracked_values(accelerate.utils.gather_object([record]))
        accelerator.log(values, step=updates)

    Args:
        records: Of :meth:`~.account.GoodputAccount.record`, one of each rank that is to count.

    Returns:
        As of :func:`named_values`.
    """
    seconds = {cls: sum(record["totals"].get(cls.value, 0.0) for record in records) for cls in TimeClass}
    return named_values(seconds, max(len(record["incidents"]) for record in records))


def named_values(seconds: Mapping[TimeClass, float], incidents: float) -> dict[str, float]:
    """``goodput``, ``goodput/elapsed_s``, ``goodput/incidents``, and ``goodput/<class>_s`` of classes with any time.

    Args:
        seconds: Rank-seconds of each class.
        incidents: How many there were.
    """
    elapsed = sum(seconds.values())
    productive = seconds.get(TimeClass.PRODUCTIVE, 0.0)
    spent = {f"goodput/{cls.value}_s": amount for cls, amount in seconds.items() if amount > 0}
    goodput = productive / elapsed if elapsed > 0 else 0.0
    return {"goodput": goodput, "goodput/elapsed_s": elapsed, **spent, "goodput/incidents": float(incidents)}
