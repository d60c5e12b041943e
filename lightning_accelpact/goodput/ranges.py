"""Inputs that are known as a range, and answers that come with one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True, kw_only=True)
class Range:
    """A value that is known only roughly.

    Args:
        low: The lowest it can be.
        likely: What to reckon with.
        high: The highest it can be.

    Raises:
        ValueError: if a value is not finite, or they are not in this order.
    """

    low: float
    likely: float
    high: float

    def __post_init__(self) -> None:
        if not (all(map(math.isfinite, (self.low, self.likely, self.high))) and self.low <= self.likely <= self.high):
            raise ValueError(
                f"a range needs finite low <= likely <= high, got {self.low!r}, {self.likely!r}, {self.high!r}"
            )

    @classmethod
    def parse(cls, text: str) -> float | Range:
        """``3``, ``1..5`` (the middle is the likely value) or ``1..2..5``.

        Raises:
            ValueError: if it is none of these.
        """
        try:
            values = [float(part) for part in text.split("..")]
        except ValueError:
            values = []
        if len(values) == 1:
            return values[0]
        if len(values) == 2:
            return cls(low=values[0], likely=sum(values) / 2, high=values[1])
        if len(values) == 3:
            return cls(low=values[0], likely=values[1], high=values[2])
        raise ValueError(f"{text!r} is neither a number nor a range such as 1..5 or 1..2..5")


def likely(value: float | Range) -> float:
    """What to reckon with."""
    return value.likely if isinstance(value, Range) else value


def bounds(value: float | Range) -> tuple[float, float]:
    """The lowest and the highest that it can be."""
    return (value.low, value.high) if isinstance(value, Range) else (value, value)


def over(function: Callable[..., float], **arguments: float | Range) -> float | Range:
    """``function(**arguments)`` where some arguments are ranges.

    Exact if the function rises or falls all the way with each of them: the extremes then lie at the ranges' ends, each
    combination of which is tried. The answer is a range if an argument is one.
    """
    uncertain = {name: value for name, value in arguments.items() if isinstance(value, Range)}
    answer = function(**{name: likely(value) for name, value in arguments.items()})
    if not uncertain:
        return answer
    corners = product(*(bounds(value) for value in uncertain.values()))
    answers = [answer, *(function(**{**arguments, **dict(zip(uncertain, corner, strict=True))}) for corner in corners)]
    return Range(low=min(answers), likely=answer, high=max(answers))
