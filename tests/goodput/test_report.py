"""Ranks put together, and a summary that reads well in a narrow terminal and in a log file."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from lightning_accelpact.goodput.ledger import TimeClass
from lightning_accelpact.goodput.report import MAX_ROWS, GoodputSummary, render, summarize
from lightning_accelpact.recovery.incident import Incident


def incident(rank: int = 0, generation: int = 1, checkpoint: int | None = None, **changes: Any) -> dict[str, Any]:
    values = dict(
        number=generation, time=1e9 + generation, source="notice", reason="RuntimeError: reset", phase="forward",
        frontier=4, action="redo", verb="redo", detect_s=0.004, total_s=0.030, redo_s=0.2, redone_micro_batches=2,
        admit_s=0.001, agree_s=0.002, retire_s=0.012, rebuild_s=0.005, rebind_s=0.0004, validate_s=0.003,
        outcome="recovered",
    )  # fmt: skip
    return {
        **Incident(rank=rank, generation=generation, **{**values, **changes}).to_dict(),
        "checkpoint": checkpoint,
    }


def record(rank: int = 0, world_size: int = 1, incidents: tuple[dict[str, Any], ...] = (), **totals: float) -> dict:
    totals = totals or {"productive": 8.0, "guard": 0.5, "data_loading": 1.5}
    return {
        "rank": rank,
        "world_size": world_size,
        "elapsed": sum(totals.values()),
        "totals": totals,
        "updates": 16,
        "update_s": 0.5,
        "incidents": list(incidents),
    }


def text(summary: GoodputSummary, width: int = 80, encoding: str = "utf-8") -> str:
    """The summary as it arrives in a file."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
    Console(file=file, width=width).print(render(summary))
    file.seek(0)
    return file.read()


def squeezed(output: str) -> str:
    """Without the blanks that pad each line."""
    return "\n".join(line.rstrip() for line in output.splitlines())


def row(output: str, first: str) -> list[str]:
    """The cells of the one row that begins with ``first``."""
    (line,) = [line for line in output.splitlines() if line.strip().startswith(f"{first} ")]
    return line.split()


def test_rank_seconds_are_added_up() -> None:
    summary = summarize([record(0, 2, productive=6.0, guard=1.0), record(1, 2, productive=4.0, guard=3.0, other=2.0)])
    assert (summary.ranks, summary.world_size, summary.updates) == (2, 2, 16)
    assert (summary.elapsed_s, summary.wall_s, summary.guard_s) == (16, 9, 3)
    assert {cls: s for cls, s in summary.totals.items() if s} == {
        TimeClass.PRODUCTIVE: 10, TimeClass.GUARD: 4, TimeClass.OTHER: 2,
    }  # fmt: skip
    assert summary.goodput == 10 / 16


def test_the_typical_update_is_the_median() -> None:
    def update_s(*seconds: float) -> float:
        return summarize([{**record(rank, 3), "update_s": one} for rank, one in enumerate(seconds)]).update_s

    assert update_s(0.5, 9.0, 0.6) == 0.6


def test_one_generation_is_one_incident() -> None:
    records = [
        record(0, 2, (incident(0, detect_s=0.004, total_s=0.03, redone_micro_batches=1),)),
        record(1, 2, (incident(1, source="exception", phase="backward", detect_s=0.0, total_s=0.04),)),
    ]
    (merged,) = summarize(records).incidents
    assert (merged.phase, merged.fault_ranks) == ("backward", (1,))
    assert (merged.detect_s, merged.total_s, merged.redone_micro_batches) == (0.004, 0.04, 2)


def test_incidents_come_in_the_order_of_their_times() -> None:
    # A second fit counts its repairs from 1 again
    records = [
        record(0, 2, (incident(0, 2, time=10.0), incident(0, 3, time=20.0), incident(0, 1, time=30.0))),
        record(1, 2, (incident(1, 3, time=20.1), incident(1, 1, time=29.9))),
    ]
    assert [one.generation for one in summarize(records).incidents] == [2, 3, 1]


def test_incidents_of_one_rank_are_never_merged() -> None:
    repaired, rejected = incident(0, 3, frontier=4), incident(0, 3, frontier=6, outcome="fail_stop")
    assert [one.frontier for one in summarize([record(incidents=(repaired, rejected))]).incidents] == [4, 6]


def test_incidents_of_different_attempts_are_never_merged() -> None:
    """A rank that was killed in the first attempt has seen only the second one's."""
    first = {**incident(rank=0, time=1.0), "attempt": 0}
    second = [{**incident(rank=rank, time=2.0, frontier=9), "attempt": 1} for rank in (0, 1)]
    summary = summarize([record(0, 2, (first, second[0])), record(1, 2, (second[1],))])
    assert [(one.frontier, one.fault_ranks) for one in summary.incidents] == [(4, (0,)), (9, (0, 1))]


def test_the_fail_stop_of_an_attempt_is_one_incident_whatever_repair_its_ranks_were_in() -> None:
    ends = [incident(rank=rank, generation=generation, outcome="fail_stop", action="restart", time=3.0)
            for rank, generation in enumerate((1, 2, 2))]  # fmt: skip
    repaired = [incident(rank=rank, generation=1, time=2.0) for rank in range(3)]
    summary = summarize([record(rank, 3, (repaired[rank], ends[rank])) for rank in range(3)])
    assert [(one.outcome, one.fault_ranks) for one in summary.incidents] == [
        ("recovered", (0, 1, 2)), ("fail_stop", (0, 1, 2)),
    ]  # fmt: skip


def test_replays_are_counted_where_there_was_a_restart() -> None:
    totals = {"productive": 8.0, "replayed_updates": 1.25}
    ranks = [{**record(rank, 2, **totals), "attempts": 3, "replayed": 5 + rank} for rank in (0, 1)]
    summary = summarize(ranks)
    assert (summary.replayed, summary.attempts) == (6, 3)
    assert "2 restarts from a checkpoint: 6 updates replayed, 2.50 rank-seconds." in text(summary)
    assert "from a checkpoint:" not in text(summarize([record()]))
    old = {name: value for name, value in summary.to_dict().items() if name != "replayed"}
    assert GoodputSummary.from_dict(old).replayed == 0


def test_without_an_exception_every_phase_is_named() -> None:
    records = [record(0, 2, (incident(0, phase="prepared"),)), record(1, 2, (incident(1, phase="stepping"),))]
    (merged,) = summarize(records).incidents
    assert (merged.phase, merged.fault_ranks) == ("prepared/stepping", (0, 1))


def test_the_age_counts_from_a_checkpoint_that_all_ranks_have() -> None:
    def age(*checkpoints: int | None) -> int:
        records = [
            record(rank, 2, (incident(rank, frontier=9, checkpoint=checkpoint),))
            for rank, checkpoint in enumerate(checkpoints)
        ]
        return summarize(records).incidents[0].checkpoint_age

    assert (age(8, 8), age(8, 6), age(8, None), age(None, None)) == (1, 3, 9, 9)


def test_the_estimate_counts_recovered_incidents_alone() -> None:
    recovered = incident(0, 1, frontier=4, detect_s=0.5, total_s=1.0, redo_s=0.25)
    rejected = incident(0, 2, frontier=9, outcome="fail_stop")
    one = record(incidents=(recovered, rejected))
    # 4 updates of 8 / 16 s, less 1.75 s and a guard of 0.5 s
    assert summarize([one]).saved_s == pytest.approx(2.0 - 1.75 - 0.5)
    assert summarize([one], restart_s=30).saved_s == pytest.approx(2.0 - 1.75 - 0.5 + 30)


def test_bad_records_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one rank, got none"):
        summarize([])
    with pytest.raises(ValueError, match="idling"):
        summarize([record(idling=1.0)])
    with pytest.raises(KeyError, match="update_s"):
        summarize([{name: value for name, value in record().items() if name != "update_s"}])


def test_the_summary_is_plain_json() -> None:
    values = summarize([record(incidents=(incident(),))]).to_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert (values["goodput"], values["totals"]["productive"], values["incidents"][0]["frontier"]) == (0.8, 8.0, 4)


def test_the_summary_is_read_back_whole() -> None:
    records = [record(rank, 2, (incident(rank, source="exception", checkpoint=3),)) for rank in range(2)]
    summary = summarize(records, restart_s=30)
    assert GoodputSummary.from_dict(json.loads(json.dumps(summary.to_dict()))) == summary


def test_every_class_with_time_has_a_row_and_no_other_has() -> None:
    output = text(summarize([record(productive=90.0, group_repair=9.99, guard=0.01, evaluation=0.0)]))
    assert row(output, "productive") == ["productive", "90.00", "90.0%"]
    assert row(output, "group repair") == ["group", "repair", "9.99", "10.0%"]
    assert row(output, "guard") == ["guard", "0.01", "<0.1%"]
    assert row(output, "elapsed") == ["elapsed", "100.00"]
    assert "evaluation" not in output
    assert "Goodput 90.0%: 16 updates committed in 100.00 s (1 rank)" in output


def worst_case() -> GoodputSummary:
    """Wide cells: long names, large numbers, many ranks."""
    ranks = range(0, 8, 2)
    slow = {name: 12.3456 for name in ("detect_s", "admit_s", "agree_s", "rebuild_s", "validate_s", "total_s")}
    wide = dict(frontier=123_456, action="roll_forward", outcome="fail_stop", redo_s=1234.5, **slow)
    phases = ["committed", "validation", "committed", "committed"]
    return summarize(
        [record(rank, 8, (incident(rank, source="exception", phase=phase, **wide),))
         for rank, phase in zip(ranks, phases, strict=True)]
    )  # fmt: skip


@pytest.mark.parametrize("width", [80, 100])
def test_no_cell_is_cut_off(width: int) -> None:
    output = text(worst_case(), width)
    assert max(map(len, output.splitlines())) <= width
    assert "…" not in output
    cells = " ".join(output.split())
    for cell in ("123456 0,2,4,6 committed/ roll", "validation", "forward", "fail", "stop", "1,234", "(4 of 8 ranks)"):
        assert cell in cells
    assert "123456 12,346 12,346 12,346 12.0 12,346 0.4 12,346 12,346" in cells


def test_an_incident_has_one_row_with_every_duration() -> None:
    output = text(summarize([record(incidents=(incident(frontier=7, checkpoint=5, source="exception"),))]))
    what, when = [line.split() for line in output.splitlines() if line.strip().startswith("7 ")]
    assert what == ["7", "0", "forward", "redo", "recovered", "2", "0.20", "2"]
    assert when == ["7", "4.0", "1.0", "2.0", "12.0", "5.0", "0.4", "3.0", "30.0"]


@pytest.mark.parametrize(
    ("ranks", "shown"),
    [((3,), "3"), ((0, 1, 2, 5, 8), "0-2,5,8"), (range(0, 64, 8), "0,8,16,+5"), ((0, 1, 4, 6, 8, 10), "0-1,4,6,+2")],
)
def test_many_ranks_are_shortened(ranks: tuple[int, ...], shown: str) -> None:
    records = [record(rank, 64, (incident(rank, source="exception"),)) for rank in ranks]
    assert shown in text(summarize(records), 100).split()


def test_a_log_file_gets_neither_colour_nor_foreign_characters() -> None:
    output = text(worst_case(), encoding="ascii")
    assert output.isascii()
    assert "\x1b" not in output


def test_the_estimate_says_what_it_counts() -> None:
    one = record(incidents=(incident(frontier=4),))
    output = text(summarize([one]))
    assert "a restart from update 0 (no checkpoint):\n" in squeezed(output)
    assert "4 updates of 0.50 s not replayed" in output
    assert "Lower bound" in output
    output = text(summarize([record(incidents=(incident(frontier=4, checkpoint=3),))], restart_s=30))
    assert "a restart from the last checkpoint:\n" in squeezed(output)
    assert "1 update of 0.50 s" in output
    assert "Lower bound" not in output
    assert "counted as 30.00 s, 1 restart." in output


def test_without_a_recovery_no_saving_is_claimed() -> None:
    output = text(summarize([record(incidents=(incident(outcome="fail_stop"),))]))
    assert "Nothing was recovered from memory. The boundary guard took 0.50 s." in output
    assert "saved" not in output


def test_many_incidents_leave_the_terminal_readable() -> None:
    many = tuple(incident(0, number, frontier=1000 + number) for number in range(1, MAX_ROWS + 6))
    output = text(summarize([record(incidents=many)]))
    assert "The last 20 of 25 incidents are shown." in output
    assert "1005" not in output
    assert "1006" in output
