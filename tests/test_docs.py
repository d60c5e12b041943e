"""The documentation lists the options that there are, with their defaults, and links to what exists."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from accelerate_plugin import AccelPactPlugin
from lightning_accelpact import (
    FabricHSDPStrategy,
    GoodputCallback,
    GoodputOptions,
    ResilientFSDP1Strategy,
    ResilientHSDPStrategy,
)
from lightning_accelpact.goodput import TimeClass
from lightning_accelpact.goodput.plan import plan
from lightning_accelpact.goodput.plan_inputs import PlanInputs
from lightning_accelpact.goodput.plan_view import duration
from lightning_accelpact.goodput.presets import FAILURES, LLAMA_3, WORKLOADS

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| `(\w+)` \| `([^`]+)` \|", re.MULTILINE)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def documented(heading: str) -> dict[str, str]:
    """Option -> default, from the table below a heading of the options page."""
    section = (ROOT / "docs" / "options.md").read_text().partition(f"## `{heading}`")[2].partition("\n## ")[0]
    return dict(ROW.findall(section))


@pytest.mark.parametrize(
    "public",
    [
        ResilientHSDPStrategy,
        ResilientFSDP1Strategy,
        FabricHSDPStrategy,
        AccelPactPlugin,
        GoodputCallback,
        GoodputOptions,
    ],
)
def test_options_page_is_complete(public: type) -> None:
    parameters = inspect.signature(public).parameters.values()
    expected: dict[str, Any] = {parameter.name: repr(parameter.default).replace("'", '"') for parameter in parameters}
    assert documented(public.__name__) == expected


def test_readme_names_real_options() -> None:
    table = (ROOT / "README.md").read_text().partition("| option |")[2].partition("\n\n")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = re.findall(r"`(\w+)`", " ".join(first_cells))
    assert named
    assert set(named) <= set(inspect.signature(ResilientHSDPStrategy).parameters)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not missing


def test_the_plan_shown_is_what_the_planner_says() -> None:
    workload = WORKLOADS["llama3-405b"]
    names = ("gpus", "update_s", "state_gb", "checkpoint_gb_s", "replica_gpus")
    rows = plan(PlanInputs(failures=LLAMA_3, **{name: getattr(workload, name) for name in names}))
    page = (ROOT / "docs" / "goodput.md").read_text()
    for row in rows:
        lost = duration(row.outlook.lost_s_per_day)
        assert f"| {row.method.name} | {100 * row.outlook.goodput:.2f} % | {lost} |" in page


def test_every_preset_is_documented() -> None:
    page = (ROOT / "docs" / "goodput.md").read_text()
    for name in (*FAILURES, *WORKLOADS):
        assert f"`{name}`" in page or f" {name}`" in page


def test_every_class_of_time_is_documented() -> None:
    page = (ROOT / "docs" / "goodput.md").read_text()
    assert [cls.value for cls in TimeClass if f"`{cls.value}`" not in page] == []
