"""What follows from what the probes came to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from recovery.test_envelope import STACK

from lightning_accelpact.qualification.outcome import Outcome
from lightning_accelpact.qualification.probes import Target
from lightning_accelpact.qualification.qualify import LOOPS, Form, Qualification, StacksDiffer, qualify, stack_of
from lightning_accelpact.recovery.action import Action, Phase
from lightning_accelpact.recovery.envelope import Entry

TARGET = Target(backend="gloo", device_type="cpu", loop="")
TRAINED = ("preserve", "retry", "redo")
Answers = dict[str, Callable[[int], Outcome]]  # probe -> what each rank comes to


def repairs(*verbs: tuple[str, str], references: int = 8, stale: int = 0) -> list[dict[str, Any]]:
    counts = {"references": references, "stale_references": stale}
    return [{"phase": phase, "verb": verb, **counts} for phase, verb in verbs]


def good(**value: Any) -> Callable[[int], Outcome]:
    return lambda rank: Outcome(value={"seconds": 0.01 * (rank + 1), "seen": "fine", **value})


def bad(failure: str, *, rank: int = 1) -> Callable[[int], Outcome]:
    return lambda own: Outcome(failure=failure if own == rank else "FailStop: rank 1 stopped")


GOOD: Answers = {
    "rebuild": good(),
    "again": good(),
    "watchdog": good(),
    "preserve": good(exact=True, repairs=repairs(("committed", "preserve"), ("prepared", "roll_forward"))),
    "retry": good(exact=True, repairs=repairs(("forward", "retry"), ("backward", "retry"))),
    "redo": good(exact=True, repairs=repairs(("forward", "redo"), ("backward", "redo"))),
}


class Worlds:
    """Answers for the ranks, and keeps count."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.trials: list[tuple[str, int]] = []
        self.leads = True

    def __call__(self, size: int) -> Worlds:
        self.size = size
        return self

    def run(self, job: Any, name: str, target: Target, *, deadline: float) -> list[Outcome]:
        assert target is TARGET and deadline == 40.0
        self.trials.append((name, self.size))
        return [self.answers[name](rank) for rank in range(self.size)]


def qualified(*, devices: int = 4, trials: int = 3, **answers: Callable[[int], Outcome]) -> tuple[Entry, Worlds]:
    worlds = Worlds({**GOOD, **answers})
    form = Form.full(trials)
    entry = Qualification(STACK, TARGET, make_world=worlds, devices=devices, form=form).entry()
    return entry, worlds


def counts(entry: Entry) -> dict[str, tuple[int, int]]:
    return {probe.name: (probe.trials, probe.successes) for probe in entry.probes}


def test_a_good_stack() -> None:
    entry, worlds = qualified()
    assert entry.actions == {
        Phase.COMMITTED: (Action.PRESERVE, Action.RETRY),
        Phase.FORWARD: (Action.RETRY, Action.REDO),
        Phase.BACKWARD: (Action.RETRY, Action.REDO),
        Phase.PREPARED: (Action.ROLL_FORWARD, Action.RETRY, Action.REDO),
    }
    assert counts(entry) == {
        "rebuild": (3, 3), "again": (3, 3), "watchdog": (1, 1), "preserve": (3, 3), "retry": (3, 3), "redo": (3, 3),
        "rebind": (72, 72),
    }  # fmt: skip
    assert (entry.stack, entry.how, entry.failure) == (STACK, "measured", "")
    assert entry.source == "accelpact qualify --trials 3"
    assert Entry.from_dict(entry.to_dict()) == entry
    assert {size for name, size in worlds.trials if name in TRAINED} == {4}
    assert {size for name, size in worlds.trials if name not in TRAINED} == {2}


def test_the_slowest_rank_counts() -> None:
    assert {probe.name: probe.seconds for probe in qualified()[0].probes}["redo"] == 0.04


@pytest.mark.parametrize("name", ["rebuild", "watchdog"])
def test_a_stack_that_kills_the_process_is_qualified_for_nothing(name: str) -> None:
    entry, worlds = qualified(**{name: bad("process killed by SIGSEGV")})
    assert entry.actions == {}
    assert f"{name}: 0 of 1, rank 1: process killed by SIGSEGV" in entry.ruling().reason
    assert worlds.trials.count((name, 2)) == 1  # more of the same would cost a deadline each


def test_if_the_first_probe_fails_the_others_are_not_run() -> None:
    entry, worlds = qualified(rebuild=bad("hung: still there at the deadline, and killed then"))
    assert worlds.trials == [("rebuild", 2)]
    assert counts(entry)["redo"] == (0, 0)
    assert {probe.detail for probe in entry.probes[1:-1]} == {"not run, since rebuild has failed"}


@pytest.mark.parametrize(
    ("failed", "left"),
    [("retry", (Action.REDO,)), ("redo", (Action.RETRY,))],
)
@pytest.mark.parametrize(
    "how", [bad("process killed by SIGABRT"), good(exact=False, repairs=repairs(("forward", "redo"), ("backward", "retry")))]
)  # fmt: skip
def test_an_action_that_fails_is_left_out(failed: str, left: tuple[Action, ...], how: Callable[[int], Outcome]) -> None:
    entry, _ = qualified(**{failed: how})
    assert entry.actions == {
        Phase.COMMITTED: (Action.PRESERVE, Action.RETRY),
        Phase.FORWARD: left,
        Phase.BACKWARD: left,
        Phase.PREPARED: (Action.ROLL_FORWARD, *left),
    }
    assert entry.failure.startswith(f"{failed}: 0 of 1, ")


def test_an_end_that_differs_is_named() -> None:
    entry, _ = qualified(redo=good(exact=False))
    assert "redo: 0 of 1, the end differs from that of an undisturbed run" in entry.failure


def test_where_nothing_can_be_counted_nothing_is_qualified() -> None:
    entry, _ = qualified(preserve=bad("w"), retry=bad("x"), redo=bad("y"))
    assert entry.actions == {}
    assert counts(entry)["rebind"] == (0, 0)


def test_only_what_is_between_updates() -> None:
    entry, _ = qualified(retry=good(exact=False), redo=good(exact=False), again=bad("no retry was seen"))
    assert entry.actions == {
        Phase.COMMITTED: (Action.PRESERVE,), Phase.FORWARD: (), Phase.BACKWARD: (), Phase.PREPARED: (Action.ROLL_FORWARD,),
    }  # fmt: skip


def test_only_what_is_inside_an_update() -> None:
    entry, _ = qualified(preserve=good(exact=False, repairs=repairs(("committed", "preserve"))))
    assert entry.actions[Phase.COMMITTED] == (Action.RETRY,)
    assert entry.actions[Phase.BACKWARD] == (Action.RETRY, Action.REDO)


@pytest.mark.parametrize("census", [{"references": 0}, {"stale": 1}])
def test_references_must_be_found_and_none_left(census: dict[str, int]) -> None:
    redo = good(exact=True, repairs=repairs(("forward", "redo"), ("backward", "redo"), **census))
    entry, _ = qualified(redo=redo)
    assert entry.actions == {}
    assert "rebind: 48 of 72" in entry.failure


def test_only_where_it_was_seen() -> None:
    """As on streams, where a fault in a forward pass is never retried."""
    retry = good(exact=True, repairs=repairs(("forward", "redo"), ("backward", "retry")))
    entry, _ = qualified(retry=retry, again=bad("one retry was to be on record"))
    assert entry.actions[Phase.FORWARD] == (Action.REDO,)
    assert entry.actions[Phase.BACKWARD] == (Action.RETRY, Action.REDO)
    assert entry.actions[Phase.COMMITTED] == (Action.PRESERVE,)


def test_one_device_is_not_enough() -> None:
    entry, worlds = qualified(devices=1)
    assert not worlds.trials and entry.actions == {}
    assert "a probe needs 2 devices, and this process sees 1" in entry.failure


@pytest.mark.parametrize(("devices", "size"), [(2, 2), (3, 2), (4, 4), (8, 4)])
def test_the_model_is_trained_on_what_there_is(devices: int, size: int) -> None:
    assert ("redo", size) in qualified(devices=devices)[1].trials


def test_the_own_end_of_a_rank_says_more_than_that_of_its_peer() -> None:
    entry, _ = qualified(redo=bad("process killed by SIGSEGV", rank=3))
    assert "rank 3: process killed by SIGSEGV" in entry.failure


def test_the_short_form_runs_each_probe_once() -> None:
    without = dict.fromkeys(("rebuild", "again", *TRAINED), 1)
    assert Form.short("gloo").trials == without
    assert Form.short("nccl").trials == {**without, "watchdog": 1}


class Stacks:
    def __init__(self, *outcomes: Outcome) -> None:
        self.outcomes = list(outcomes)

    def run(self, job: Any, of: dict[str, str], *, deadline: float) -> list[Outcome]:
        return self.outcomes


def test_all_ranks_must_stand_on_one_stack() -> None:
    mine, other = Outcome(value=STACK.to_dict()), Outcome(value={**STACK.to_dict(), "torch": "1"})
    assert stack_of(Stacks(mine, mine)) == STACK
    with pytest.raises(StacksDiffer, match="but rank 1 on .*'torch': '1'"):
        stack_of(Stacks(mine, other))
    with pytest.raises(StacksDiffer, match="the stack of rank 1 cannot be told: process killed by SIGSEGV"):
        stack_of(Stacks(mine, Outcome(failure="process killed by SIGSEGV")))


def test_without_probes_for_it_nothing_is_qualified() -> None:
    other = replace(STACK, fsdp="fsdp3")
    entry = qualify(other, "cpu", make_world=Worlds({}), devices=4, form=Form.short("gloo"))
    assert (entry.stack, entry.actions) == (other, {})
    assert "there are no probes for fsdp3 under lightning.pytorch" in entry.ruling().reason


def test_every_framework_has_its_training() -> None:
    assert {framework for framework, _ in LOOPS} == {"lightning.pytorch", "lightning.fabric", "accelerate"}
