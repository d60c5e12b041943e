"""One ruling for all ranks: where rank 0 finds it, and what is refused."""

from __future__ import annotations

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from recovery.test_envelope import ACTIONS, STACK, entry

from lightning_accelpact.recovery.action import UNRESTRICTED, Ruling
from lightning_accelpact.recovery.agreement import EnvelopeSource, agree
from lightning_accelpact.recovery.control import Superseded
from lightning_accelpact.recovery.envelope import (
    Entry,
    Envelope,
    EnvelopeError,
    ProbeResult,
    cache_file,
    user_file,
)
from lightning_accelpact.recovery.stack import Stack

OTHER = replace(STACK, torch="2.12.0")


def never(stack: Stack) -> Entry:
    raise AssertionError("nothing was to be measured")


def places(folder: Path, **more: str) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(folder / "config"), "XDG_CACHE_HOME": str(folder / "cache"), **more}


# -- where the ruling comes from


def test_off_restricts_nothing(tmp_path: Path) -> None:
    assert EnvelopeSource("off", never, places(tmp_path)).ruling(STACK) is UNRESTRICTED


@pytest.mark.parametrize("as_path", [True, False])
def test_a_file_counts_alone(tmp_path: Path, as_path: bool) -> None:
    own, file = places(tmp_path), tmp_path / "given.json"
    Envelope([entry()]).save(user_file(own))
    Envelope([entry(stack=OTHER)]).save(file)
    source = EnvelopeSource(file if as_path else str(file), never, own)
    assert source.ruling(OTHER).actions == ACTIONS
    assert not source.ruling(STACK).actions


def test_the_variable_stands_in_for_auto_alone(tmp_path: Path) -> None:
    file = tmp_path / "given.json"
    Envelope([entry()]).save(file)
    there = places(tmp_path, ACCELPACT_ENVELOPE=str(file))
    assert EnvelopeSource("auto", never, there).ruling(STACK).actions == ACTIONS
    assert EnvelopeSource("off", never, there).ruling(STACK) is UNRESTRICTED
    assert EnvelopeSource("auto", never, places(tmp_path, ACCELPACT_ENVELOPE="off")).ruling(STACK) is UNRESTRICTED


def test_auto_takes_the_users_file(tmp_path: Path) -> None:
    Envelope([entry()]).save(user_file(places(tmp_path)))
    assert EnvelopeSource("auto", never, places(tmp_path)).ruling(STACK).actions == ACTIONS


def test_auto_measures_once_for_each_stack(tmp_path: Path) -> None:
    measured: list[Stack] = []

    def qualify(stack: Stack) -> Entry:
        measured.append(stack)
        return entry(stack=stack)

    source = EnvelopeSource("auto", qualify, places(tmp_path))
    for stack in (STACK, STACK, OTHER, OTHER, STACK):
        assert source.ruling(stack).actions == ACTIONS
    assert measured == [STACK, OTHER]


FAILED = (ProbeResult(name="redo", trials=1, successes=0, detail="hung"),)


def failed(*, hours_ago: float) -> Entry:
    date = datetime.now(UTC) - timedelta(hours=hours_ago)
    return entry(actions={}, probes=FAILED, date=date.isoformat(timespec="seconds"))


def test_a_stack_that_failed_is_measured_again_after_a_day(tmp_path: Path) -> None:
    Envelope([failed(hours_ago=25)]).save(cache_file(STACK, places(tmp_path)))
    again = EnvelopeSource("auto", lambda stack: entry(), places(tmp_path))
    assert again.ruling(STACK).actions == ACTIONS
    assert Envelope.load(cache_file(STACK, places(tmp_path))).find(STACK).actions == ACTIONS


def test_a_stack_that_failed_is_not_measured_at_once_again_and_says_so(tmp_path: Path) -> None:
    Envelope([failed(hours_ago=23)]).save(cache_file(STACK, places(tmp_path)))
    ruling = EnvelopeSource("auto", never, places(tmp_path)).ruling(STACK)
    assert not ruling.actions and "`accelpact qualify`" in ruling.reason
    Envelope([entry()]).save(user_file(places(tmp_path)))  # which qualify has written since
    assert EnvelopeSource("auto", never, places(tmp_path)).ruling(STACK).actions == ACTIONS


def test_a_cache_that_is_broken_is_measured_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = cache_file(STACK, places(tmp_path))
    file.parent.mkdir(parents=True)
    file.write_text("{")
    assert EnvelopeSource("auto", lambda stack: entry(), places(tmp_path)).ruling(STACK).actions == ACTIONS
    assert "measured again" in caplog.text
    assert Envelope.load(file).find(STACK)


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file in the place of the folder")
    assert EnvelopeSource("auto", lambda stack: entry(), places(tmp_path)).ruling(STACK).actions == ACTIONS
    assert "cannot be kept for the next run" in caplog.text


def test_a_users_file_that_is_broken_is_an_error(tmp_path: Path) -> None:
    user_file(places(tmp_path)).parent.mkdir(parents=True)
    user_file(places(tmp_path)).write_text("{")
    with pytest.raises(EnvelopeError, match="cannot be read"):
        EnvelopeSource("auto", never, places(tmp_path)).ruling(STACK)


# -- what all ranks make of it


class Table:
    """The control plane of all ranks, which are threads here."""

    def __init__(self, size: int) -> None:
        self._messages: list[dict[str, Any]] = [{} for _ in range(size)]
        self._all_are_here = threading.Barrier(size, timeout=10)

    def seat(self, rank: int) -> Any:
        def exchange(topic: str, message: dict[str, Any], *, deadline: timedelta) -> list[dict[str, Any]]:
            assert (topic, deadline) == ("envelope/7", timedelta(seconds=180))
            self._messages[rank] = json.loads(json.dumps(message))
            self._all_are_here.wait()
            return self._messages

        return SimpleNamespace(rank=rank, exchange=exchange)


def agreed(*ranks: tuple[str, Stack], found: Ruling | EnvelopeError) -> list[Ruling | Exception]:
    """What each rank comes to, given its option and its stack, and what rank 0 finds."""
    table = Table(len(ranks))

    def agreement(rank: int) -> Ruling | Exception:
        option, stack = ranks[rank]
        source = EnvelopeSource(option, never, {})
        source.ruling = lambda stack: finding() if rank == 0 else never(stack)  # type: ignore[method-assign]
        try:
            return agree(table.seat(rank), source, stack, run=7)
        except EnvelopeError as error:
            return error

    def finding() -> Ruling:
        if isinstance(found, EnvelopeError):
            raise found
        return found

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(agreement, range(len(ranks))))


FOUND = Ruling(actions=ACTIONS, reason="measured yesterday")


def test_all_ranks_act_on_what_rank_0_has_found() -> None:
    assert agreed(("auto", STACK), ("auto", STACK), ("auto", STACK), found=FOUND) == [FOUND] * 3


def test_paths_may_differ_between_nodes() -> None:
    assert agreed(("/a/envelope.json", STACK), ("/b/envelope.json", STACK), found=FOUND) == [FOUND] * 2


def test_ranks_on_different_stacks_repair_nothing() -> None:
    first, *others = agreed(("auto", STACK), ("auto", STACK), ("auto", OTHER), found=FOUND)
    assert others == [first, first]
    assert not first.actions
    assert first.reason.startswith(
        "rank 2 stands on another stack: torch 2.13.0+cpu on rank 0 but 2.12.0 there; `accelpact qualify`"
    )


def test_without_an_envelope_stacks_may_differ() -> None:
    assert agreed(("off", STACK), ("off", OTHER), found=UNRESTRICTED) == [UNRESTRICTED] * 2


def test_ranks_with_different_options_are_refused_on_every_rank() -> None:
    for error in agreed(("auto", STACK), ("off", STACK), ("file.json", STACK), found=FOUND):
        assert isinstance(error, EnvelopeError)
        assert str(error) == (
            "envelope= must be the same on all ranks, but it is {0: 'auto', 1: 'off', 2: 'a file'}"
        )


def test_an_envelope_that_cannot_be_read_is_an_error_on_every_rank() -> None:
    for error in agreed(("x.json", STACK), ("x.json", STACK), found=EnvelopeError("x.json cannot be read")):
        assert isinstance(error, EnvelopeError)
        assert str(error) == 'x.json cannot be read (envelope= is "auto", "off" or the path of an envelope)'


def test_a_rank_that_does_not_answer_ends_the_start() -> None:
    def exchange(*_: Any, **__: Any) -> list[dict[str, Any]]:
        raise Superseded("ranks [1] did not answer in envelope/7")

    source = EnvelopeSource("off", never, {})
    with pytest.raises(RuntimeError, match=r"have not agreed on an envelope: ranks \[1\] did not answer"):
        agree(SimpleNamespace(rank=0, exchange=exchange), source, STACK, run=7)


@pytest.mark.parametrize(
    ("option", "found", "words"),
    [
        ("auto", Ruling(actions={}, reason="nothing is known"), "no fault will be repaired in this run, each ends it: nothing is"),
        ("off", UNRESTRICTED, 'envelope="off": faults are repaired whether or not'),
        ("auto", FOUND, ""),
    ],
)  # fmt: skip
def test_rank_0_says_once_what_it_means(
    option: str, found: Ruling, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "accelpact"):
        agreed((option, STACK), (option, STACK), found=found)
    assert len(caplog.records) == bool(words)
    assert words in caplog.text
