"""How often to write a checkpoint."""

from __future__ import annotations

import math

from lightning_accelpact.goodput.model import check_amounts


def young_interval(*, checkpoint_s: float, between_failures_s: float) -> float:
    """Young's first-order optimum ``sqrt(2 * delta * M)``, seconds of training between two checkpoints.

    Source: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974.

    Args:
        checkpoint_s: ``delta``, seconds that training stands still for one checkpoint.
        between_failures_s: ``M``, mean seconds between two failures that make the run go back to a checkpoint.

    Raises:
        ValueError: if a value is negative or not finite.
    """
    check_amounts(checkpoint_s=checkpoint_s, between_failures_s=between_failures_s)
    return math.sqrt(2 * checkpoint_s * between_failures_s)


def daly_interval(*, checkpoint_s: float, between_failures_s: float) -> float:
    """Daly's higher-order optimum, seconds of training between two checkpoints.

    ``sqrt(2 delta M) * (1 + sqrt(delta / 2M) / 3 + (delta / 2M) / 9) - delta`` where ``delta < 2 M``, else ``M``.
    Source: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22(3), 2006,
    equation 37.

    Args and errors: see :func:`young_interval`.
    """
    young = young_interval(checkpoint_s=checkpoint_s, between_failures_s=between_failures_s)
    if checkpoint_s >= 2 * between_failures_s:
        return between_failures_s
    ratio = checkpoint_s / (2 * between_failures_s)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s


def best_interval(*, checkpoint_s: float, between_failures_s: float) -> float:
    """The exact optimum of Daly's complete model (:func:`~.completion.daly_completion_time`), found numerically.

    The minimum of ``(exp((tau + delta) / M) - 1) / tau``: with ``u = tau / M``, the root of
    ``log(1 - u) + u + delta / M``, which falls from a positive value at 0 to minus infinity at 1.

    Args and errors: see :func:`young_interval`.
    """
    check_amounts(checkpoint_s=checkpoint_s, between_failures_s=between_failures_s)
    if not between_failures_s:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(100):  # halves to the last bit
        middle = (low + high) / 2
        if middle < 1 and math.log1p(-middle) + middle + checkpoint_s / between_failures_s > 0:
            low = middle
        else:
            high = middle
    return low * between_failures_s
