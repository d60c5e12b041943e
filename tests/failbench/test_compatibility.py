"""The paper's statements on its Table II, and what this harness makes of it."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from benchmarks.failbench import registry
from benchmarks.failbench.cell import PAPER_ARCHITECTURES, PAPER_MECHANISMS
from benchmarks.failbench.compatibility import Kind, here, in_paper, paper_cells

PAIRS = list(itertools.product(PAPER_ARCHITECTURES, PAPER_MECHANISMS))


def pairs(kind: Kind) -> set[tuple[str, str]]:
    return {pair for pair in PAIRS if in_paper(*pair).kind is kind}


def test_what_the_paper_counts() -> None:
    kinds = Counter(in_paper(cell.architecture, cell.mechanism).kind for cell in paper_cells())
    assert sum(kinds.values()) == 7 * 9 * 3 == 189
    assert sum(kinds.values()) - kinds[Kind.DEGENERATE] == 180
    assert kinds[Kind.INFEASIBLE] == 9


def test_what_the_paper_names() -> None:
    assert pairs(Kind.DEGENERATE) == {("A4", "FT7"), ("A5", "FT7"), ("A7", "FT7")}
    assert ("A6", "FT2") in pairs(Kind.INFEASIBLE)
    assert not in_paper("A6", "FT2").inferred


def test_what_is_inferred_says_so() -> None:
    assert {pair for pair in PAIRS if in_paper(*pair).inferred} == pairs(Kind.INFEASIBLE) - {("A6", "FT2")}


@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
def test_every_pair_has_a_reason(pair: tuple[str, str]) -> None:
    for found in (in_paper(*pair), here(*pair)):
        assert found.reason.endswith(".")


def test_where_the_harness_goes_further_it_says_how() -> None:
    further = {pair for pair in PAIRS if in_paper(*pair).kind is not here(*pair).kind}
    assert further == pairs(Kind.INFEASIBLE)
    for pair in further:
        assert here(*pair).kind is Kind.VIABLE
        assert here(*pair).reason.startswith("Works here: ")


def test_accelpact_needs_replicas() -> None:
    kinds = {name: here(name, "FT10").kind for name in PAPER_ARCHITECTURES}
    assert {name for name, kind in kinds.items() if kind is Kind.INFEASIBLE} == {"A4", "A5", "A6"}
    assert all(in_paper(name, "FT10") is None for name in PAPER_ARCHITECTURES)


def test_the_paper_has_no_asynchronous_row() -> None:
    assert in_paper("A1-async", "FT1") is None


def test_the_registry_has_what_the_paper_has() -> None:
    assert set(PAPER_ARCHITECTURES) <= set(registry.packaged(registry.ARCHITECTURES))
    assert set(PAPER_MECHANISMS) <= set(registry.packaged(registry.MECHANISMS))


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no architecture 'A9'; there are A1, A1-async, A2"):
        registry.architecture("A9")
    with pytest.raises(ValueError, match="no mechanism 'FT0'; there are FT1"):
        registry.mechanism("FT0")


@pytest.mark.parametrize("mechanism", registry.packaged(registry.MECHANISMS))
@pytest.mark.parametrize("architecture", registry.packaged(registry.ARCHITECTURES))
def test_the_classes_are_those_of_the_code(architecture: str, mechanism: str) -> None:
    why = registry.mechanism(mechanism).why_not(registry.architecture(architecture))
    assert (here(architecture, mechanism).kind is Kind.INFEASIBLE) == (why is not None), why
