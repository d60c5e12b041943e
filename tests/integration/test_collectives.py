"""Collectives that a training step calls itself, in any form that torch offers, where the links are gone."""

from __future__ import annotations

import jobs_collectives
from cluster import run_ranks, values
from jobs_collectives import AGAIN, ANEW, SIZE


def test_each_form_is_run_again_in_place_or_with_its_update() -> None:
    names = [*AGAIN, *ANEW]
    undisturbed = values(run_ranks(jobs_collectives.fit, SIZE, names, False))
    struck = values(run_ranks(jobs_collectives.fit, SIZE, names, True))
    for plain, found in zip(undisturbed, struck, strict=True):
        actions = dict(zip(names, found["actions"], strict=True))
        assert actions == dict.fromkeys(AGAIN, "retry") | dict.fromkeys(ANEW, "redo")
        assert dict(zip(names, found["results"], strict=True)) == dict(zip(names, plain["results"], strict=True))
        assert found["digest"] == plain["digest"]
        assert not plain["actions"]
