"""Lightning's tests that say nothing about ``accelpact_hsdp``, each with the reason."""

from __future__ import annotations

_FABRIC = "tests_fabric/strategies/test_model_parallel"
_TRAINER = "tests_pytorch/strategies/test_model_parallel"

_SIZES = (
    "wrong sizes of Lightning's two dimensions, with mocks in the place of the world; replicate= and shard= are"
    " checked before anything starts, with a ValueError of their own"
)
_TIMEOUT = "the option is collective_timeout=; AccelPact makes the process groups itself, without the mocked call"
_META = "sharding needs a device mesh, and this one is a mock; test_module_init_context materializes from meta as well"
_MESH = "asserts the names of Lightning's mesh dimensions; this strategy's are replicate and shard"
_TENSOR_PARALLEL = "tensor parallelism, where ranks of a group read the same data; here every rank reads its own"
_NO_STRATEGY = "calls a function of Lightning's and no strategy"

# The test function, whatever its parameters -> why it does not apply
NOT_APPLICABLE = {
    f"{_FABRIC}.py::test_validate_device_mesh_dimensions": _SIZES,
    f"{_FABRIC}.py::test_parallelize_fn_call": "there is no parallelize_fn=: the strategy shards the module itself",
    f"{_FABRIC}.py::test_no_backward_sync": (
        "asserts the class of an internal object, and that gradient sync is off after no_backward_sync(enabled=False),"
        " which this strategy avoids on purpose"
    ),
    f"{_FABRIC}.py::test_set_timeout": _TIMEOUT,
    f"{_FABRIC}.py::test_meta_device_materialization": _META,
    f"{_FABRIC}_integration.py::test_setup_device_mesh": _MESH,
    f"{_FABRIC}_integration.py::test_tensor_parallel": _TENSOR_PARALLEL,
    f"{_FABRIC}_integration.py::test_fsdp2_tensor_parallel": _TENSOR_PARALLEL,
    f"{_FABRIC}_integration.py::test_load_full_state_dict_into_sharded_model": (
        "on CPU it compares weights that each process has left uninitialized, and fails with Lightning's strategy, too"
    ),
    f"{_FABRIC}_integration.py::test_load_raw_module_state": _NO_STRATEGY,
    f"{_TRAINER}.py::test_validate_device_mesh_dimensions": _SIZES,
    f"{_TRAINER}.py::test_fsdp_v1_modules_unsupported": (
        "calls setup() before setup_environment(), so that there is no device mesh to shard a model over"
    ),
    f"{_TRAINER}.py::test_configure_model_required": "none is needed: the strategy shards the model itself",
    f"{_TRAINER}.py::test_set_timeout": _TIMEOUT,
    f"{_TRAINER}.py::test_meta_device_materialization": _META,
    f"{_TRAINER}.py::test_align_compiled_param_names_with_module": _NO_STRATEGY,
    f"{_TRAINER}.py::test_align_compiled_param_names_no_compile": _NO_STRATEGY,
    f"{_TRAINER}_integration.py::test_setup_device_mesh": _MESH,
    f"{_TRAINER}_integration.py::test_tensor_parallel": _TENSOR_PARALLEL,
    f"{_TRAINER}_integration.py::test_fsdp2_tensor_parallel": _TENSOR_PARALLEL,
    f"{_TRAINER}_integration.py::test_model_parallel_single_file_checkpoint_with_compile": (
        "trains in one process; recovery needs peers, and fewer than 2 processes are refused"
    ),
}


def reason_against(test: str) -> str | None:
    """Why a test does not apply, or ``None`` if it does.

    Args:
        test: As pytest names it, with or without parameters.
    """
    return NOT_APPLICABLE.get(_function(test))


def unknown(tests: list[str]) -> list[str]:
    """Entries of the table that name none of the tests there are."""
    return sorted(set(NOT_APPLICABLE) - {_function(test) for test in tests})


def _function(test: str) -> str:
    return test.partition("[")[0]
