"""Flat numbers for experiment trackers."""

from __future__ import annotations

import pytest

from lightning_accelpact.goodput import GoodputAccount, GoodputOptions, Ledger, TimeClass
from lightning_accelpact.goodput.tracking import tracked_values


def test_ranks_are_added_up() -> None:
    records = [
        {"totals": {"productive": 6.0, "guard": 2.0, "other": 0.0}, "incidents": [{}]},
        {"totals": {"productive": 5.0, "guard": 1.0}, "incidents": [{}, {}]},
    ]
    assert tracked_values(records) == {
        "goodput": 11 / 14, "goodput/elapsed_s": 14, "goodput/productive_s": 11, "goodput/guard_s": 3,
        "goodput/incidents": 2,
    }  # fmt: skip


def test_before_any_time_there_is_no_goodput() -> None:
    assert tracked_values([{"totals": {}, "incidents": []}])["goodput"] == 0


def test_an_account_gives_its_own_rank() -> None:
    now = 0.0
    account = GoodputAccount(Ledger(lambda: now, base=TimeClass.PRODUCTIVE), GoodputOptions())
    account.begin(0)
    now = 4.0
    values = account.tracked(2, [])
    assert values == pytest.approx(
        {"goodput": 1, "goodput/elapsed_s": 4, "goodput/productive_s": 4, "goodput/incidents": 0}
    )
    assert all(type(value) is float for value in values.values())
