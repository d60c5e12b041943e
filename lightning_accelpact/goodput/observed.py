"""How often own runs have failed, for the planner."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_accelpact.goodput.failures import DAY_S, FailureClass, Failures
from lightning_accelpact.goodput.presets import LLAMA_3
from lightning_accelpact.goodput.ranges import Range
from lightning_accelpact.goodput.report import GoodputSummary

# Quantile of the normal distribution, for an interval that holds the rate with 90 %
_Z = 1.645


def observed_failures(summaries: Sequence[GoodputSummary]) -> Failures:
    """The failures of some runs.

    An incident recovered in memory is a network failure, an attempt more is a lost process or a failure of the whole
    job: which of both is not in the ledger, so these are divided as Llama 3's.

    Args:
        summaries: Of the runs; a rank counts as a GPU.

    Raises:
        ValueError: if nothing has failed in them.
    """
    recovered = sum(len(summary.recovered) for summary in summaries)
    restarts = sum(summary.attempts - 1 for summary in summaries)
    gpu_days = sum(summary.wall_s * summary.world_size for summary in summaries) / DAY_S
    count = recovered + restarts
    if not count:
        raise ValueError(
            f"nothing has failed in {gpu_days:.3g} GPU-days of these runs: give --failures-per-day instead"
        )
    node, job = (LLAMA_3.shares[cls] for cls in (FailureClass.NODE, FailureClass.JOB))
    lost = restarts / count / (node + job)
    low, high = poisson_interval(count)
    return Failures(
        name="observed",
        source=f"own runs: {recovered} incidents recovered in memory and {restarts} restarts in {gpu_days:.3g} GPU-days;"
        " the rate's range holds it with 90 %",
        per_gpu_day=Range(low=low / gpu_days, likely=count / gpu_days, high=high / gpu_days),
        shares={
            FailureClass.NETWORK: recovered / count,
            FailureClass.NODE: lost * node,
            FailureClass.JOB: lost * job,
        },
    )


def poisson_interval(count: int) -> tuple[float, float]:
    """The means between which 90 % lie, if ``count`` events were seen.

    Garwood's exact limits in the approximation of Wilson and Hilferty, good to 2 % from one event on at the upper end
    and from three on at the lower.
    """
    more = count + 1
    low = count * (1 - 1 / (9 * count) - _Z / (3 * math.sqrt(count))) ** 3 if count else 0.0
    return max(low, 0.0), more * (1 - 1 / (9 * more) + _Z / (3 * math.sqrt(more))) ** 3
