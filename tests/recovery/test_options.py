"""Every option: what is taken, and what is refused with its value, what is allowed and what to do."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest

from lightning_accelpact.recovery.action import Action
from lightning_accelpact.recovery.options import HsdpShape, RecoveryOptions

SECONDS = ("repair_budget", "collective_timeout", "rebuild_timeout", "heartbeat_deadline")


def test_the_defaults_are_valid_and_allow_every_action() -> None:
    assert RecoveryOptions().allowed == tuple(Action)


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize("value", [0, -1, -0.5, math.nan, math.inf, "30", None, True])
def test_durations(name: str, value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        RecoveryOptions(**{name: value})
    assert str(caught.value) == f"{name}={value!r} must be a finite number of seconds above 0"


@pytest.mark.parametrize("value", [0, -3, 1.5, "2", None, True])
def test_repairs_per_update(value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        RecoveryOptions(max_repairs_per_update=value)
    assert str(caught.value) == f"max_repairs_per_update={value!r} must be a whole number of at least 1"


@pytest.mark.parametrize("value", [-1, 1.0, "2", None, True])
def test_updates_between_digests(value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        RecoveryOptions(digest_every=value)
    assert str(caught.value) == f"digest_every={value!r} must be a whole number of at least 0"


@pytest.mark.parametrize("value", ["", "STOP", None, True])
def test_on_divergence(value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        RecoveryOptions(on_divergence=value)
    assert str(caught.value) == f"on_divergence={value!r} must be one of ['warn', 'stop']"


def test_a_divergence_cannot_be_healed() -> None:
    with pytest.raises(ValueError, match='on_divergence="heal" is not possible yet.* Choose "stop"'):
        RecoveryOptions(on_divergence="heal")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["", None, True, 3, b"envelope.json"])
def test_envelope(value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        RecoveryOptions(envelope=value)
    assert str(caught.value) == f'envelope={value!r} must be "auto", "off" or the path of an envelope'


@pytest.mark.parametrize("value", ["", "heal", "REDO", None, True])
def test_uncommitted(value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        RecoveryOptions(uncommitted=value)
    assert str(caught.value) == f"uncommitted={value!r} must be one of ['retry', 'redo', 'restart']"


@pytest.mark.parametrize(
    ("value", "left_out"), [("retry", set()), ("redo", {Action.RETRY}), ("restart", {Action.RETRY, Action.REDO})]
)
def test_what_a_fault_inside_an_update_may_be_answered_with(value: Any, left_out: set[Action]) -> None:
    assert set(RecoveryOptions(uncommitted=value).allowed) == set(Action) - left_out


ORDERS: dict[str, tuple[dict[str, float], list[str]]] = {
    "rebuild as long as a collective": (
        {"rebuild_timeout": 30, "collective_timeout": 30},
        ["rebuild_timeout=30 s must be shorter than collective_timeout=30 s", "a rebuild would outlast",
         "raise collective_timeout or lower rebuild_timeout"],
    ),
    "rebuild longer than a collective": (
        {"rebuild_timeout": 10, "collective_timeout": 2.5},
        ["rebuild_timeout=10 s must be shorter than collective_timeout=2.5 s"],
    ),
    "heartbeats as long as a collective": (
        {"heartbeat_deadline": 30, "collective_timeout": 30},
        ["heartbeat_deadline=30 s must be shorter than collective_timeout=30 s", "before it counts as lost",
         "raise collective_timeout or lower heartbeat_deadline"],
    ),
    "collective as long as the budget": (
        {"collective_timeout": 60, "repair_budget": 60},
        ["collective_timeout=60 s must be shorter than repair_budget=60 s", "healthy ranks would be given up too early",
         "raise repair_budget or lower collective_timeout"],
    ),
    "default collective against a short budget": (
        {"repair_budget": 60},
        ["collective_timeout=600 s must be shorter than repair_budget=60 s"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ORDERS)
def test_the_order_of_the_durations(case: str) -> None:
    options, parts = ORDERS[case]
    with pytest.raises(ValueError) as caught:
        RecoveryOptions(**options)
    for part in parts:
        assert part in str(caught.value)


def test_durations_in_order_are_taken() -> None:
    options = RecoveryOptions(rebuild_timeout=0.5, heartbeat_deadline=0.9, collective_timeout=1, repair_budget=1.5)
    assert options.seconds("rebuild_timeout") == timedelta(milliseconds=500)


def test_options_do_not_change_afterwards() -> None:
    with pytest.raises(AttributeError):
        RecoveryOptions().repair_budget = 1.0  # type: ignore[misc]


# -- the shape

Sizes = tuple[Any, Any]

SHAPES: dict[tuple[Sizes, Sizes], Sizes] = {
    # (replicate, shard), (nodes, devices per node): (replicate, shard)
    (("auto", "auto"), (1, 4)): (2, 2),
    (("auto", "auto"), (1, 2)): (2, 1),
    (("auto", "auto"), (1, 3)): (1, 3),
    (("auto", "auto"), (1, 6)): (2, 3),
    (("auto", "auto"), (4, 8)): (4, 8),
    (("auto", "auto"), (3, 1)): (3, 1),
    ((4, "auto"), (1, 4)): (4, 1),
    ((1, "auto"), (1, 4)): (1, 4),
    (("auto", 4), (1, 4)): (1, 4),
    (("auto", 1), (1, 4)): (4, 1),
    (("auto", 2), (2, 4)): (4, 2),
    ((2, 4), (2, 4)): (2, 4),
}


@pytest.mark.parametrize(("sizes", "world"), SHAPES, ids=str)
def test_shape(sizes: Sizes, world: Sizes) -> None:
    shape = HsdpShape.resolve(*sizes, num_nodes=world[0], devices_per_node=world[1])
    assert (shape.replicate, shape.shard) == SHAPES[sizes, world]


@pytest.mark.parametrize(
    ("sizes", "world", "product"),
    [((3, 2), (1, 4), 6), ((2, 1), (1, 4), 2), ((3, "auto"), (1, 4), 3), (("auto", 3), (1, 4), 3),
     ((8, "auto"), (1, 4), 8), (("auto", 8), (1, 4), 8)],
    ids=str,
)  # fmt: skip
def test_sizes_that_do_not_multiply(sizes: Sizes, world: Sizes, product: int) -> None:
    with pytest.raises(ValueError) as caught:
        HsdpShape.resolve(*sizes, num_nodes=world[0], devices_per_node=world[1])
    message = str(caught.value)
    assert f"makes {product} processes, but this run has 4 (1 nodes x 4)" in message
    assert "choose one of 1 x 4, 2 x 2, 4 x 1" in message


@pytest.mark.parametrize("name", ["replicate", "shard"])
@pytest.mark.parametrize("value", [0, -2, 1.0, "2", None, True])
def test_sizes(name: str, value: Any) -> None:
    sizes = {"replicate": "auto", "shard": "auto", name: value}
    with pytest.raises(ValueError) as caught:
        HsdpShape.resolve(**sizes, num_nodes=1, devices_per_node=4)
    assert str(caught.value) == f'{name}={value!r} must be "auto" or a whole number of at least 1'


def test_one_process_has_no_peers() -> None:
    with pytest.raises(ValueError, match=r"at least 2 processes.*got 1: raise Trainer\(devices=..., num_nodes=...\)"):
        HsdpShape.resolve("auto", "auto", num_nodes=1, devices_per_node=1)


@pytest.mark.parametrize(
    ("shape", "caveat"),
    [
        ((2, 2), ""),
        ((1, 4), "replicate=1: nothing is replicated, this is plain FSDP over 4 processes"),
        ((4, 1), "shard=1: nothing is sharded, every one of the 4 processes holds the whole model"),
    ],
    ids=str,
)
def test_a_size_of_1_is_said_aloud(shape: tuple[int, int], caveat: str) -> None:
    assert HsdpShape(replicate=shape[0], shard=shape[1]).caveat == caveat
