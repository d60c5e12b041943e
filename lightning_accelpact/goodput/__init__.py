"""What a run's time went to, what faults cost and what in-memory recovery saved.

Needs neither torch nor Lightning, but for :mod:`.metric`, which is imported by whoever needs it.
"""

from lightning_accelpact.goodput.account import GoodputAccount, GoodputOptions
from lightning_accelpact.goodput.ledger import Ledger, TimeClass, append_jsonl, process_age, read_jsonl
from lightning_accelpact.goodput.model import Recovery, saved_against_restart, time_saved
from lightning_accelpact.goodput.report import GoodputSummary, IncidentSummary, render, summarize
from lightning_accelpact.goodput.run import Run, RunError, read_runs
from lightning_accelpact.goodput.tracking import tracked_values

__all__ = [
    "GoodputAccount",
    "GoodputOptions",
    "GoodputSummary",
    "IncidentSummary",
    "Ledger",
    "Recovery",
    "Run",
    "RunError",
    "TimeClass",
    "append_jsonl",
    "process_age",
    "read_jsonl",
    "read_runs",
    "render",
    "saved_against_restart",
    "summarize",
    "time_saved",
    "tracked_values",
]
