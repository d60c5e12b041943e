"""A drill that did not happen is said aloud: an injected fault may name a place that the run never comes to."""

from __future__ import annotations

import jobs
from cluster import run_ranks, values

from lightning_accelpact.recovery.fault import Fault, FaultKind, FaultPoint


def test_a_fault_is_named_as_it_is_given() -> None:
    for fault in (
        Fault(point=FaultPoint.VOTE, update=3),
        Fault(point=FaultPoint.BACKWARD, update=0, micro_batch=1, rank=2, kind=FaultKind.EXCEPTION),
    ):
        assert Fault.parse(str(fault)) == fault


def test_a_fault_that_never_strikes_is_named_on_its_rank() -> None:
    without_a_repair = Fault(point=FaultPoint.REPAIR, update=1, rank=1)
    strikes = Fault(point=FaultPoint.BOUNDARY, update=2, rank=0)
    results = run_ranks(jobs.fit_with, 2, {"faults": [without_a_repair, strikes], "updates": 3})
    assert all(value["incidents"] for value in values(results))
    assert [result.output.count("never struck") for result in results] == [0, 1]
    assert "the injected fault repair@1:1:sockets has never struck" in results[1].output
