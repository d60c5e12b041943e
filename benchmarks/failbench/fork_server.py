"""Starts processes that have imported everything already, in milliseconds."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
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


def start(target: Callable[..., Any], *arguments: Any) -> Any:
    """Start a daemon process.

    Args:
        target: A function of an importable module.
        arguments: For it; have to be picklable.

    Returns:
        The process (``multiprocessing.Process``).
    """
    before = dict(os.environ)
    os.environ.update(_ENVIRONMENT)
    try:
        process = _context.Process(target=target, args=arguments, daemon=True)
        process.start()  # the first one starts the server, which keeps the environment
    finally:
        os.environ.clear()
        os.environ.update(before)
    return process


def pipe() -> tuple[Any, Any]:
    """Two ends of a two-way connection."""
    return _context.Pipe()
