"""One self-contained HTML page on one or several runs: nothing on it is loaded from anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from jinja2 import Environment, PackageLoader, StrictUndefined

from lightning_accelpact.goodput.ledger import TimeClass
from lightning_accelpact.goodput.report import GoodputSummary, IncidentSummary
from lightning_accelpact.goodput.run import Attempt, RankRun, Run

# Ranks that the timeline shows, and pieces of time of each: what a page can hold and an eye can tell apart
MAX_RANKS = 32
MAX_PIECES = 240
# Incidents in the table
MAX_INCIDENTS = 200

# What is shown in one colour -> its classes, in the order of the bars
GROUPS: Mapping[str, tuple[TimeClass, ...]] = {
    "productive": (TimeClass.PRODUCTIVE,),
    "guard": (TimeClass.GUARD,),
    "data loading": (TimeClass.DATA_LOADING,),
    "checkpoints": (TimeClass.CHECKPOINT_SAVE, TimeClass.CHECKPOINT_RESTORE),
    "evaluation": (TimeClass.EVALUATION,),
    "recovery in memory": (
        TimeClass.DETECTION, TimeClass.GROUP_REPAIR, TimeClass.REDONE_WORK, TimeClass.STATE_TRANSFER,
    ),
    "restarts": (TimeClass.INFRASTRUCTURE_RECOVERY, TimeClass.REPLAYED_UPDATES, TimeClass.WASTED_PROGRESS),
    "start-up": (TimeClass.PROGRAM_STARTUP, TimeClass.INITIALIZATION, TimeClass.TRAINING_PREP),
    "other": (TimeClass.DEGRADED_WORLD, TimeClass.CUSTOM, TimeClass.OTHER),
}  # fmt: skip

# Of an incident, in time
_PHASES = ("detect", "admit", "agree", "retire", "rebuild", "rebind", "validate", "redo")


def render_page(runs: Sequence[Run], summaries: Sequence[GoodputSummary]) -> str:
    """The page.

    Args:
        runs: The runs, at least one.
        summaries: Of each.
    """
    environment = Environment(
        loader=PackageLoader("lightning_accelpact.goodput", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(seconds=span, share=_share, words=lambda name: name.replace("_", " "))
    views = [_RunView(run=run, summary=summary) for run, summary in zip(runs, summaries, strict=True)]
    return environment.get_template("page.html.jinja").render(
        runs=views, groups=list(GROUPS), phases=_PHASES, phases_of=phases, by_group=by_group
    )


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece of one rank's time.

    Args:
        left: Where it begins, per cent of the width.
        width: Per cent of the width.
        parts: Group -> (from the top, height), per cent of the height; those that have any.
        title: What it says when pointed at.
    """

    left: float
    width: float
    parts: Mapping[str, tuple[float, float]]
    title: str


@dataclass(frozen=True, kw_only=True)
class _RunView:
    """What the template asks of one run."""

    run: Run
    summary: GoodputSummary

    @property
    def groups(self) -> dict[str, float]:
        """Rank-seconds of each group that has any."""
        return by_group(self.summary.totals)

    @property
    def classes(self) -> list[tuple[str, str, float]]:
        """Group, class and rank-seconds of every class that has any."""
        totals = self.summary.totals
        return [(group, cls.value, totals[cls]) for group, classes in GROUPS.items() for cls in classes if totals[cls]]

    @property
    def incidents(self) -> Sequence[IncidentSummary]:
        """Those in the table."""
        return self.summary.incidents[-MAX_INCIDENTS:]

    @property
    def slowest_s(self) -> float:
        """Seconds of the longest incident."""
        return max((sum(phases(one).values()) for one in self.incidents), default=0.0)

    @property
    def shown_ranks(self) -> Sequence[RankRun]:
        """Those in the timeline."""
        return self.run.ranks[:MAX_RANKS]

    @property
    def begin(self) -> float:
        """Unix time of the first start."""
        return min(rank.attempts[0].start for rank in self.run.ranks)

    @property
    def length(self) -> float:
        """Seconds from the first start to the last that is known; never 0."""
        return max(max(rank.attempts[-1].end for rank in self.run.ranks) - self.begin, 1e-3)

    def position(self, time: float) -> float:
        """Of a moment, per cent of the width."""
        return round(100 * (time - self.begin) / self.length, 3)

    def pieces(self, rank: RankRun) -> list[Piece]:
        """The time of a rank, attempts and the gaps between them."""
        found = [self._piece(*piece) for attempt in rank.attempts for piece in thinned(attempt)]
        gaps = [self._piece(start, end, {TimeClass.INFRASTRUCTURE_RECOVERY: end - start}) for start, end in rank.gaps]
        return found + gaps

    def _piece(self, start: float, end: float, totals: Mapping[TimeClass, float]) -> Piece:
        whole = sum(totals.values())
        parts: dict[str, tuple[float, float]] = {}
        below = 100.0
        for group, seconds in by_group(totals).items():
            height = 100 * seconds / whole
            below -= height
            parts[group] = (round(below, 2), round(height, 2))
        said = ", ".join(f"{group} {span(seconds)}" for group, seconds in by_group(totals).items())
        left = self.position(start)
        title = f"{span(start - self.begin)} to {span(end - self.begin)}: {said}"
        return Piece(left=left, width=round(self.position(end) - left, 3), parts=parts, title=title)

    def faults(self, rank: RankRun) -> list[tuple[float, str]]:
        """Position and description of each incident of a rank."""
        return [
            (
                self.position(one["time"]),
                f"update {one['frontier']}: {one['action'] or 'undecided'}, {one['outcome'] or 'open'}",
            )
            for attempt in rank.attempts
            for one in attempt.incidents
        ]

    def checkpoints(self, rank: RankRun) -> list[float]:
        """Position of each checkpoint of a rank."""
        return [self.position(time) for attempt in rank.attempts for time in attempt.checkpoints]

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Position and label of round times."""
        step = next(step for step in _STEPS if self.length / step <= 6 or step == _STEPS[-1])
        return [
            (100 * number * step / self.length, _tick(number * step)) for number in range(int(self.length / step) + 1)
        ]

    @property
    def savings(self) -> list[tuple[str, float, float, float]]:
        """What the estimate against restarts is made of, and at last itself: name, seconds, left and width of the bar."""
        amounts = self._savings
        scale = 100 / (max(*amounts.values(), 0.0) - min(*amounts.values(), 0.0) or 1.0)
        return [
            (name, seconds, round(self.zero + scale * min(seconds, 0.0), 3), round(scale * abs(seconds), 3))
            for name, seconds in amounts.items()
        ]

    @property
    def zero(self) -> float:
        """Where these bars begin, per cent of the width."""
        low, high = min(*self._savings.values(), 0.0), max(*self._savings.values(), 0.0)
        return round(-100 * low / (high - low or 1.0), 3)

    @property
    def _savings(self) -> dict[str, float]:
        recovered = self.summary.recovered
        return {
            "replay avoided": sum(one.checkpoint_age for one in recovered) * self.summary.update_s,
            "relaunch avoided": len(recovered) * (self.summary.restart_s or 0.0),
            "detection": -sum(one.detect_s for one in recovered),
            "repairs": -sum(one.total_s for one in recovered),
            "redone work": -sum(one.redo_s for one in recovered),
            "guard": -self.summary.guard_s,
            "saved": self.summary.saved_s,
        }


def phases(incident: IncidentSummary) -> dict[str, float]:
    """Seconds of each phase of an incident that took any."""
    found = {name: getattr(incident, f"{name}_s") for name in _PHASES}
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def by_group(totals: Mapping[TimeClass, float]) -> dict[str, float]:
    """Seconds of each group that has any."""
    found = {group: sum(totals.get(cls, 0.0) for cls in classes) for group, classes in GROUPS.items()}
    return {group: seconds for group, seconds in found.items() if seconds > 0}


def thinned(attempt: Attempt) -> list[tuple[float, float, dict[TimeClass, float]]]:
    """Start, end and seconds by class of the pieces between samples; neighbours are put together if there are many."""
    step = -(-len(attempt.samples) // MAX_PIECES)
    chosen = list(attempt.samples[::-1][::step])[::-1] if step else []
    moments = [(attempt.start, {}), *((sample.time, sample.totals) for sample in chosen)]
    return [
        (start, end, grown)
        for (start, before), (end, after) in pairwise(moments)
        if end > start and (grown := _growth(before, after))
    ]


def _growth(before: Mapping[TimeClass, float], after: Mapping[TimeClass, float]) -> dict[TimeClass, float]:
    """What was added. Time that has become another class's since (a redo's) is not taken off anywhere."""
    found = {cls: seconds - before.get(cls, 0.0) for cls, seconds in after.items()}
    return {cls: seconds for cls, seconds in found.items() if seconds > 0}


_STEPS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400,
          172_800, 604_800, 2_592_000)  # fmt: skip


def _tick(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:g} {unit}"
    return f"{seconds:g} s"


def span(seconds: float) -> str:
    """A time with its unit, two to four digits."""
    sign, size = ("-" if seconds < 0 else ""), abs(seconds)
    for unit, length in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if size >= 2 * length:
            return f"{sign}{size / length:.1f} {unit}"
    if size >= 0.9995 or size == 0:
        return f"{sign}{size:.1f} s" if size >= 9.95 else f"{sign}{size:.2f} s"
    return f"{sign}{size * 1e3:.0f} ms" if size >= 0.00995 else f"{sign}{size * 1e3:.1f} ms"


def _share(part: float, whole: float) -> str:
    share = part / whole if whole > 0 else 0.0
    return "<0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"
