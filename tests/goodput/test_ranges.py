"""Ranges in, ranges out."""

from __future__ import annotations

import math

import pytest

from lightning_accelpact.goodput.model import guard_cost
from lightning_accelpact.goodput.ranges import Range, bounds, likely, over


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3", 3.0), ("1..5", Range(low=1, likely=3, high=5)), ("-1..2..5e1", Range(low=-1, likely=2, high=50))],
)
def test_what_people_write(text: str, expected: float | Range) -> None:
    assert Range.parse(text) == expected


@pytest.mark.parametrize("text", ["", "x", "1..", "1..2..3..4"])
def test_what_is_no_range(text: str) -> None:
    with pytest.raises(ValueError, match="is neither a number nor a range such as"):
        Range.parse(text)


@pytest.mark.parametrize("text", ["5..1", "1..7..5", "0..inf", "nan..1"])
def test_what_is_out_of_order(text: str) -> None:
    with pytest.raises(ValueError, match="a range needs finite low <= likely <= high"):
        Range.parse(text)


def test_without_a_range_the_answer_is_a_number() -> None:
    assert over(lambda a, b: a - b, a=3, b=1) == 2


def test_the_extremes_lie_at_the_ends() -> None:
    answer = over(lambda a, b: a - b, a=Range(low=1, likely=2, high=4), b=Range(low=0, likely=1, high=2))
    assert answer == Range(low=-1, likely=1, high=4)
    assert (likely(answer), bounds(answer), likely(7), bounds(7)) == (1, (-1, 4), 7, (7, 7))


def test_a_guard_that_straddles_zero() -> None:
    # Both of the paper's measurements on 16 GPUs
    cost = over(guard_cost, guard_overhead=Range(low=-0.00412, likely=0.002, high=0.002), baseline_s=86_400)
    assert math.isclose(cost.low, -355.968) and math.isclose(cost.high, 172.8)
