"""The plan as pictures. Needs matplotlib, which the extra ``plots`` installs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_accelpact.goodput.methods import methods
from lightning_accelpact.goodput.plan import goodputs_by_interval, goodputs_by_size
from lightning_accelpact.goodput.plan_inputs import PlanInputs
from lightning_accelpact.goodput.ranges import likely

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STEPS = 60
# Of all possible goodputs, how much below the best method's the picture reaches
_LOWEST = 0.5


class PlotsUnavailable(Exception):
    """matplotlib is not installed; the message says how to get it."""


def figure_class() -> type[Figure]:
    """What pictures are drawn on.

    Raises:
        PlotsUnavailable: without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotsUnavailable(
            "plots need matplotlib, which is not installed: pip install 'lightning-accelpact[plots]', or leave"
            " --plots out"
        ) from error
    return Figure


def write_plots(inputs: PlanInputs, folder: Path) -> list[Path]:
    """Draw the goodput against the size of the cluster and against the checkpoint interval.

    Args:
        inputs: The cluster; ranges are drawn at their likely values.
        folder: Where to; made if missing.

    Returns:
        The files, as SVG.

    Raises:
        PlotsUnavailable: without matplotlib.
        OSError: if a file cannot be written.
    """
    figure_of = figure_class()
    folder.mkdir(parents=True, exist_ok=True)
    sizes, intervals = _sizes(inputs), _intervals(inputs)
    size_label = f"GPUs, at {likely(inputs.failures.per_gpu_day) * 1000:.3g} failures per 1,000 GPU-days"
    pictures = [
        ("goodput-by-size.svg", list(map(float, sizes)), goodputs_by_size(inputs, sizes), float(inputs.gpus), size_label),
        ("goodput-by-interval.svg", [seconds / 60 for seconds in intervals], goodputs_by_interval(inputs, intervals),
         None, f"minutes of training between two checkpoints, {inputs.gpus:,} GPUs"),
    ]  # fmt: skip
    files = []
    for name, positions, goodputs, mark, label in pictures:
        figure = figure_of(figsize=(8, 4.5), layout="constrained")
        _draw(figure.subplots(), positions, goodputs, mark, label)
        figure.savefig(folder / name, metadata={"Date": None})
        files.append(folder / name)
    return files


def _draw(axes: Axes, positions: list[float], goodputs: dict[str, list[float]], mark: float | None, label: str) -> None:
    for (name, values), style in zip(goodputs.items(), _styles(len(goodputs)), strict=True):
        axes.plot(positions, [100 * value for value in values], style, label=name, linewidth=1.6)
    if mark is not None:
        axes.axvline(mark, color="0.6", linewidth=0.8)
    best = max(value for values in goodputs.values() for value in values if not math.isnan(value))
    shown = [value for values in goodputs.values() for value in values if value > best - _LOWEST]
    axes.set(xscale="log", xlabel=label, ylabel="goodput, %")
    axes.set_ylim(100 * min(shown) - 0.5, 100 * best + 0.5)
    axes.grid(alpha=0.3, which="both", linewidth=0.5)
    axes.legend(fontsize="small", frameon=False)


def _styles(count: int) -> list[str]:
    """Lines that can be told apart without colour, too."""
    return [("-", "--", ":", "-.")[number % 4] for number in range(count)]


def _sizes(inputs: PlanInputs) -> list[int]:
    """From one replica to eight times the cluster."""
    low, high = inputs.replica_gpus, 8 * inputs.gpus
    return sorted({round(value) for value in _logarithmic(low, high)})


def _intervals(inputs: PlanInputs) -> list[float]:
    """From a tenth of the shortest best interval to ten times the longest."""
    one = inputs.at_likely()
    per_day = likely(one.failures.per_day(one.gpus))
    best = [method.interval_s(per_day, one.failures.shares) for method in methods(one)]
    finite = [seconds for seconds in best if math.isfinite(seconds)]
    return _logarithmic(min(finite) / 10, max(finite) * 10)


def _logarithmic(low: float, high: float) -> list[float]:
    return [low * (high / low) ** (step / (_STEPS - 1)) for step in range(_STEPS)]
