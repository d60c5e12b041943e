"""decide() against an independent reading of the design's table of actions, over every combination of reports.

Four ranks have (3 frontiers x 5 phases x 4 states of health) ** 4 = 12,960,000 combinations. They are covered by three
exhaustive passes and one property:

* all *multisets* of four ranks with the health folded into three values (whole, not replayable, torn): 194,580;
* all *sequences* of two ranks, and all multisets of three, with the four states of health told apart: 3,600 and 37,820.
  They show that "torn and not replayable" is treated as "torn";
* decide() commutes with every permutation of the ranks (hypothesis): a multiset stands for all its orders.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import FrozenInstanceError, asdict, replace
from functools import lru_cache
from itertools import combinations, combinations_with_replacement, product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_accelpact.recovery.action import Action, Decision, GroupReport, Phase, RankReport, decide

FORWARD, BACKWARD, PREPARED, STEPPING, COMMITTED = (
    Phase.FORWARD,
    Phase.BACKWARD,
    Phase.PREPARED,
    Phase.STEPPING,
    Phase.COMMITTED,
)
BASE = 7  # the lowest frontier in the enumerations
GENERATION = 3

WHOLE, UNREPLAYABLE, TORN, BOTH = (True, True), (True, False), (False, True), (False, False)

Shape = tuple[int, Phase, tuple[bool, bool]]  # frontier, phase, (intact, replayable)


@lru_cache(maxsize=None)
def report(rank: int, frontier: int, phase: Phase, health: tuple[bool, bool] = WHOLE) -> RankReport:
    return RankReport(
        rank=rank, generation=GENERATION, frontier=frontier, phase=phase, intact=health[0], replayable=health[1]
    )


def reports_of(shapes: Sequence[Shape]) -> list[RankReport]:
    return [report(rank, *shape) for rank, shape in enumerate(shapes)]


def shapes(*health: tuple[bool, bool]) -> list[Shape]:
    return list(product(range(BASE, BASE + 3), Phase, health))


# -- the specification: for each row of the design's table, the ranks that it fits


def _preserve(rank: Shape, ranks: Sequence[Shape], newest: int) -> bool:
    """Stands COMMITTED at F*, and no rank has begun the next update."""
    nobody_began = not [r for r in ranks if r[0] == newest and r[1] in (FORWARD, BACKWARD, PREPARED)]
    return rank[:2] == (newest, COMMITTED) and nobody_began


def _roll_forward(rank: Shape, ranks: Sequence[Shape], newest: int) -> bool:
    """Is PREPARED at F* - 1, or is PREPARED at F* like every other rank."""
    return rank[:2] == (newest - 1, PREPARED) or {r[:2] for r in ranks} == {(newest, PREPARED)}


def _redo(rank: Shape, ranks: Sequence[Shape], newest: int) -> bool:
    """Stands at F* while one rank has begun that update and one has not completed its gradients of it."""
    at_newest = [r[1] for r in ranks if r[0] == newest]
    complete = len(at_newest) == len(ranks) and set(at_newest) == {PREPARED}
    return rank[0] == newest and bool({FORWARD, BACKWARD, PREPARED} & set(at_newest)) and not complete


TABLE = {Action.PRESERVE: _preserve, Action.ROLL_FORWARD: _roll_forward, Action.REDO: _redo}


def specified(ranks: Sequence[Shape]) -> tuple[Action, ...]:
    """Every rank's verb according to the table. RESTART is what no row covers, and then it is everybody's."""
    newest = max(frontier for frontier, _, _ in ranks)
    restart = (Action.RESTART,) * len(ranks)
    if [r for r in ranks if r[1] is STEPPING or not r[2][0]]:
        return restart
    rows = [[action for action, fits in TABLE.items() if fits(rank, ranks, newest)] for rank in ranks]
    assert all(len(fitting) <= 1 for fitting in rows), f"the table is ambiguous for {ranks}"
    if [] in rows:
        return restart
    verbs = tuple(fitting[0] for fitting in rows)
    # Who has begun runs its micro-batches again from memory; who has not begun just begins
    held = [r for r, verb in zip(ranks, verbs, strict=True) if verb is Action.REDO and r[1] is not COMMITTED]
    return restart if [r for r in held if not r[2][1]] else verbs


# -- what must be true of a decision whatever the table says


def check_promises(ranks: Sequence[Shape], decision: Decision) -> None:
    verbs, newest = decision.verbs, max(frontier for frontier, _, _ in ranks)
    assert len(verbs) == len(ranks) and decision.frontier == newest and decision.reason
    assert decision.action is max(verbs, key=lambda verb: verb.cost)
    if Action.RESTART in verbs:
        assert set(verbs) == {Action.RESTART}
        return
    ends = set()
    for (frontier, phase, (intact, replayable)), verb in zip(ranks, verbs, strict=True):
        assert intact and phase is not STEPPING
        if verb is Action.ROLL_FORWARD:
            assert phase is PREPARED  # only complete gradients are ever applied
            ends.add(frontier + 1)
        else:
            assert frontier == newest  # nothing is skipped
            ends.add(frontier)
        if verb is Action.PRESERVE:
            assert phase is COMMITTED
        if verb is Action.REDO:
            assert phase is COMMITTED or replayable
    assert len(ends) == 1, "the ranks end at different frontiers: an update is lost or applied twice"
    if ends == {newest + 1}:
        assert all(frontier == newest and phase is PREPARED for frontier, phase, _ in ranks)
    if Action.PRESERVE in verbs:
        assert Action.REDO not in verbs


def enumerations() -> Iterator[tuple[Shape, ...]]:
    yield from combinations_with_replacement(shapes(WHOLE, UNREPLAYABLE, TORN), 4)
    yield from combinations_with_replacement(shapes(WHOLE, UNREPLAYABLE, TORN, BOTH), 3)
    yield from product(shapes(WHOLE, UNREPLAYABLE, TORN, BOTH), repeat=2)
    yield from product(shapes(WHOLE, UNREPLAYABLE, TORN, BOTH), repeat=1)


def test_every_combination_of_reports():
    count, actions = 0, set()
    for ranks in enumerations():
        decision = decide(reports_of(ranks))
        assert decision.verbs == specified(ranks), (ranks, decision)
        check_promises(ranks, decision)
        count += 1
        actions.add(decision.action)
    assert count == 194_580 + 37_820 + 3_600 + 60
    assert actions == set(Action) - {Action.RETRY}  # which takes ranks that hold their place, see below


SHAPES = st.tuples(st.integers(BASE, BASE + 2), st.sampled_from(Phase), st.tuples(st.booleans(), st.booleans()))
# Ranks that recovery can bring together are rare among random ones: draw these more often
REPAIRABLE = st.one_of(
    st.sampled_from([(BASE, PREPARED), (BASE + 1, COMMITTED), (BASE + 1, FORWARD), (BASE + 1, BACKWARD)]),
    st.sampled_from([(BASE, PREPARED), (BASE, COMMITTED), (BASE, BACKWARD)]),
).map(lambda shape: (*shape, WHOLE))
WORLDS = st.lists(st.one_of(REPAIRABLE, SHAPES), min_size=1, max_size=8)


@settings(max_examples=600, deadline=None)
@given(st.data(), WORLDS)
def test_ranks_are_interchangeable(data: st.DataObject, ranks: list[Shape]):
    order = data.draw(st.permutations(range(len(ranks))))
    shuffled = decide(reports_of([ranks[i] for i in order]))
    assert shuffled.verbs == tuple(decide(reports_of(ranks)).verbs[i] for i in order)


@settings(max_examples=400, deadline=None)
@given(WORLDS, st.integers(-BASE, 10**9))
def test_only_differences_between_frontiers_count(ranks: list[Shape], offset: int):
    moved = [(frontier + offset, phase, health) for frontier, phase, health in ranks]
    assert decide(reports_of(moved)).verbs == decide(reports_of(ranks)).verbs


@settings(max_examples=300, deadline=None)
@given(WORLDS)
def test_larger_worlds_follow_the_table(ranks: list[Shape]):
    assert decide(reports_of(ranks)).verbs == specified(ranks)


@settings(max_examples=300, deadline=None)
@given(WORLDS)
def test_decide_is_pure(ranks: list[Shape]):
    reports = reports_of(ranks)
    copies = [replace(each) for each in reports]
    assert decide(reports) == decide(tuple(copies)) == decide(reports)
    assert reports == copies


# -- rows of the table by name, for a reader


@pytest.mark.parametrize(
    ("ranks", "verbs"),
    [
        ([(5, COMMITTED)] * 4, [Action.PRESERVE] * 4),
        ([(5, PREPARED)] * 4, [Action.ROLL_FORWARD] * 4),
        ([(4, PREPARED), *[(5, COMMITTED)] * 3], [Action.ROLL_FORWARD, *[Action.PRESERVE] * 3]),
        ([(4, PREPARED), *[(5, FORWARD)] * 3], [Action.ROLL_FORWARD, *[Action.REDO] * 3]),
        ([(5, BACKWARD), *[(5, PREPARED)] * 3], [Action.REDO] * 4),
        ([(5, COMMITTED), *[(5, FORWARD)] * 3], [Action.REDO] * 4),
        # Begun but nobody computes: the gradients of the ranks that have not begun are missing
        ([(5, COMMITTED), *[(5, PREPARED)] * 3], [Action.REDO] * 4),
        ([(4, PREPARED), *[(5, PREPARED)] * 3], [Action.ROLL_FORWARD, *[Action.REDO] * 3]),
        ([(5, STEPPING), *[(6, COMMITTED)] * 3], [Action.RESTART] * 4),
        ([(4, BACKWARD), *[(5, COMMITTED)] * 3], [Action.RESTART] * 4),
        ([(4, COMMITTED), *[(5, COMMITTED)] * 3], [Action.RESTART] * 4),
        ([(3, PREPARED), *[(5, COMMITTED)] * 3], [Action.RESTART] * 4),
    ],
)
def test_rows_of_the_table(ranks: list[tuple[int, Phase]], verbs: list[Action]):
    assert decide([report(rank, *shape) for rank, shape in enumerate(ranks)]).verbs == tuple(verbs)


# -- ranks that hold their place: a retry


def holding(rank: int, phase: Phase, frontier: int = 5, **groups: tuple[int, int, int]) -> RankReport:
    """A rank that nothing has unwound, with (finished, pending, kept) of its groups."""
    known = {name: GroupReport(finished=n, pending=fly, kept=kept) for name, (n, fly, kept) in groups.items()}
    return replace(report(rank, frontier, phase), in_place=True, groups=known)


FLYING, DONE, LATE = (4, 1, 1), (5, 0, 1), (4, 0, 1)


def test_ranks_that_hold_their_place_go_on():
    """None has finished the collective: it runs again without anybody's help."""
    decision = decide([holding(0, FORWARD, a=FLYING), holding(1, BACKWARD, a=FLYING), holding(2, FORWARD, a=LATE)])
    assert decision.verbs == (Action.RETRY,) * 3
    assert decision.serve == {}


def test_who_has_finished_serves_again():
    decision = decide([holding(0, BACKWARD, b=DONE, a=FLYING), holding(1, BACKWARD, a=DONE), holding(2, BACKWARD, b=FLYING)])
    assert decision.verbs == (Action.RETRY,) * 3
    assert list(decision.serve.items()) == [("a", range(5, 6)), ("b", range(5, 6))]


@pytest.mark.parametrize("phase", [PREPARED, COMMITTED])
def test_a_retry_of_ranks_that_wait_for_others(phase: Phase):
    waiting = holding(0, phase, a=DONE) if phase is PREPARED else report(0, 5, phase)
    assert decide([waiting, holding(1, BACKWARD, a=FLYING)]).verbs == (Action.RETRY,) * 2


def test_a_peer_steps_while_others_retry():
    decision = decide([report(0, 4, PREPARED), holding(1, FORWARD, a=FLYING), report(2, 5, COMMITTED)])
    assert decision.verbs == (Action.ROLL_FORWARD, Action.RETRY, Action.RETRY)


def test_a_collective_between_two_updates_runs_again():
    decision = decide([holding(0, COMMITTED, a=FLYING), holding(1, COMMITTED, a=DONE)])
    assert decision.verbs == (Action.RETRY,) * 2
    assert decision.serve == {"a": range(5, 6)}


NO_RETRY: dict[str, list[RankReport]] = {
    "a pass was unwound": [holding(0, FORWARD, a=FLYING), report(1, 5, FORWARD)],
    "a vote was unwound": [holding(0, BACKWARD, a=FLYING), report(1, 5, PREPARED)],
    "the input is gone": [holding(0, FORWARD, a=FLYING), holding(1, FORWARD, a=(5, 0, 0))],
    "two collectives behind": [holding(0, FORWARD, a=FLYING), holding(1, FORWARD, a=(6, 0, 1))],
    "not inside the one that others finished": [holding(0, FORWARD, a=LATE), holding(1, FORWARD, a=DONE)],
    "one of several inputs is gone": [holding(0, BACKWARD, a=(2, 3, 2)), holding(1, BACKWARD, a=(5, 0, 2))],
    "not yet at all that others finished": [holding(0, BACKWARD, a=(2, 2, 2)), holding(1, BACKWARD, a=(5, 0, 5))],
    "one group of two": [holding(0, FORWARD, a=FLYING, b=DONE), holding(1, FORWARD, a=DONE, b=LATE)],
}


@pytest.mark.parametrize("reports", NO_RETRY.values(), ids=NO_RETRY)
def test_otherwise_the_update_runs_again(reports: list[RankReport]):
    decision = decide(reports)
    assert decision.verbs == (Action.REDO,) * len(reports)
    assert decision.serve == {}


def test_several_collectives_in_doubt_are_served_in_order():
    """As where they run on streams: one rank has confirmed five, the others less, and one has begun more."""
    reports = [holding(0, BACKWARD, a=(5, 1, 5)), holding(1, BACKWARD, a=(2, 3, 0)), holding(2, BACKWARD, a=(3, 5, 1))]
    decision = decide(reports)
    assert decision.verbs == (Action.RETRY,) * 3
    assert decision.serve == {"a": range(3, 6)}


def test_a_retry_that_is_not_allowed_becomes_a_redo():
    reports = [holding(0, FORWARD, a=FLYING), holding(1, FORWARD, a=DONE)]
    assert decide(reports, allowed=set(Action) - {Action.RETRY}).action is Action.REDO
    assert decide(reports, allowed={Action.PRESERVE}).action is Action.RESTART


def test_a_changed_batch_is_no_obstacle_to_a_retry():
    changed = replace(holding(1, FORWARD, a=FLYING), replayable=False)
    assert decide([holding(0, FORWARD, a=FLYING), changed]).action is Action.RETRY
    assert decide([report(0, 5, FORWARD), changed]).action is Action.RESTART


def test_a_collective_outside_of_any_window_cannot_be_unwound():
    stuck = replace(holding(0, COMMITTED, a=FLYING), stuck=True)
    assert decide([stuck, holding(1, COMMITTED, a=DONE)]).action is Action.RETRY
    decision = decide([stuck, report(1, 5, FORWARD)])
    assert decision.action is Action.RESTART
    assert "not part of an update's window" in decision.reason


# -- what a caller allows


@pytest.mark.parametrize("size", range(len(Action) + 1))
def test_only_allowed_actions_are_taken(size: int):
    sound = shapes(WHOLE)
    for allowed in combinations(Action, size):
        for ranks in combinations_with_replacement(sound, 2):
            free, bound = decide(reports_of(ranks)), decide(reports_of(ranks), allowed=allowed)
            if set(free.verbs) <= {*allowed, Action.RESTART}:
                assert bound == free
            else:
                assert set(bound.verbs) == {Action.RESTART} and "not allowed" in bound.reason


@pytest.mark.parametrize("allowed", [{Action.REDO}, {Action.ROLL_FORWARD}], ids=["only the dearer", "only the cheaper"])
def test_each_verb_of_a_mixture_must_be_allowed(allowed: Collection[Action]):
    mixture = [report(0, 4, PREPARED), report(1, 5, FORWARD)]
    assert decide(mixture).verbs == (Action.ROLL_FORWARD, Action.REDO)
    assert decide(mixture, allowed=allowed).action is Action.RESTART


def test_restart_needs_no_permission():
    assert decide([report(0, 5, STEPPING)], allowed=()).action is Action.RESTART


# -- reasons name the rank, the place and the cause


@pytest.mark.parametrize(
    ("culprit", "words"),
    [
        (report(1, 5, STEPPING), ["rank 1", "update 5", "stepping", "torn"]),
        (replace(report(1, 6, COMMITTED, TORN), detail="NaN in a shard"), ["rank 1", "update 6", "NaN in a shard"]),
        (report(1, 4, PREPARED), ["rank 1", "2 updates behind"]),
        (report(1, 5, BACKWARD), ["rank 1", "update 5", "backward", "no complete gradients"]),
        (replace(report(1, 6, FORWARD, UNREPLAYABLE), detail="batch changed"), ["rank 1", "batch changed"]),
        (replace(report(1, 6, COMMITTED), generation=GENERATION + 1), [str([GENERATION, GENERATION + 1])]),
    ],
)
def test_a_restart_says_why(culprit: RankReport, words: list[str]):
    decision = decide([report(0, 6, COMMITTED), culprit])
    assert decision.action is Action.RESTART
    assert [word for word in words if word not in decision.reason] == []


@pytest.mark.parametrize("action", [Action.PRESERVE, Action.ROLL_FORWARD, Action.REDO])
def test_every_action_has_a_reason_of_its_own(action: Action):
    phase = {Action.PRESERVE: COMMITTED, Action.ROLL_FORWARD: PREPARED, Action.REDO: FORWARD}[action]
    others = {decide([report(0, 5, p)]).reason for p in (COMMITTED, PREPARED, FORWARD) if p is not phase}
    decision = decide([report(0, 5, phase)])
    assert decision.action is action and decision.reason not in others


# -- bad input


@pytest.mark.parametrize("ranks", [[], [1], [1, 0], [0, 0], [0, 2], [0, 1, 1], [-1, 0]])
def test_reports_must_be_complete_and_in_rank_order(ranks: list[int]):
    with pytest.raises(ValueError, match=r"one report per rank in rank order") as error:
        decide([report(rank, 5, COMMITTED) for rank in ranks])
    assert str(ranks) in str(error.value)


def test_actions_are_ordered_by_cost():
    ordered = [Action.PRESERVE, Action.ROLL_FORWARD, Action.RETRY, Action.REDO, Action.RESTART]
    assert sorted(Action, key=lambda action: action.cost) == ordered
    assert [action.cost for action in ordered] == [0, 1, 2, 3, 4]


# -- reports on the wire

REPORTS = st.builds(
    RankReport,
    rank=st.integers(0, 2**20),
    generation=st.integers(0, 2**31),
    frontier=st.integers(0, 2**63),
    phase=st.sampled_from(Phase),
    intact=st.booleans(),
    replayable=st.booleans(),
    detail=st.text(),
    in_place=st.booleans(),
    stuck=st.booleans(),
    between=st.booleans(),
    groups=st.dictionaries(
        st.text(), st.builds(GroupReport, finished=st.integers(0, 2**31), pending=st.integers(0, 99), kept=st.integers(0, 99))
    ),
)


@given(REPORTS)
@example(report(0, 0, COMMITTED))
def test_a_report_survives_the_wire(sent: RankReport):
    assert RankReport.from_dict(json.loads(json.dumps(sent.to_dict()))) == sent


# -- programs that have parted


@pytest.mark.parametrize("phase", [FORWARD, BACKWARD, PREPARED])
def test_ranks_that_wait_before_an_update_never_meet_those_inside(phase: Phase):
    waits = replace(report(1, 5, COMMITTED), between=True)
    decision = decide([report(0, 5, phase), waits, report(2, 5, phase)])
    assert decision.action is Action.RESTART
    assert decision.reason.startswith("ranks [1] wait for all ranks before update 5")
    assert "ranks [0, 2] are inside it: their programs have parted" in decision.reason


@pytest.mark.parametrize(
    "peer",
    [report(1, 4, PREPARED), report(1, 5, COMMITTED), replace(report(1, 5, COMMITTED), between=True)],
    ids=["an update behind", "on its way", "there"],
)
def test_ranks_that_wait_between_two_updates_meet_those_that_come(peer: RankReport):
    waits = replace(report(0, 5, COMMITTED), between=True)
    assert decide([waits, peer]).action is not Action.RESTART


def test_in_the_middle_of_an_update_too():
    """As in a validation between two micro-batches, where a peer may still be inside the first one."""
    waits = replace(report(0, 5, BACKWARD), between=True)
    assert decide([waits, report(1, 5, FORWARD)]).action is not Action.RESTART


@given(REPORTS)
def test_a_report_is_plain_json_with_every_field(sent: RankReport):
    assert sent.to_dict() == {**asdict(sent), "phase": sent.phase.value}
    assert {type(value) for value in sent.to_dict().values()} <= {int, bool, str, dict}


def test_an_unknown_phase_is_refused():
    with pytest.raises(ValueError, match="asleep"):
        RankReport.from_dict({**report(0, 5, COMMITTED).to_dict(), "phase": "asleep"})


def test_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="color"):
        RankReport.from_dict({**report(0, 5, COMMITTED).to_dict(), "color": "red"})


@pytest.mark.parametrize("field", ["rank", "generation", "frontier", "phase"])
def test_a_missing_field_is_refused(field: str):
    values = report(0, 5, COMMITTED).to_dict()
    del values[field]
    with pytest.raises(TypeError, match=field):
        RankReport.from_dict(values)


def test_reports_and_decisions_cannot_be_changed():
    sent = report(0, 5, COMMITTED)
    with pytest.raises(FrozenInstanceError):
        sent.frontier = 6
    with pytest.raises(FrozenInstanceError):
        decide([sent]).frontier = 6


def test_a_decision_names_the_furthest_iteration_at_the_frontier():
    behind = RankReport(rank=0, generation=1, frontier=4, phase=Phase.PREPARED, iterations=9)
    at_frontier = [
        RankReport(rank=rank, generation=1, frontier=5, phase=Phase.FORWARD, iterations=iterations)
        for rank, iterations in ((1, 2), (2, 3))
    ]
    assert decide([behind, *at_frontier]).iterations == 3
