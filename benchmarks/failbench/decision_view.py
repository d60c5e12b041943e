"""A decision for a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.failbench.decision import Candidate, Decision, Input, Tag

_TAGS = {Tag.GIVEN: "g", Tag.MEASURED: "m", Tag.EXTRAPOLATED: "x", Tag.ANALYTIC: "a"}
_FIGURES = ("overhead", "detect", "restore", "reform", "lost_work", "degraded")
# Beyond this an extrapolation deserves a warning
_FAR = 10.0
_KEY = (
    "stretch: expected completion time by the time without failures and mechanism. Seconds, for each failure. g given,"
    " m measured, x extrapolated, a analytic. equal at: mean time between failures at which it takes as long as the"
    " first one; -: never."
)


def render(decision: Decision) -> RenderableType:
    """The comparison. Its words are ASCII."""
    question = decision.question
    every, hours = question.between_failures_s, question.work_s / 3600
    head = f"{question.architecture}: a failure every {every:g} s, {hours:g} h of work"
    best = decision.best
    answer = f"Take {best.mechanism}." if best else "No mechanism meets the limits."
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("", "stretch", *(figure.replace("_", " ") for figure in _FIGURES), "equal at"):
        table.add_column(name, justify="right" if name else "left")
    for one in decision.candidates:
        style = "green" if one is best else "dim" if one.obstacles else None
        table.add_row(*_row(one, decision), style=style)
    notes = [f"{one.mechanism}: {'; '.join(_notes(one))}." for one in decision.candidates if _notes(one)]
    return Group(
        Text(head, style="bold"), table, Text(_KEY, style="dim"), *map(Text, notes), Text(answer, style="bold")
    )


def _row(one: Candidate, decision: Decision) -> list[str]:
    stretch = f"{one.completion_s / decision.question.work_s:.4f}"
    inputs = [_input(name, one.inputs[name]) for name in _FIGURES]
    return [one.mechanism, stretch, *inputs, _break_even(one, decision)]


def _input(name: str, given: Input) -> str:
    value = f"{given.value:.2%}" if name == "overhead" else f"{given.value:.3g}"
    return f"{value} {_TAGS[given.tag]}"


def _break_even(one: Candidate, decision: Decision) -> str:
    if one.mechanism not in decision.break_evens:
        return ""
    seconds = decision.break_evens[one.mechanism]
    return "-" if seconds is None else f"{seconds:.3g} s"


def _notes(one: Candidate) -> list[str]:
    notes = list(one.obstacles)
    if not 1 / _FAR <= one.growth <= _FAR:
        notes.append(
            f"extrapolated to {one.growth:.3g} times the measured state, as if fixed costs grew with it, too;"
            " measure with a larger preset"
        )
    return notes
