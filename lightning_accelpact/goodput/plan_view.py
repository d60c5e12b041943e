"""The plan for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lightning_accelpact.goodput.failures import FailureClass
from lightning_accelpact.goodput.plan import PlanRow
from lightning_accelpact.goodput.plan_inputs import PlanInputs
from lightning_accelpact.goodput.ranges import Range, bounds, likely

_KEY = (
    "lost: a day, by the closed form. every: training between two checkpoints, at the best for each method. simulated:"
    " goodput. pays at: failures a day from which on it keeps more than a cold restart (0: always, -: never)."
)


def render_plan(inputs: PlanInputs, rows: Sequence[PlanRow]) -> RenderableType:
    """The comparison, for a terminal of 80 columns or more. Its words are ASCII."""
    ranged = any(isinstance(row.goodput, Range) for row in rows)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method", overflow="fold")
    for name in ("goodput", *(["range"] if ranged else []), "lost", "every", "simulated", "pays at"):
        table.add_column(name, justify="right", overflow="fold")
    best = max(likely(row.goodput) for row in rows)
    for number, row in enumerate(rows):
        style = "green" if likely(row.goodput) == best else None
        pays = "" if number == 0 else "-" if row.break_even is None else f"{row.break_even:.3g}"
        spread = [_spread(row.goodput)] if ranged else []
        times = duration(likely(row.lost_s_per_day)), duration(row.outlook.interval_s)
        simulated = f"{row.simulation.outlook.goodput:.2%}" if row.simulation else ""
        table.add_row(row.method.name, f"{likely(row.goodput):.2%}", *spread, *times, simulated, pays, style=style)
    notes = Group(*(Text(f"{row.method.name}: {row.method.note}.", style="dim") for row in rows))
    head = [Text(_headline(inputs), style="bold"), Text(_classes(inputs)), Padding(table, (1, 0))]
    return Padding(Group(*head, Text(_KEY, style="dim"), Padding(notes, (1, 0)), Text(_source(inputs))), (1, 0))


def _headline(inputs: PlanInputs) -> str:
    per_day, between = inputs.failures.per_day(inputs.gpus), inputs.failures.between_s(inputs.gpus)
    return (
        f"{inputs.gpus:,} GPUs, {_number(per_day)} failures a day (one in {duration(likely(between))}),"
        f" updates of {_number(inputs.update_s)} s"
    )


def _classes(inputs: PlanInputs) -> str:
    words = {
        FailureClass.NETWORK: "links and collectives",
        FailureClass.NODE: "lost processes",
        FailureClass.JOB: "whole jobs",
    }
    shares = inputs.failures.shares
    return "Of these: " + ", ".join(f"{shares.get(cls, 0.0):.1%} {text}" for cls, text in words.items()) + "."


def _source(inputs: PlanInputs) -> str:
    checkpoint_s = inputs.state_gb / likely(inputs.checkpoint_gb_s)
    return f"A checkpoint takes {duration(checkpoint_s)}. Failures: {inputs.failures.source}."


def _spread(value: float | Range) -> str:
    low, high = bounds(value)
    return f"{100 * low:.2f}-{100 * high:.2f}"


def _number(value: float | Range) -> str:
    if isinstance(value, Range):
        return f"{value.likely:.3g} ({value.low:.3g} to {value.high:.3g})"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Two to four significant digits in the unit that fits."""
    if math.isinf(seconds):
        return "never"
    for unit, length in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"
