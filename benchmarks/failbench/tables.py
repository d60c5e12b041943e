"""Records as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.failbench import compatibility
from benchmarks.failbench.aggregation import CellSummary, Estimate, Spread, pooled
from benchmarks.failbench.cell import PAPER_MECHANISMS, Cell
from benchmarks.failbench.compatibility import Kind
from benchmarks.failbench.findings import Finding, Verdict
from benchmarks.failbench.record import Evidence, Outcome

_MARKS = {
    Outcome.RECOVERED: ("R", "green"),
    Outcome.CONTINUED: ("C", "cyan"),
    Outcome.UNDISTURBED: ("U", "green"),
    Outcome.HALTED: ("H", "yellow"),
    Outcome.INFEASIBLE: ("-", "dim"),
    Outcome.DEGENERATE: ("=", "dim"),
    Outcome.FAILED: ("X", "bold red"),
}
_NOT_RUN = (".", "dim")
_KINDS = {Kind.VIABLE: ("V", "green"), Kind.DEGENERATE: ("=", "dim"), Kind.INFEASIBLE: ("-", "yellow")}
_KEY = (
    "R recovered (r: from scratch), C continued by itself, U undisturbed, H halted, X failed, - infeasible,"
    " = degenerate, . not run; one mark for each of {traces}."
)
_TIMES = ("save", "detect", "restore", "reform", "respawn", "recover")
_EVIDENCE = {Evidence.MEASURED: "m", Evidence.ANALYTIC: "a", Evidence.INFEASIBLE: "-"}


def _table(title: str) -> Table:
    return Table(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )


def outcome_table(summaries: Mapping[Cell, CellSummary], traces: Sequence[str]) -> RenderableType:
    """Architectures by mechanisms, with one mark for each trace."""
    architectures = list(dict.fromkeys(cell.architecture for cell in summaries))
    mechanisms = _in_order(cell.mechanism for cell in summaries)
    table = _table("Outcomes")
    for name in ("", *mechanisms):
        table.add_column(name)
    for architecture in sorted(architectures):
        row = [
            Text.assemble(*(_mark(Cell(architecture, one, trace), summaries) for trace in traces)) for one in mechanisms
        ]
        table.add_row(architecture, *row)
    return Group(table, Text(_KEY.format(traces=", ".join(traces)), style="dim"))


def _in_order(names: Iterable[str]) -> list[str]:
    """The paper's order first, others behind it."""
    found = set(names)
    return [*(name for name in PAPER_MECHANISMS if name in found), *sorted(found - set(PAPER_MECHANISMS))]


def _mark(cell: Cell, summaries: Mapping[Cell, CellSummary]) -> tuple[str, str]:
    if cell in summaries:
        mark, style = _MARKS[summaries[cell].outcome]
        return (mark.lower(), "yellow") if summaries[cell].mean("fresh_starts") else (mark, style)
    kind = compatibility.here(cell.architecture, cell.mechanism).kind
    return _NOT_RUN if kind is Kind.VIABLE else _KINDS[kind]


def figure_table(summaries: Iterable[CellSummary]) -> Table:
    """One row for each cell with its figures; times in ms."""
    table = _table("Figures: mean +- half (n); m measured, a analytic; times in ms")
    for name in ("cell", "outcome", "by"):
        table.add_column(name, no_wrap=True)
    for name in ("overhead", "stalled", *_TIMES, "redone", "rate", "exact"):
        table.add_column(name, justify="right", overflow="fold")
    for one in summaries:
        table.add_row(*_row(one))
    return table


def _row(one: CellSummary) -> list[str]:
    _, style = _MARKS[one.outcome]
    times = [_number(one.estimates.get(name), 1e3, 1) for name in _TIMES]
    return [
        str(one.cell),
        f"[{style}]{one.outcome.value}[/]",
        _EVIDENCE[one.evidence],
        *(_number(one.estimates.get(name), 100, 1, "%") for name in ("overhead", "stalled_share")),
        *times,
        _number(one.estimates.get("lost_steps"), 1, 1),
        _number(one.estimates.get("throughput_change"), 100, 0, "%"),
        _yes_or_no(one.estimates.get("exact")),
    ]


def _number(found: Estimate | None, factor: float, digits: int, unit: str = "") -> str:
    if found is None:
        return ""
    spread = "" if found.spread is Spread.NONE else f"+-{factor * found.half:.{digits}f} ({found.n})"
    return f"{factor * found.mean:.{digits}f}{unit}{spread}"


def _yes_or_no(found: Estimate | None) -> str:
    if found is None:
        return ""
    return {1.0: "yes", 0.0: "no"}.get(found.mean, f"{found.mean:.0%}")


def overhead_table(summaries: Iterable[CellSummary]) -> Table:
    """Architectures by mechanisms: cost while nothing fails, and time to restore, over all traces."""
    pairs: dict[tuple[str, str], list[CellSummary]] = {}
    for one in summaries:
        pairs.setdefault((one.cell.architecture, one.cell.mechanism), []).append(one)
    table = _table("Standing still for saves / effective restore in ms, mean over the traces")
    mechanisms = _in_order(mechanism for _, mechanism in pairs)
    for name in ("", *mechanisms):
        table.add_column(name, justify="right" if name else "left")
    for architecture in sorted({architecture for architecture, _ in pairs}):
        table.add_row(architecture, *(_pair(pairs.get((architecture, one), [])) for one in mechanisms))
    return table


def _pair(found: Sequence[CellSummary]) -> str:
    stalled, restore = pooled(found, "stalled_share"), pooled(found, "restore")
    parts = [f"{100 * stalled.mean:.1f}%" if stalled else "", f"{1e3 * restore.mean:.1f}" if restore else ""]
    return " / ".join(part for part in parts if part)


def exactness(summaries: Iterable[CellSummary]) -> str:
    """By mechanism, how many runs ended with the weights of the run without a fault."""
    samples: dict[str, list[float]] = {}
    for one in summaries:
        if "exact" in one.samples:
            samples.setdefault(one.cell.mechanism, []).extend(one.samples["exact"])
    told = [f"{name} {sum(samples[name]):.0f} of {len(samples[name])}" for name in _in_order(samples)]
    return f"Final weights bit for bit those of the run without a fault: {', '.join(told) or 'none to compare'}."


def compatibility_table(architectures: Sequence[str], mechanisms: Sequence[str]) -> RenderableType:
    """The compatibility matrix: the paper's class, and this harness's where it differs, with the reasons."""
    table = _table("Compatibility: paper, and here where that differs")
    for name in ("", *mechanisms):
        table.add_column(name)
    reasons = []
    for architecture in architectures:
        row = []
        for mechanism in mechanisms:
            row.append(_classes(architecture, mechanism))
            reasons += _reasons(architecture, mechanism)
        table.add_row(architecture, *row)
    key = Text("V viable, = degenerate, - infeasible; blank before the arrow: not in the paper.", style="dim")
    return Group(table, key, *(Text(reason, style="dim") for reason in reasons))


def _classes(architecture: str, mechanism: str) -> Text:
    paper, here = compatibility.in_paper(architecture, mechanism), compatibility.here(architecture, mechanism)
    if paper and paper.kind is here.kind:
        return Text(*_KINDS[here.kind])
    return Text.assemble(_KINDS[paper.kind] if paper else "", (">", "dim"), _KINDS[here.kind])


def _reasons(architecture: str, mechanism: str) -> list[str]:
    paper, here = compatibility.in_paper(architecture, mechanism), compatibility.here(architecture, mechanism)
    said = []
    if paper and paper.kind is not Kind.VIABLE:
        said.append(("the paper, inferred" if paper.inferred else "the paper", paper))
    if here != paper and (paper or here.kind is not Kind.VIABLE):
        said.append(("this harness", here))
    return [f"{architecture} {mechanism}, {one.kind.value} ({who}): {one.reason}" for who, one in said]


def finding_table(found: Iterable[Finding]) -> Table:
    """The paper's findings, and whether they hold here."""
    table = _table("The paper's findings")
    table.add_column("finding", ratio=3)
    table.add_column("verdict", ratio=1)
    table.add_column("figures", ratio=5)
    styles = {Verdict.HOLDS: "green", Verdict.DOES_NOT: "yellow", Verdict.NOT_MEASURED: "dim"}
    for one in found:
        verdict = f"{one.verdict.value}, because" if one.verdict is Verdict.DOES_NOT else one.verdict.value
        table.add_row(f"{one.claim} ({one.source})", f"[{styles[one.verdict]}]{verdict}[/]", one.because)
    return table


def name_table(title: str, described: Mapping[str, str]) -> Table:
    """Names and what they are."""
    table = _table(title)
    for column in ("name", "what it is"):
        table.add_column(column)
    for name, text in described.items():
        table.add_row(name, text)
    return table
