"""``accelpact plan``: its table, its JSON, its pictures, and what it says to bad input."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lightning_accelpact.cli import main
from lightning_accelpact.goodput.methods import methods
from lightning_accelpact.goodput.plan_inputs import PlanInputs
from lightning_accelpact.goodput.presets import LLAMA_3, PAPER_16

OWN = ["--gpus", "64", "--update-s", "1.5", "--state-gb", "100", "--checkpoint-gb-s", "2", "--days", "100"]


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is printed by ``accelpact plan``."""
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error of ``accelpact plan``, one line."""
    assert main(["plan", *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_the_table_has_a_row_for_each_method(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--workload", "paper16", "--days", "100")
    names = [method.name for method in methods(PlanInputs(**{
        name: getattr(PAPER_16, name) for name in ("gpus", "update_s", "state_gb", "checkpoint_gb_s", "replica_gpus")
    }, failures=LLAMA_3))]  # fmt: skip
    for name in names:
        assert len(re.findall(rf"^{re.escape(name)} +\d+\.\d+%", text, re.MULTILINE)) == 1
    assert "16 GPUs, 0.00758 failures a day (one in 132.0 days)" in text
    assert "arXiv 2407.21783" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


def test_json_has_inputs_and_methods(capsys: pytest.CaptureFixture[str]) -> None:
    values = json.loads(said(capsys, *OWN, "--json", "--failures", "rsc1", "--relaunch-s", "60..120..600"))
    assert values["inputs"]["relaunch_s"] == {"low": 60, "likely": 120, "high": 600}
    assert values["inputs"]["gpus"] == 64
    assert values["failures"]["name"] == "rsc1"
    cold = values["methods"][0]
    assert cold["goodput"]["low"] < cold["goodput"]["likely"] < cold["goodput"]["high"]
    assert cold["checkpoint_s"] == 50
    assert cold["simulation"]["days"] == 100


def test_a_given_value_wins_over_the_workload(capsys: pytest.CaptureFixture[str]) -> None:
    values = json.loads(said(capsys, "--workload", "paper16", "--gpus", "64", "--days", "0", "--json"))
    assert (values["inputs"]["gpus"], values["inputs"]["update_s"]) == (64, 220)
    assert values["methods"][0]["simulation"] is None


def test_the_rate_of_failures_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    values = json.loads(said(capsys, *OWN, "--failures-per-day", "0.5..2", "--variation", "1.5", "--json"))
    assert values["failures"]["per_day"] == pytest.approx({"low": 0.5, "likely": 1.25, "high": 2})
    assert values["failures"]["variation"] == 1.5


def test_bursts_and_domains_reach_the_simulation(capsys: pytest.CaptureFixture[str]) -> None:
    def heal(*options: str) -> float:
        arguments = ["--workload", "llama3-405b", "--days", "2000", "--json", *options]
        return json.loads(said(capsys, *arguments))["methods"][-1]["simulation"]["goodput"]

    assert heal("--domain-share", "0.9") < heal() - 0.01
    assert heal("--cascade-share", "0.5") != heal("--variation", "3") != heal()


def test_pictures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said(capsys, *OWN, "--plots", str(tmp_path / "new"))
    for name in ("goodput-by-size.svg", "goodput-by-interval.svg"):
        root = ElementTree.parse(tmp_path / "new" / name).getroot()
        assert root.tag.endswith("svg")
        assert "AccelPact + HEAL" in (tmp_path / "new" / name).read_text()


def test_without_matplotlib_it_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    message = refused(capsys, *OWN, "--plots", str(tmp_path))
    assert message.startswith("accelpact: plots need matplotlib, which is not installed: pip install")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--gpus", "8"], "a plan needs --update-s, --state-gb, --checkpoint-gb-s; give them, or take a published job"),
     ([*OWN, "--update-s", "-1"], "--update-s must be finite and more than 0, got -1.0: give what you measure"),
     ([*OWN, "--gpus", "4"], "--gpus must be at least --replica-gpus=8, the size of one replica"),
     ([*OWN, "--failures-per-day", "0"], "--failures-per-day must be more than 0, got 0"),
     ([*OWN, "--days", "-1"], "--days must be finite and at least 0, got -1.0; 0 leaves the simulation out"),
     ([*OWN, "--cascade-share", "1"], "--cascade-share must be from 0 to below 1, got 1.0"),
     ([*OWN, "--variation", "0"], "--variation must be finite and more than 0, got 0.0; 1 is Poisson")],
)  # fmt: skip
def test_bad_input_is_one_sentence(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert message in refused(capsys, *arguments)


@pytest.mark.parametrize("text", ["x", "5..1"])
def test_a_bad_range_is_named(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit):
        main(["plan", *OWN, "--repair-s", text])
    assert "--repair-s" in capsys.readouterr().err.splitlines()[-1]
