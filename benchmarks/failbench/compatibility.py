"""Which mechanism works on which architecture: the paper's Table II, and what this harness makes of it, as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from benchmarks.failbench import registry
from benchmarks.failbench.cell import PAPER_ARCHITECTURES, PAPER_MECHANISMS, PAPER_TRACES, Cell


class Kind(StrEnum):
    """The paper's three classes (section IV-B)."""

    VIABLE = "viable"
    """The mechanism can be run as designed."""
    DEGENERATE = "degenerate"
    """It can be run, but comes to nothing, or to another mechanism that is measured anyway."""
    INFEASIBLE = "infeasible"
    """It cannot work without being designed anew."""


@dataclass(frozen=True)
class Compatibility:
    """The class of a pair.

    Args:
        kind: The class.
        reason: Why, a sentence.
        inferred: Whether the paper does not say so itself and it follows from its numbers.
    """

    kind: Kind
    reason: str
    inferred: bool = False


_REPLICAS = (
    "A6 has no process group of all ranks that lasts, only subgroups along the edges of its gossip, so a mirror rank"
    " cannot be addressed"
)
_SHARDS = "has no data shards on each rank that could be redistributed; what is left is a restart from a checkpoint"

# Table II, but for the viable pairs. The text that we have names FT2 on A6 only; 9 infeasible tuples are three pairs
# under three traces, and FT5 and FT6 send to mirror ranks by the same protocol as FT2 (sections II-B, IV-B, V-H).
_PAPER: Mapping[tuple[str, str], Compatibility] = {
    **{(name, "FT7"): Compatibility(Kind.DEGENERATE, f"{name} {_SHARDS}.") for name in ("A4", "A5", "A7")},
    ("A6", "FT2"): Compatibility(Kind.INFEASIBLE, f"{_REPLICAS}."),
    ("A6", "FT5"): Compatibility(Kind.INFEASIBLE, f"{_REPLICAS}.", inferred=True),
    ("A6", "FT6"): Compatibility(Kind.INFEASIBLE, f"{_REPLICAS}.", inferred=True),
}

_MIRRORS_HERE = (
    "Works here: gossip has links of its own along its edges, and besides them there is a process group of all living"
    " ranks, in which mirrors are addressed and which is formed anew after a loss."
)
_NO_REPLICA = "no two ranks hold the same state, so nobody could hand a lost rank's state to its replacement"

# What differs in this harness from the paper's table, and the packaged pairs that the paper does not have
_HERE: Mapping[tuple[str, str], Compatibility] = {
    **{("A6", name): Compatibility(Kind.VIABLE, _MIRRORS_HERE) for name in ("FT2", "FT5", "FT6")},
    ("A4", "FT10"): Compatibility(Kind.INFEASIBLE, f"A4 is one pipeline: {_NO_REPLICA}."),
    ("A5", "FT10"): Compatibility(Kind.INFEASIBLE, f"A5 is one tensor-parallel group: {_NO_REPLICA}."),
    ("A6", "FT10"): Compatibility(Kind.INFEASIBLE, f"The models of A6 differ between two averagings: {_NO_REPLICA}."),
}

_VIABLE = {
    "FT1": "Each rank's state goes to disk at every interval.",
    "FT2": "Each rank's state goes to the memory of a peer at every interval.",
    "FT3": "Each rank's state is copied at every interval and goes to disk in the background.",
    "FT4": "Each rank's state goes to a peer upon a warning.",
    "FT5": "Each rank's state goes to a peer after every step.",
    "FT6": "Each rank's state goes to two peers at every interval.",
    "FT7": "The data of lost ranks is shared out among the survivors.",
    "FT8": "The process groups are formed anew by those that are left.",
    "FT9": "Nothing is done: this shows what the architecture does by itself.",
    "FT10": "A lost rank's replacement takes its state from a replica in memory.",
}


def in_paper(architecture: str, mechanism: str) -> Compatibility | None:
    """The class of a pair in the paper's Table II; None if the paper does not have it."""
    if architecture not in PAPER_ARCHITECTURES or mechanism not in PAPER_MECHANISMS:
        return None
    return _PAPER.get((architecture, mechanism), Compatibility(Kind.VIABLE, _VIABLE[mechanism]))


def here(architecture: str, mechanism: str) -> Compatibility:
    """The class of a pair in this harness.

    An architecture or a mechanism of your own is asked itself: ``Mechanism.why_not`` says for an architecture why the
    mechanism cannot work on it.

    Raises:
        UnknownName: if there is no such architecture or mechanism.
    """
    known = _HERE.get((architecture, mechanism)) or in_paper(architecture, mechanism)
    if known is not None:
        return known
    if architecture in registry.packaged(registry.ARCHITECTURES) and mechanism in registry.packaged(
        registry.MECHANISMS
    ):
        return Compatibility(Kind.VIABLE, _VIABLE[mechanism])
    why = registry.mechanism(mechanism).why_not(registry.architecture(architecture))
    if why:
        return Compatibility(Kind.INFEASIBLE, why)
    return Compatibility(Kind.VIABLE, _VIABLE.get(mechanism, "A mechanism of your own, which has nothing against it."))


def paper_cells() -> Iterator[Cell]:
    """All 7 x 9 x 3 tuples of the paper."""
    return cells(PAPER_ARCHITECTURES, PAPER_MECHANISMS, PAPER_TRACES)


def cells(architectures: Sequence[str], mechanisms: Sequence[str], traces: Sequence[str]) -> Iterator[Cell]:
    """All combinations, those of an architecture one after the other."""
    return (
        Cell(architecture, mechanism, trace)
        for architecture in architectures
        for mechanism in mechanisms
        for trace in traces
    )
