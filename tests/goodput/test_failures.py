"""Published failure figures, and how they grow with a cluster."""

from __future__ import annotations

import math

import pytest

from lightning_accelpact.goodput.failures import FailureClass, Failures
from lightning_accelpact.goodput.presets import (
    FAILURES,
    INFINITE_HBD,
    LLAMA_3,
    LLAMA_3_405B,
    LLAMA_3_COUNTS,
    PAPER_16,
    RSC_1,
    RSC_2,
)
from lightning_accelpact.goodput.ranges import Range


def test_llama_3_as_published() -> None:
    assert sum(LLAMA_3_COUNTS.values()) == 419
    assert LLAMA_3.per_day(16_384) == pytest.approx(7.76, abs=0.005)
    # 49 in 54 days; the paper prints 0.916
    network = LLAMA_3.shares[FailureClass.NETWORK] * LLAMA_3.per_day(16_384)
    assert network == pytest.approx(0.907, abs=0.0005)


def test_rsc_as_published() -> None:
    # 1.8 h projected at 16,384 GPUs and 7.9 h measured at 1,024
    assert RSC_1.between_s(16_384).high / 3600 == pytest.approx(1.8, abs=0.01)
    assert RSC_1.between_s(1024).low / 3600 == pytest.approx(7.9)
    assert RSC_2.per_day(8) * 1000 == pytest.approx(2.34)


def test_bursts_as_published() -> None:
    assert INFINITE_HBD.per_day(400 * 8) * 349 == pytest.approx(584)
    assert INFINITE_HBD.variation == 1.48


def test_workloads_as_published() -> None:
    # The paper: about 25.6 s for the state of every update, 11.6 % of 220 s
    checkpoint_s = PAPER_16.state_gb / PAPER_16.checkpoint_gb_s
    assert checkpoint_s == pytest.approx(25.6, abs=0.05)
    assert checkpoint_s / PAPER_16.update_s == pytest.approx(0.116, abs=0.001)
    assert LLAMA_3_405B.update_s == pytest.approx(6.2, abs=0.05)


def test_the_rate_grows_with_the_cluster() -> None:
    assert LLAMA_3.per_day(16) == pytest.approx(LLAMA_3.per_day(16_384) / 1024)
    assert LLAMA_3.between_s(16) == pytest.approx(86_400 / LLAMA_3.per_day(16))


def test_a_range_of_rates() -> None:
    failures = LLAMA_3.with_rate(Range(low=0.001, likely=0.002, high=0.004))
    assert failures.per_day(1000) == Range(low=1, likely=2, high=4)
    assert failures.between_s(1000) == Range(low=21_600, likely=43_200, high=86_400)


def test_without_failures_nothing_lies_between() -> None:
    assert math.isinf(LLAMA_3.with_rate(0.0).between_s(8))


@pytest.mark.parametrize("failures", FAILURES.values(), ids=list(FAILURES))
def test_every_preset_names_its_source(failures: Failures) -> None:
    assert len(failures.source) > 20
    assert set(failures.shares) == set(FailureClass)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"per_gpu_day": -1}, "per_gpu_day must be finite and at least 0, got -1"),
     ({"shares": {FailureClass.JOB: 0.9}}, "must be at least 0 and add up to 1"),
     ({"shares": {FailureClass.JOB: 1.5, FailureClass.NODE: -0.5}}, "must be at least 0 and add up to 1"),
     ({"variation": 0}, "variation must be finite and more than 0, got 0; 1 is Poisson")],
)  # fmt: skip
def test_impossible_failures_are_refused(change: dict[str, object], message: str) -> None:
    values = {"name": "x", "source": "y", "per_gpu_day": 1.0, "shares": {FailureClass.JOB: 1.0}}
    with pytest.raises(ValueError, match=message):
        Failures(**{**values, **change})
