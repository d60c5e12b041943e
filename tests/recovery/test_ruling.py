"""decide() under an envelope: over every combination of reports and a family of rulings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, combinations_with_replacement, product

import pytest

from lightning_accelpact.recovery.action import (
    UNRESTRICTED,
    Action,
    Decision,
    GroupReport,
    Phase,
    RankReport,
    Ruling,
    decide,
)
from lightning_accelpact.recovery.policy import RepairPolicy

REASON = "measured yesterday: redo: 0 of 5; `accelpact qualify`"
INSIDE = (Phase.FORWARD, Phase.BACKWARD, Phase.PREPARED)
BETWEEN = GroupReport(finished=4, kept=1)
WAITING = GroupReport(finished=4, pending=1, kept=1)


def ranks(size: int) -> Iterator[list[RankReport]]:
    """So many ranks in every phase at two frontiers, with and without their place kept, inside a collective and not."""
    shapes = [
        RankReport(rank=0, generation=1, frontier=frontier, phase=phase, in_place=in_place, groups={"world": group})
        for frontier, phase, in_place, group in product((5, 6), Phase, (True, False), (BETWEEN, WAITING))
    ]
    for chosen in combinations_with_replacement(shapes, size):
        yield [replace(one, rank=rank) for rank, one in enumerate(chosen)]


def rulings() -> Iterator[Ruling]:
    """RETRY and REDO in any of the phases of an update, with and without the actions between two of them."""
    for kept in ({Phase.COMMITTED: (Action.PRESERVE, Action.RETRY)}, {Phase.COMMITTED: (Action.PRESERVE,)}, {}):
        for qualified in ((), (Action.REDO,), (Action.RETRY,), (Action.RETRY, Action.REDO)):
            for count in range(len(INSIDE) + 1):
                for phases in combinations(INSIDE, count):
                    inside = {phase: (Action.ROLL_FORWARD, *qualified) for phase in phases}
                    yield Ruling(actions={**kept, **inside}, reason=REASON)


def permitted(decision: Decision, reports: Sequence[RankReport], ruling: Ruling) -> bool:
    """A reading of its own: what a rank does that only keeps what it has is PRESERVE, whatever its peers are given."""
    for report, verb in zip(reports, decision.verbs, strict=True):
        keeps = report.phase is Phase.COMMITTED and not (verb is Action.RETRY and report.groups["world"].pending)
        if (Action.PRESERVE if keeps else verb) not in ruling.actions.get(report.phase, ()):
            return False
    return True


def test_every_decision_is_qualified_or_a_restart() -> None:
    everything = list(ranks(2))
    free = [decide(reports) for reports in everything]
    without = [decide(reports, allowed=set(Action) - {Action.RETRY}) for reports in everything]
    seen = set()
    for ruling in rulings():
        for reports, first, second in zip(everything, free, without, strict=True):
            decision = decide(reports, ruling=ruling)
            options = [one for one in (first, second) if one.action is not Action.RESTART]
            fitting = [one for one in options if permitted(one, reports, ruling)]
            if fitting:
                assert decision == fitting[0], (reports, ruling)  # the cheaper one first
            else:
                assert set(decision.verbs) == {Action.RESTART}
                assert REASON in decision.reason or not options
            seen.add((first.action, decision.action))
    assert {(Action.RETRY, Action.RETRY), (Action.RETRY, Action.REDO), (Action.RETRY, Action.RESTART)} <= seen
    assert {(Action.REDO, Action.RESTART), (Action.PRESERVE, Action.RESTART), (Action.ROLL_FORWARD, Action.RESTART)} <= seen


def test_without_an_envelope_everything_is_as_it_was() -> None:
    for reports in ranks(3):
        assert decide(reports, ruling=UNRESTRICTED) == decide(reports)


def test_an_empty_envelope_restarts_whatever_happens() -> None:
    for reports in ranks(3):
        assert decide(reports, ruling=Ruling(actions={}, reason=REASON)).action is Action.RESTART


def test_the_reason_names_action_phase_rank_and_remedy() -> None:
    reports = [
        RankReport(rank=0, generation=1, frontier=5, phase=Phase.COMMITTED),
        RankReport(rank=1, generation=1, frontier=5, phase=Phase.BACKWARD),
    ]
    ruling = Ruling(actions={Phase.COMMITTED: (Action.PRESERVE,)}, reason=REASON)
    assert decide(reports, ruling=ruling).reason == f"redo in phase backward (rank 1) is not qualified on this stack: {REASON}"


@pytest.mark.parametrize(
    ("allowed", "actions", "retries"),
    [
        (tuple(Action), {Phase.FORWARD: (Action.RETRY,)}, True),
        (tuple(Action), {Phase.FORWARD: (Action.REDO,)}, False),
        ((Action.REDO,), {Phase.FORWARD: (Action.RETRY,)}, False),
    ],
)
def test_inputs_are_kept_only_for_retries_that_may_come(allowed, actions, retries: bool) -> None:
    policy = RepairPolicy(
        repair_budget=1, max_repairs_per_update=1, allowed=allowed, ruling=Ruling(actions=actions)
    )
    assert policy.retries is retries
