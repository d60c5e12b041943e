"""The paper's qualitative findings, each checked on the records at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean

from benchmarks.failbench.aggregation import CellSummary, Estimate, Spread, latest, pooled, summarize
from benchmarks.failbench.cell import NO_FAULT, NO_MECHANISM, PAPER_TRACES, Cell
from benchmarks.failbench.record import Outcome, Record

_HALTING = ("A1", "A2", "A3", "A4", "A5", "A7")
_CONTINUING = ("A1-async", "A6")
# The architecture on which the paper compares mechanisms (section VII), and those that it compares there
_ARENA = "A2"
_PERIODIC = ("FT1", "FT2", "FT3", "FT5", "FT6")
_FIGURES = {"stalled_share": "the time that training stands still for saves", "restore": "the restore"}
# A hang is noticed when the timeout has passed, and what comes after it is part of the detection as measured
_LATE_SHARE, _LATE_S = 0.25, 0.5


class Verdict(StrEnum):
    """What the records say about a finding."""

    HOLDS = "holds here"
    DOES_NOT = "does not"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Finding:
    """A finding of the paper, and what the records say.

    Args:
        claim: What the paper found.
        source: Where it says so.
        verdict: Whether it is so here.
        because: The figures, and for ``does not`` the cause as far as they show it.
    """

    claim: str
    source: str
    verdict: Verdict
    because: str


@dataclass(frozen=True)
class Basis:
    """What the checks look at.

    Args:
        records: All runs.
        summaries: Their summaries.
    """

    records: Sequence[Record]
    summaries: Mapping[Cell, CellSummary]

    def pooled(self, architecture: str, mechanism: str, figure: str) -> Estimate | None:
        """A figure of a pair over the traces of the paper, the warned one and the run without a fault."""
        cells = [Cell(architecture, mechanism, trace) for trace in (*PAPER_TRACES, "preempt", NO_FAULT)]
        return pooled([self.summaries[cell] for cell in cells if cell in self.summaries], figure)


_Check = Callable[[Basis], tuple[Verdict, str]]


def findings(records: Iterable[Record]) -> list[Finding]:
    """Check every finding.

    Raises:
        ValueError: if the records are of several presets.
    """
    runs = latest(records)
    basis = Basis(runs, summarize(runs))
    return [Finding(claim, source, *check(basis)) for claim, source, check in _FINDINGS]


def _missing(what: str) -> tuple[Verdict, str]:
    return Verdict.NOT_MEASURED, f"there is no record of {what}"


def _verdict(holds: bool, because: str) -> tuple[Verdict, str]:
    return (Verdict.HOLDS if holds else Verdict.DOES_NOT), because


def _halts_without_a_mechanism(basis: Basis) -> tuple[Verdict, str]:
    expected = {**dict.fromkeys(_HALTING, Outcome.HALTED), **dict.fromkeys(_CONTINUING, Outcome.CONTINUED)}
    seen = {name: basis.summaries.get(Cell(name, NO_MECHANISM, "F1")) for name in expected}
    missing = [f"{name}/{NO_MECHANISM}/F1" for name, one in seen.items() if one is None]
    if missing:
        return _missing(", ".join(missing))
    others = [
        f"{name} {one.outcome.value}" for name, one in seen.items() if one and set(one.outcomes) != {expected[name]}
    ]
    if others:
        return _verdict(False, ", ".join(others))
    return _verdict(True, f"{', '.join(_HALTING)} halted; {', '.join(_CONTINUING)} continued")


def _detection_follows_the_timeout(basis: Basis) -> tuple[Verdict, str]:
    hangs = [(one.detect_timeout_seconds, one.detect_seconds) for one in basis.records if one.cell.trace == "hang"]
    seen = sorted((timeout, fmean(times)) for timeout, times in hangs if timeout and times)
    if len({timeout for timeout, _ in seen}) < 2:
        return _missing("hangs with two timeouts or more")
    late = [(timeout, took) for timeout, took in seen if not _in_time(timeout, took)]
    told = "; ".join(f"{timeout:g} s: {took:.2f} s" for timeout, took in late or seen)
    killed = basis.summaries.get(Cell(_ARENA, NO_MECHANISM, "F1"))
    sooner = killed.mean("detect") if killed else None
    note = f". A killed peer needs no timeout with this backend: {1e3 * sooner:.0f} ms" if sooner is not None else ""
    return _verdict(not late, f"timeout: detected after {told}{note}")


def _in_time(timeout: float, took: float) -> bool:
    return 0.9 * timeout <= took <= timeout * (1 + _LATE_SHARE) + _LATE_S


def _least(
    basis: Basis, figure: str, favourite: str, rivals: Sequence[str], unit: str, factor: float
) -> tuple[Verdict, str, bool]:
    """Whether a mechanism has the lowest figure on A2, and whether the spreads leave no doubt of it."""
    found = {name: basis.pooled(_ARENA, name, figure) for name in (favourite, *rivals)}
    known = {name: one for name, one in found.items() if one}
    if len(known) < len(found):
        absent = ", ".join(name for name in found if name not in known)
        return *_missing(f"{_FIGURES[figure]} of {absent} on {_ARENA}"), True
    told = ", ".join(f"{name} {_told(one, factor, unit)}" for name, one in known.items())
    mine = known.pop(favourite)
    lower = [name for name, one in known.items() if one.mean < mine.mean]
    near = [name for name, one in known.items() if one.low <= mine.high and mine.low <= one.high]
    doubt = f", within the spread of {' and '.join(near)}" if near else ""
    if lower:
        return *_verdict(False, f"{' and '.join(lower)} came out lower{doubt}: {told}"), not near
    return *_verdict(True, f"by the means{doubt}: {told}" if near else told), not near


def _told(found: Estimate, factor: float, unit: str) -> str:
    half = "" if found.spread is Spread.NONE else f" +- {factor * found.half:.1f}"
    return f"{factor * found.mean:.1f}{half} {unit}"


def _between_runs(basis: Basis, mechanisms: Sequence[str]) -> str:
    """The overheads by the steps of different runs, and what such a comparison is worth here."""
    found = {name: one for name in mechanisms if (one := basis.pooled(_ARENA, name, "overhead"))}
    told = ", ".join(f"{name} {100 * one.mean:.0f} %" for name, one in found.items())
    plain = basis.pooled(_ARENA, NO_MECHANISM, "overhead")
    noise = f", where runs without a mechanism differ by +- {100 * plain.half:.0f} % among themselves" if plain else ""
    return f". By the steps of different runs: {told}{noise}" if found else ""


def _ft1_is_cheapest(basis: Basis) -> tuple[Verdict, str]:
    """By the share of time that training stands still for saves, which compares nothing between runs."""
    verdict, because, _ = _least(basis, "stalled_share", "FT1", [name for name in _PERIODIC if name != "FT1"], "%", 100)
    if verdict is Verdict.NOT_MEASURED:
        return verdict, because
    sizes = [one.state_bytes_per_rank or 0 for one in basis.records if one.cell.architecture == _ARENA]
    fixed = (
        f"with {max(sizes):,} bytes of state a rank (the paper: 204.7 MB) the fixed cost of a save that is waited for"
        " until the disk has it outweighs its size; "
    )
    cause = fixed if verdict is Verdict.DOES_NOT else ""
    return verdict, f"{cause}training stands still for saves: {because}{_between_runs(basis, _PERIODIC)}"


def _ft2_restores_fastest(basis: Basis) -> tuple[Verdict, str]:
    verdict, because, _ = _least(basis, "restore", "FT2", ("FT1", "FT3", "FT4"), "ms", 1e3)
    return verdict, because


def _ft4_has_no_periodic_cost(basis: Basis) -> tuple[Verdict, str]:
    runs = [one for one in basis.records if one.cell.mechanism == "FT4" and one.step_seconds_before]
    if not runs:
        return _missing("FT4")
    saving = sorted({one.cell.architecture for one in runs if one.save_seconds})
    if saving:
        return _verdict(False, f"it saved in advance on {', '.join(saving)}")
    return _verdict(True, f"no save in advance in {len(runs)} runs{_between_runs(basis, ['FT4'])}")


def _ft5_is_dominated(basis: Basis) -> tuple[Verdict, str]:
    points = {name: _point(basis, name) for name in ("FT1", "FT2", "FT3", "FT5", "FT6")}
    mine = points.pop("FT5")
    if mine is None or not any(points.values()):
        return _missing(f"the overhead and restore of FT5 and others on {_ARENA}")
    # The restores of mechanisms that read from a peer are the same but for noise, as in the paper
    better = [name for name, one in points.items() if one and one[0].mean < mine[0].mean and one[1].low <= mine[1].high]
    told = ", ".join(
        f"{name} {_told(one[0], 100, '%')} and {_told(one[1], 1e3, 'ms')}"
        for name, one in [("FT5", mine), *points.items()]
        if one
    )
    if better:
        return _verdict(True, f"by {' and '.join(better)}: {told}")
    return _verdict(False, f"none has both a lower overhead and as short a restore: {told}")


def _point(basis: Basis, mechanism: str) -> tuple[Estimate, Estimate] | None:
    overhead, restore = (basis.pooled(_ARENA, mechanism, figure) for figure in ("stalled_share", "restore"))
    return (overhead, restore) if overhead and restore else None


def _reformation_compresses_ratios(basis: Basis) -> tuple[Verdict, str]:
    """As the paper does, with one time of re-formation for all; here it is measured: the mean over mechanisms."""
    restores = {name: one.mean for name in ("FT1", "FT2", "FT4") if (one := basis.pooled(_ARENA, name, "restore"))}
    common = [
        one.mean + (respawn.mean if respawn else 0.0)
        for name in (*_PERIODIC, "FT4")
        if (one := basis.pooled(_ARENA, name, "reform"))
        for respawn in [basis.pooled(_ARENA, name, "respawn")]
    ]
    if "FT2" not in restores or len(restores) < 2 or not common:
        return _missing(f"the restore and re-formation of FT2 and another on {_ARENA}")
    base, added = restores.pop("FT2"), fmean(common)
    ratios = {name: (one / base, (one + added) / (base + added)) for name, one in restores.items()}
    told = ", ".join(f"{name} {alone:.2f}x alone, {whole:.2f}x with it" for name, (alone, whole) in ratios.items())
    halved = all(abs(whole - 1) <= abs(alone - 1) / 2 for alone, whole in ratios.values())
    return _verdict(halved, f"to FT2's restore of {1e3 * base:.0f} ms: {told} ({1e3 * added:.0f} ms)")


def _gossip_gains_throughput_only(basis: Basis) -> tuple[Verdict, str]:
    one = basis.summaries.get(Cell("A6", NO_MECHANISM, "F1"))
    change = one.estimates.get("throughput_change") if one else None
    fall = one.estimates.get("loss_reduction") if one else None
    matched = one.estimates.get("matched_loss_reduction") if one else None
    if not (change and fall and matched):
        return _missing(f"A6/{NO_MECHANISM}/F1 and of its matched run without a fault")
    told = (
        f"throughput {_told(change, 100, '%')} (n = {change.n}); the loss fell by {fall.mean:.3f} +- {fall.half:.3f},"
        f" without a fault by {matched.mean:.3f} +- {matched.half:.3f} in the same time"
    )
    if change.mean <= 0:
        return _verdict(False, f"samples a second did not rise: {told}")
    ahead = fall.low > matched.high
    return _verdict(not ahead, f"the loss fell faster, too: {told}" if ahead else told)


def _only_gossip_survives_several(basis: Basis) -> tuple[Verdict, str]:
    several = [
        one for cell, one in basis.summaries.items() if cell.trace in ("F2", "F3") and cell.mechanism != NO_MECHANISM
    ]
    others = [one for one in several if one.cell.architecture != "A6" and one.outcome is not Outcome.INFEASIBLE]
    ran = [one for one in others if one.outcome is not Outcome.DEGENERATE]
    if not ran:
        return _missing("F2 or F3 with a mechanism on another architecture")
    recovered = [one for one in ran if one.outcome is Outcome.RECOVERED]
    if recovered:
        told = f"{len(recovered)} of {len(ran)} cells of other architectures recovered from F2 and F3"
        return _verdict(False, f"the harness forms the groups anew and replaces what was lost: {told}")
    return _verdict(True, f"none of {len(ran)} cells of other architectures recovered")


def _overhead_depends_on_the_architecture(basis: Basis) -> tuple[Verdict, str]:
    found = {name: basis.pooled(name, "FT2", "stalled_share") for name in (*_HALTING, "A6")}
    known = {name: one.mean for name, one in found.items() if one}
    if len(known) < 2:
        return _missing("FT2's saves on two architectures or more")
    low, high = min(known, key=lambda name: known[name]), max(known, key=lambda name: known[name])
    told = f"of the time between saves, FT2's take {known[low]:.1%} on {low} and {known[high]:.1%} on {high}"
    return _verdict(known[high] >= 2 * known[low], told)


_FINDINGS: Sequence[tuple[str, str, _Check]] = (
    (
        "Six architectures halt without a mechanism; A1-async and A6 go on.",
        "section VI, Table V",
        _halts_without_a_mechanism,
    ),
    ("Detection follows the configured timeout.", "section VI, Table VI", _detection_follows_the_timeout),
    ("FT1 has the lowest steady-state overhead of the periodic mechanisms.", "section VII-C", _ft1_is_cheapest),
    ("FT2 restores fastest.", "section VII-C", _ft2_restores_fastest),
    ("FT4 has no periodic cost.", "section VII-C", _ft4_has_no_periodic_cost),
    ("FT5 is dominated.", "section VII-C", _ft5_is_dominated),
    ("Group re-formation compresses the ratios of restores.", "section VII-D", _reformation_compresses_ratios),
    (
        "A6 gains throughput from a loss, and no progress of the loss function.",
        "section VI-C, Figure 2",
        _gossip_gains_throughput_only,
    ),
    (
        "FT2's cost depends strongly on the architecture.",
        "section VIII-C, Table VIII",
        _overhead_depends_on_the_architecture,
    ),
    ("Several faults are survived by A6 only.", "section VIII-C", _only_gossip_survives_several),
)
