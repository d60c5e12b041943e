"""The options of the plugin and of the environment: what is wrong is said, whatever it is."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

from accelerate_plugin import AccelPactPlugin, FaultPlan
from accelerate_plugin.plugin import PARSERS, PREFIX, SWITCH
from lightning_accelpact.recovery.options import RecoveryOptions


def test_it_has_the_options_of_the_strategies_with_their_defaults() -> None:
    from lightning_accelpact import FabricHSDPStrategy

    theirs = inspect.signature(FabricHSDPStrategy).parameters
    ours = {field.name: field.default for field in fields(AccelPactPlugin)}
    assert ours == {name: theirs[name].default for name in ours}
    # Accelerate's own configuration says the rest
    assert set(theirs) - set(ours) == {
        "wrap", "manual_optimization", "save_distributed_checkpoint", "process_group_backend",
    }  # fmt: skip


def test_every_option_can_be_given_as_a_text() -> None:
    assert set(PARSERS) == {field.name for field in fields(AccelPactPlugin)}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("replicate", 0), ("replicate", True), ("shard", "all"), ("repair_budget", -1), ("collective_timeout", 5.0),
        ("max_repairs_per_update", 0), ("uncommitted", "ignore"), ("goodput", "yes"), ("faults", ["backward@3:3"]),
        ("envelope", ""),
    ],
)  # fmt: skip
def test_a_bad_value_is_named(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=option):
        AccelPactPlugin(**{option: value})


def test_recovery_options_are_passed_on() -> None:
    plugin = AccelPactPlugin(collective_timeout=50, uncommitted="redo")
    assert plugin.recovery == RecoveryOptions(collective_timeout=50, uncommitted="redo")


@pytest.mark.parametrize("value", ["", "false", "0", "No"])
def test_the_switch_can_be_off(value: str) -> None:
    assert AccelPactPlugin.from_environment({SWITCH: value, f"{PREFIX}NONSENSE": "1"}) is None


def test_the_environment_gives_options() -> None:
    plugin = AccelPactPlugin.from_environment({
        SWITCH: "true", f"{PREFIX}REPLICATE": "2", f"{PREFIX}SHARD": "auto", f"{PREFIX}REPAIR_BUDGET": "70.5",
        f"{PREFIX}COLLECTIVE_TIMEOUT": "60", f"{PREFIX}GOODPUT": "false", f"{PREFIX}FAULTS": "backward@3:3, boundary@5",
        f"{PREFIX}AUTOLOAD": "1", f"{PREFIX}ENVELOPE": "/shared/envelope.json", "OTHER": "x",
    })  # fmt: skip
    assert plugin.recovery.envelope == "/shared/envelope.json"
    assert (plugin.replicate, plugin.shard, plugin.repair_budget, plugin.goodput) == (2, "auto", 70.5, False)
    assert list(map(str, plugin.faults.faults)) == ["backward@3:3:sockets", "boundary@5:0:sockets"]
    assert isinstance(plugin.faults, FaultPlan)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (SWITCH, "on please", "must be true or false"),
        (f"{PREFIX}COLECTIVE_TIMEOUT", "60", "did you mean ACCELPACT_COLLECTIVE_TIMEOUT"),
        (f"{PREFIX}SHARD", "two", "ACCELPACT_SHARD='two'"),
        (f"{PREFIX}FAULTS", "backwards@3", "POINT@UPDATE"),
        (f"{PREFIX}REBUILD_TIMEOUT", "1e9", "must be shorter than"),
    ],
)
def test_a_bad_environment_is_an_error(name: str, value: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AccelPactPlugin.from_environment({SWITCH: "true", name: value})
