"""The envelope: what is found for a stack, what counts as stale, and what cannot be read."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from lightning_accelpact.recovery.action import Action, Phase
from lightning_accelpact.recovery.envelope import (
    FORMAT,
    PUBLISHED,
    Entry,
    Envelope,
    EnvelopeError,
    ProbeResult,
    cache_file,
    user_file,
)
from lightning_accelpact.recovery.stack import Stack

STACK = Stack(
    torch="2.13.0+cpu", backend="gloo", backend_version="of torch abc", device="cpu x86_64", driver="Linux 6.1",
    framework="lightning.pytorch 2.6.6", fsdp="fsdp2", accelpact="0.1.0",
)  # fmt: skip
ACTIONS = {Phase.COMMITTED: (Action.PRESERVE,), Phase.BACKWARD: (Action.RETRY, Action.REDO)}


def entry(**changes: Any) -> Entry:
    probes = (ProbeResult(name="rebuild", trials=5, successes=5, seconds=0.01, detail="seen"),)
    values = {"stack": STACK, "actions": ACTIONS, "date": "2026-11-30T10:00:00+00:00", "source": "here", "probes": probes}
    return Entry(**{**values, **changes})


def test_what_was_measured_on_exactly_this_stack_holds() -> None:
    ruling = Envelope([entry()]).ruling(STACK)
    for phase in Phase:
        for action in Action:
            assert ruling.permits(action, phase) == (action in ACTIONS.get(phase, ()))
    assert [action for action in Action if ruling.ever_permits(action)] == [Action.PRESERVE, Action.RETRY, Action.REDO]


def test_nothing_is_qualified_on_an_unknown_stack() -> None:
    ruling = Envelope().ruling(STACK)
    assert not ruling.actions
    assert ruling.reason.startswith("nothing has been measured on this stack (torch 2.13.0+cpu, gloo of torch abc,")
    assert "`accelpact qualify`" in ruling.reason and "\n" not in ruling.reason


@pytest.mark.parametrize("name", [field.name for field in fields(Stack)])
def test_every_field_of_the_stack_counts(name: str) -> None:
    ruling = Envelope([entry(stack=replace(STACK, **{name: "another"}))]).ruling(STACK)
    assert not ruling.actions
    assert f"of 2026-11-30, was made on {name} another, and this is {getattr(STACK, name)}; `accelpact qualify`" in ruling.reason


@pytest.mark.parametrize(("name", "value"), [("profile", "graphs"), ("objective", "loss")])
def test_profile_and_objective_count(name: str, value: str) -> None:
    envelope = Envelope([entry(**{name: value})])
    assert not envelope.ruling(STACK).actions
    assert f"was made on {name} {value}, and this is" in envelope.ruling(STACK).reason
    assert envelope.ruling(STACK, **{name: value}).actions == ACTIONS


def test_the_nearest_measurement_is_named() -> None:
    far = entry(stack=replace(STACK, torch="1", driver="1"))
    near = entry(stack=replace(STACK, torch="2.12.0"), date="2026-01-02")
    for entries in ([far, near], [near, far]):
        assert "of 2026-01-02, was made on torch 2.12.0, and this is 2.13.0+cpu;" in Envelope(entries).ruling(STACK).reason


def test_what_is_published_is_never_enough() -> None:
    envelope = Envelope([entry(how="published")])
    assert envelope.find(STACK) is None
    assert not envelope.ruling(STACK).actions


def test_of_several_measurements_the_newest_counts() -> None:
    newer = entry(actions={}, date="2026-12-01T09:00:00+00:00")
    for entries in ([entry(), newer], [newer, entry()]):
        assert Envelope(entries).find(STACK) is newer


def test_a_failed_measurement_says_what_failed() -> None:
    probes = (
        ProbeResult(name="rebuild", trials=2, successes=2),
        ProbeResult(name="redo", trials=3, successes=2, detail="rank 1: process killed by SIGSEGV"),
    )
    ruling = entry(actions={}, probes=probes).ruling()
    assert ruling.reason == (
        "measured 2026-11-30: redo: 2 of 3, rank 1: process killed by SIGSEGV; `accelpact qualify` finds out what this"
        " stack can do"
    )


@pytest.mark.parametrize(("trials", "successes", "passed"), [(0, 0, False), (1, 0, False), (5, 4, False), (5, 5, True)])
def test_a_probe_passes_if_every_trial_did(trials: int, successes: int, passed: bool) -> None:
    assert ProbeResult(name="redo", trials=trials, successes=successes).passed is passed


def test_a_file_holds_all_there_is(tmp_path: Path) -> None:
    file = tmp_path / "new" / "envelope.json"
    entries = [entry(), entry(stack=replace(STACK, torch="2.12.0"), how="published", note="for a person")]
    Envelope(entries).save(file)
    loaded = Envelope.load(file)
    assert [one.to_dict() for one in loaded.entries] == [one.to_dict() for one in entries]
    assert loaded.ruling(STACK).actions == ACTIONS
    assert list(file.parent.iterdir()) == [file]


def test_several_files_are_one_envelope(tmp_path: Path) -> None:
    for name, torch in (("a", "2.13.0+cpu"), ("b", "2.14.0")):
        Envelope([entry(stack=replace(STACK, torch=torch))]).save(tmp_path / name)
    envelope = Envelope.load(tmp_path / "a", tmp_path / "b")
    assert envelope.find(STACK) and envelope.find(replace(STACK, torch="2.14.0"))


def test_a_new_measurement_takes_the_place_of_the_old_one() -> None:
    other, published = entry(profile="graphs"), entry(how="published")
    newer = entry(date="2027-01-01")
    assert Envelope([entry(), other, published]).with_entry(newer).entries == (other, published, newer)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read"),
        ("[]", 'it has no "format"'),
        ('{"format": "accelpact-envelope/2", "entries": []}', 'it has no "format": "accelpact-envelope/1"'),
        (f'{{"format": "{FORMAT}"}}', "makes no sense"),
    ],
)
def test_what_is_no_envelope_is_named(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "envelope.json"
    file.write_text(content)
    with pytest.raises(EnvelopeError, match="envelope.json") as caught:
        Envelope.load(file)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"actions": {"sleeping": []}}, {"actions": {"backward": ["pray"]}}, {"how": "guessed"}, {"extra": 1},
        {"stack": {"torch": "2"}}, {"stack": {**STACK.to_dict(), "torch": 2}}, {"probes": [{"name": "redo"}]},
        {"date": "yesterday"},
    ],
)  # fmt: skip
def test_an_entry_that_makes_no_sense_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    file = tmp_path / "envelope.json"
    values = json.loads(json.dumps(entry().to_dict()))
    file.write_text(json.dumps({"format": FORMAT, "entries": [{**values, **change}]}))
    with pytest.raises(EnvelopeError, match="has an entry that makes no sense"):
        Envelope.load(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvelopeError, match="nothing.json cannot be read"):
        Envelope.load(tmp_path / "nothing.json")


def test_what_comes_with_the_package_is_published_and_no_more() -> None:
    entries = Envelope.load(PUBLISHED).entries
    assert entries and {one.how for one in entries} == {"published"}
    assert all(one.source for one in entries)
    devices = {one.stack.device: one for one in entries if one.profile == "eager"}
    assert devices["cuda NVIDIA A100"].actions == {Phase.COMMITTED: (Action.PRESERVE,)}
    assert not devices["npu Huawei Ascend 910B"].actions


def test_places_of_the_files() -> None:
    there = {"XDG_CONFIG_HOME": "/config", "XDG_CACHE_HOME": "/cache", "HOME": "/home/me"}
    assert user_file(there) == Path("/config/accelpact/envelope.json")
    assert user_file({"HOME": "/home/me"}) == Path("/home/me/.config/accelpact/envelope.json")
    assert cache_file(STACK, there).parent == Path("/cache/accelpact")
    names = {cache_file(replace(STACK, torch=torch), {"HOME": "/home/me"}) for torch in ("1", "2")}
    assert len(names) == 2 and {name.parent for name in names} == {Path("/home/me/.cache/accelpact")}
