"""Records survive their way through a file."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from failbench_records import like, made

from benchmarks.failbench.cell import Cell
from benchmarks.failbench.record import Outcome, Record, append_record, read_records


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new" / "records.jsonl"
    records = [like("FT4"), made("A2/FT9/none"), made("A6/FT2/F1", outcome=Outcome.FAILED, reason="it\nbroke")]
    for record in records:
        append_record(path, record)
    assert read_records([path]) == records
    assert len(path.read_text().splitlines()) == 3


def test_what_a_killed_writer_left_is_cut_off(tmp_path: Path) -> None:
    path, record = tmp_path / "records.jsonl", made("A2/FT9/none")
    append_record(path, record)
    with path.open("a") as file:
        file.write(record.to_json()[:40])
    assert read_records([path]) == [record]
    append_record(path, record)
    assert read_records([path]) == [record, record]


@pytest.mark.parametrize(
    "line", ["{}", "[]", "no", '{"cell": "A2/FT1/F1", "size": 3}', '{"cell": "A2/FT1"}', '{"outcome": "lucky"}']
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "records.jsonl"
    append_record(path, made("A2/FT9/none"))
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"records\.jsonl, line 2: "):
        read_records([path])


def test_every_field_is_documented() -> None:
    assert [
        one.name
        for one in fields(Record)
        if f"        {one.name}: " not in Record.__doc__ and f", {one.name}" not in Record.__doc__
    ] == []


def test_the_skew_is_what_a_fault_was_late_by() -> None:
    (fault,) = like("FT1").faults
    assert fault.skew_s == pytest.approx(0.005)


@pytest.mark.parametrize(("text", "message"), [
    ("A2/FT1", "ARCHITECTURE/MECHANISM/TRACE"),
    ("A2/FT1/F9", "trace='F9' must be one of F1, F2, F3, hang, preempt, none"),
])  # fmt: skip
def test_what_is_no_cell_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cell.parse(text)


def test_a_cell_knows_what_it_is_compared_with() -> None:
    cell = Cell.parse("A2/FT1/F1")
    assert (str(cell), str(cell.baseline)) == ("A2/FT1/F1", "A2/FT9/none")
