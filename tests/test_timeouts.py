"""The page on timeouts says what the code does: every name, every value, every order."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import lightning_accelpact.recovery
from lightning_accelpact.recovery.options import ORDER, RecoveryOptions

PAGE = (Path(__file__).parents[1] / "docs" / "timeouts.md").read_text()
ROW = re.compile(r"^\| `([\w.]+)` \| ([\d.]+) (s|ms|days) \|", re.MULTILINE)
ORDER_ROW = re.compile(r"^\| `(\w+)` \| `(\w+)` \|", re.MULTILINE)
UNITS = {"s": 1.0, "ms": 0.001, "days": 86400.0}
PACKAGE = "lightning_accelpact.recovery"


def documented() -> dict[str, float]:
    """Name -> seconds."""
    rows = ROW.findall(PAGE)
    assert len(rows) == len({name for name, _, _ in rows})
    return {name: float(value) * UNITS[unit] for name, value, unit in rows}


def durations_in(file: Path) -> list[str]:
    """The module's constants that are a time: a ``timedelta``, or a name that ends in ``_S``."""
    found = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign):
            names = [one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)]
            is_duration = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "timedelta"
            found += [f"{file.stem}.{name}" for name in names if is_duration or name.endswith("_S")]
    return found


def constants() -> dict[str, float]:
    """Every time that is fixed in the recovery core, in seconds."""
    values: dict[str, float] = {}
    for file in sorted(Path(lightning_accelpact.recovery.__file__).parent.glob("*.py")):
        module = importlib.import_module(PACKAGE if file.stem == "__init__" else f"{PACKAGE}.{file.stem}")
        for name in durations_in(file):
            value = getattr(module, name.partition(".")[2])
            values[name] = value.total_seconds() if isinstance(value, timedelta) else float(value)
    return values


def options() -> dict[str, float]:
    """Every option that is a time, with its default in seconds."""
    return {field.name: field.default for field in dataclasses.fields(RecoveryOptions) if field.type == "float"}


def test_every_timeout_is_documented_with_its_value() -> None:
    assert documented() == pytest.approx({**options(), **constants()})


def test_the_search_finds_what_there_is() -> None:
    assert {"line._PATIENCE", "sentinel._LAST_WORDS_S", "machine._LONGEST_PAUSE_S"} <= set(constants())
    assert set(options()) == {"repair_budget", "collective_timeout", "rebuild_timeout", "heartbeat_deadline"}


def test_no_wait_has_a_number_of_its_own() -> None:
    """A time is a constant with a name, so that the page can have it."""
    for file in Path(lightning_accelpact.recovery.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr in ("sleep", "join", "wait", "wait_for", "alarm"):
                    numbers = [one for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, (int, float))]
                    assert not numbers, f"{file.name}:{node.lineno}"


def test_every_order_is_documented() -> None:
    assert ORDER_ROW.findall(PAGE) == [(shorter, longer) for shorter, longer, _ in ORDER]


@pytest.mark.parametrize(("shorter", "longer"), ORDER_ROW.findall(PAGE))
def test_every_documented_order_is_checked(shorter: str, longer: str) -> None:
    values: dict[str, Any] = {
        "rebuild_timeout": 1.0, "heartbeat_deadline": 1.0, "collective_timeout": 10.0, "repair_budget": 100.0
    }  # fmt: skip
    RecoveryOptions(**values)
    with pytest.raises(ValueError, match=f"{shorter}=.* s must be shorter than {longer}=.* s"):
        RecoveryOptions(**{**values, shorter: values[longer]})
