"""pytest plugin in every rank of a test of Lightning's: reports what became of it, and closes our session after it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_accelpact.recovery.waiter import Waiter
from lightning_accelpact.recovery.session import close as close_session
from tests.upstream.substitutes import FabricSubstitute

RESULTS = "ACCELPACT_UPSTREAM_RESULTS"

_RANK = os.environ.get("LOCAL_RANK", "0")  # before a test runs it is set in the ranks that another rank has started


def pytest_configure() -> None:
    """Have the threads that wait for collectives before a test: they are kept, and a test must not leave any behind."""
    Waiter.result(lambda: Waiter.result(lambda: None, bool), bool)  # two of them; bool() is False: never interrupted


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A session belongs to a process; here it belongs to a test, as Lightning's fixtures look for threads left over."""
    error: BaseException | None = None
    try:
        return (yield)
    except BaseException as caught:
        error = caught
        raise
    finally:
        item.user_properties.append(("world_size", dist.get_world_size() if dist.is_initialized() else 1))
        FabricSubstitute.end_of_test(error)
        close_session()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tell which tests there are."""
    _write("collected", [item.nodeid for item in session.items])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Tell what became of a test's set-up, call or teardown."""
    crash = getattr(report.longrepr, "reprcrash", None)
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else crash.message if crash else ""
    _write(
        "ran",
        {
            "test": report.nodeid,
            "when": report.when,
            "outcome": "expected failure" if report.skipped and hasattr(report, "wasxfail") else report.outcome,
            "reason": (reason.splitlines() or [""])[0],
            "world_size": dict(report.user_properties).get("world_size", 1),
        },
    )


def _write(kind: str, message: object) -> None:
    with (Path(os.environ[RESULTS]) / f"{kind}-{_RANK}.jsonl").open("a") as file:
        file.write(json.dumps(message) + "\n")
