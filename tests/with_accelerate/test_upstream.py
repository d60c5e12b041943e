"""Functions of Accelerate's own test scripts that pass under FSDP2 on CPU without AccelPact pass with it.

``UPSTREAM_BASELINE=1`` runs them without it.
"""

from __future__ import annotations

import os

import jobs_accelerate_upstream
import pytest
from cluster import run_ranks, values

PROTECTED = os.environ.get("UPSTREAM_BASELINE") != "1"

# script, processes, functions
PASSING = [
    ("test_ops", 4, """
        test_gather test_gather_object test_gather_non_contiguous test_broadcast test_pad_across_processes
        test_reduce_sum test_reduce_mean test_reduce_max test_op_checker test_copy_tensor_to_devices
    """),
    ("test_script", 4, """
        init_state_check process_execution_check test_split_between_processes_list
        test_split_between_processes_nested_dict test_split_between_processes_evenly rng_sync_check
        dl_preparation_check central_dl_preparation_check custom_sampler_check check_seedable_sampler
        check_seedable_sampler_with_data_seed check_seedable_sampler_in_batch_sampler_shard test_trigger
        test_reinstantiated_state
    """),
    ("test_script", 2, "test_split_between_processes_tensor"),
    ("test_sync", 4, "test_dataloader_break"),
    ("test_distributed_data_loop", 2, """
        test_default_ensures_even_batch_sizes test_can_disable_even_batches test_pickle_accelerator
        test_join_raises_warning_for_non_ddp_distributed
    """),
]  # fmt: skip
CASES = [(script, processes, name) for script, processes, names in PASSING for name in names.split()]


@pytest.mark.parametrize(("script", "processes", "name"), CASES, ids=[f"{case[0]}-{case[2]}" for case in CASES])
def test_upstream(script: str, processes: int, name: str) -> None:
    values(run_ranks(jobs_accelerate_upstream.run, processes, script, name, PROTECTED, timeout=60))
