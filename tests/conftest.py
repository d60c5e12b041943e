"""Shared fixtures: reference runs are made once per configuration."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import pytest

# Before anything imports torch: BLAS and OpenMP pools would outnumber the cores many times over
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# torch's store looks up the name of every peer that connects; a resolver that loses a query must not cost 5 s each time
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# What is qualified is measured anew in every run of the tests, once for each framework, and the user's files are left alone
_home = tempfile.mkdtemp(prefix="accelpact-tests-")
atexit.register(shutil.rmtree, _home, ignore_errors=True)
os.environ.update(XDG_CACHE_HOME=f"{_home}/cache", XDG_CONFIG_HOME=f"{_home}/config")
os.environ.pop("ACCELPACT_ENVELOPE", None)

import jobs  # noqa: E402
from cluster import run_ranks, values  # noqa: E402


@pytest.fixture(scope="session")
def reference() -> Callable[..., list[dict[str, Any]]]:
    """The uninterrupted run of a configuration, on every rank."""
    known: dict[Any, list[dict[str, Any]]] = {}

    def run(**options: Any) -> list[dict[str, Any]]:
        key = repr(sorted(options.items()))
        if key not in known:
            known[key] = values(run_ranks(jobs.fit_with, 4, options))
            assert all(not result["incidents"] for result in known[key])
        return known[key]

    return run


