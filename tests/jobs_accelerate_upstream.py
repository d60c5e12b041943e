"""Runs one function of Accelerate's own test scripts on a rank, under FSDP2 on CPU, with AccelPact or without."""

from __future__ import annotations

import inspect
import os
from importlib import import_module

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "NO_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
}


def run(script: str, function: str, protected: bool) -> int:
    """Run it; returns how many incidents there were, or -1 without AccelPact.

    Args:
        script: Module in ``accelerate.test_utils.scripts``.
        function: What to call; gets a ``PartialState`` or an ``Accelerator`` if it asks for one.
        protected: Whether to switch AccelPact on.
    """
    two = os.environ["WORLD_SIZE"] == "2"
    os.environ.update(FSDP2, **({"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "1"} if two else {}))
    if protected:
        os.environ.update(ACCELERATE_USE_ACCELPACT="true", ACCELPACT_COLLECTIVE_TIMEOUT="30", ACCELPACT_GOODPUT="false")
    from accelerate import Accelerator, PartialState

    from accelerate_plugin import adapter, allow_fsdp_on_cpu

    allow_fsdp_on_cpu()
    if script != "test_ops" and function != "test_reinstantiated_state":
        Accelerator()  # as these scripts do first of all; the exceptions cannot do with one
    call = getattr(import_module(f"accelerate.test_utils.scripts.{script}"), function)
    makers = {"state": PartialState, "accelerator": Accelerator}
    call(*(makers[name]() for name in inspect.signature(call).parameters if name in makers))
    if PartialState._shared_state:
        PartialState().wait_for_everyone()  # nobody ends while others wait for it
    return len(adapter._current.incidents) if protected and adapter._current else -1
