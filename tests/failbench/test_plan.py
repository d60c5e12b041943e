"""What survivors elect to restore from: pure functions of their reports."""

from __future__ import annotations

import pytest

from benchmarks.failbench import registry
from benchmarks.failbench.architectures.gossip import Gossip, partner
from benchmarks.failbench.architectures.hybrid import Hybrid
from benchmarks.failbench.architectures.parameter_server import ParameterServer
from benchmarks.failbench.architectures.pipeline import Pipeline
from benchmarks.failbench.architectures.ring import Ring
from benchmarks.failbench.mechanisms.accelpact import AccelPact
from benchmarks.failbench.mechanisms.elastic import Elastic
from benchmarks.failbench.mechanisms.peer_memory import PeerMemory
from benchmarks.failbench.mechanisms.periodic_disk import PeriodicDisk
from benchmarks.failbench.mechanisms.plan import Report

ALL = tuple(range(8))


def ring(snapshots: dict[int, tuple[int, ...]], lost: tuple[int, ...], peers: int = 1) -> list[Report]:
    """Reports of those that are left, if each rank's snapshots are with itself and with those that follow it."""
    reports = []
    for member in set(ALL) - set(lost):
        owners = [(member - distance) % 8 for distance in range(peers + 1)]
        held = {owner: snapshots[owner] for owner in owners}
        reports.append(Report(member=member, step=14, shard="model", snapshots=held))
    return reports


def test_a_lost_rank_comes_from_its_mirror() -> None:
    plan = PeerMemory.plan(Ring, ALL, ring(dict.fromkeys(ALL, (5, 10)), lost=(3,)))
    assert plan.step == 10 and not plan.fresh
    assert plan.sources == {**{member: member for member in ALL}, 3: 4}


def test_a_save_that_was_cut_short_does_not_count() -> None:
    snapshots = {**dict.fromkeys(ALL, (5, 10)), 2: (5,)}
    assert PeerMemory.plan(Ring, ALL, ring(snapshots, lost=(3,))).step == 5


def test_owner_and_mirror_lost_together() -> None:
    plan = PeerMemory.plan(Ring, ALL, ring(dict.fromkeys(ALL, (5, 10)), lost=(3, 4)))
    assert plan.fresh
    assert "rank 3" in plan.reason
    assert not PeerMemory.plan(Ring, ALL, ring(dict.fromkeys(ALL, (5, 10)), lost=(3, 4), peers=2)).fresh


def test_the_newest_checkpoint_that_all_have_seen() -> None:
    reports = [Report(member=member, step=14, shard="model", saved=(5, 10)[: 1 + member % 2]) for member in ALL]
    assert PeriodicDisk.plan(Ring, ALL, reports).step == 5
    assert PeriodicDisk.plan(Ring, ALL, [Report(member=0, step=3, shard="model")]).fresh


def test_the_survivor_that_is_ahead_is_elected() -> None:
    reports = [Report(member=member, step=14 + (member == 5), shard="model") for member in ALL if member != 3]
    left = tuple(report.member for report in reports)
    plan = Elastic.plan(Ring, left, reports)
    assert (plan.step, set(plan.sources.values())) == (15, {5})


def survivors(architecture: type, *lost: int) -> list[Report]:
    return [
        Report(member=member, step=14, shard=architecture.shard(member, ALL)) for member in ALL if member not in lost
    ]


def test_a_pipeline_has_no_replica_of_a_stage() -> None:
    left = tuple(member for member in ALL if member != 3)
    plan = Elastic.plan(Pipeline, left, survivors(Pipeline, 3))
    assert plan.fresh and "no survivor holds stage" in plan.reason


def test_a_hybrid_s_replica_has_what_was_lost() -> None:
    plan = Elastic.plan(Hybrid, (0, 1, 2, 7), survivors(Hybrid, 3))
    assert plan.step == 14
    assert plan.sources == {0: 0, 1: 1, 2: 2, 7: 7}


def test_shards_of_different_steps_do_not_fit() -> None:
    reports = [
        Report(member=member, step=14 + (member % 4 == 0), shard=Hybrid.shard(member, ALL)) for member in ALL[1:]
    ]
    assert Elastic.plan(Hybrid, (4, 5, 6, 7), reports).fresh


def test_workers_take_their_parameters_from_the_server() -> None:
    assert Elastic.plan(ParameterServer, (0, 1, 2), survivors(ParameterServer, 3)).sources == {0: 0}


def test_gossiping_ranks_keep_their_own() -> None:
    plan = Elastic.plan(Gossip, ALL[1:], survivors(Gossip, 0))
    assert plan.sources == {member: member for member in ALL[1:]}


def accelpact(*phases: tuple[int, str]) -> list[Report]:
    return [Report(member=member, step=step, shard="model", phase=phase) for member, (step, phase) in enumerate(phases)]


def test_accelpact_loses_no_step() -> None:
    plan = AccelPact.plan(Ring, (0, 1, 2), accelpact((14, "backward"), (14, "prepared")))
    assert (plan.step, plan.sources[2]) == (14, 0)


def test_accelpact_rolls_forward_to_who_has_stepped() -> None:
    plan = AccelPact.plan(Ring, (0, 1, 2), accelpact((14, "prepared"), (15, "backward")))
    assert (plan.step, plan.witness) == (15, 1)


def test_accelpact_stops_at_what_the_vote_rules_out() -> None:
    assert AccelPact.plan(Ring, (0, 1, 2), accelpact((14, "backward"), (15, "backward"))).fresh


def test_accelpact_needs_replicas() -> None:
    bad = [
        name for name in ("A1", "A2", "A3", "A4", "A5", "A6", "A7") if AccelPact.why_not(registry.architecture(name))
    ]
    assert bad == ["A4", "A5", "A6"]


@pytest.mark.parametrize("size", range(2, 12))
def test_neighbours_of_a_turn_are_pairs(size: int) -> None:
    met = set()
    for turn in range(size - 1):
        partners = [partner(rank, turn, size) for rank in range(size)]
        assert partners.count(None) == size % 2
        for rank, other in enumerate(partners):
            if other is not None:
                assert partners[other] == rank != other
                assert (rank, other) not in met
                met.add((rank, other))
