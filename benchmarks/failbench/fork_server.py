"""Starts processes that have imported everything already, in milliseconds."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from typing import Any

_PRELOADED = [
    "torch",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "benchmarks.failbench.member",
]
# One thread for each rank, Gloo on this machine alone, and no back end of torch that FailBench does not use
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "RES_OPTIONS": "timeout:1 attempts:1",
}
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_PRELOADED)
_starting = threading.Lock()


def start(target: Callable[..., Any], *arguments: Any) -> Any:
    """Start a daemon process; from any thread.

    Args:
        target: A function of an importable module.
        arguments: For it; have to be picklable.

    Returns:
        The process (``multiprocessing.Process``).
    """
    process = _context.Process(target=target, args=arguments, daemon=True)
    with _starting, _environment():
        forkserver.ensure_running()  # a server that is started by this keeps the environment, and so do its children
        process.start()
    return process


def pipe() -> tuple[Any, Any]:
    """Two ends of a two-way connection."""
    return _context.Pipe()


@contextmanager
def _environment() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
