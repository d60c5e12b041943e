"""The page on FailBench names what there is."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks.failbench import registry
from benchmarks.failbench.__main__ import main
from benchmarks.failbench.cell import TRACES
from benchmarks.failbench.record import Evidence, Outcome, Record

PAGE = (Path(__file__).parents[2] / "docs" / "failbench.md").read_text()
NAMES = [
    *registry.packaged(registry.ARCHITECTURES),
    *registry.packaged(registry.MECHANISMS),
    *TRACES,
    *(one.value for one in (*Outcome, *Evidence)),
]


@pytest.mark.parametrize("name", NAMES)
def test_has(name: str) -> None:
    assert f"`{name}`" in PAGE


def test_the_fields_are_those_of_a_record() -> None:
    table = PAGE.partition("| field | meaning |")[2].partition("\n\n")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = re.findall(r"`(\w+)`", " ".join(first_cells))
    assert len(named) > 10
    assert set(named) <= {one.name for one in fields(Record)}


@pytest.mark.parametrize("option", sorted(set(re.findall(r"`(--[\w-]+)`", PAGE))))
def test_every_option_is_one(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    helped = ""
    for command in ("run", "matrix", "report", "decide", "list"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        helped += capsys.readouterr().out
    assert f"{option} " in helped
