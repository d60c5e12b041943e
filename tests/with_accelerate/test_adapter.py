"""The private attributes of Accelerate that the adapter touches are where it looks for them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from datetime import timedelta
from importlib.metadata import version
from importlib.util import find_spec

import accelerate.data_loader
import accelerate.utils
import pytest
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.parallelism_config import ParallelismConfig
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin as FSDP
from accelerate.utils import InitProcessGroupKwargs

from accelerate_plugin import adapter

BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric"):
            raise ImportError(f"{name} is not installed")
sys.meta_path.insert(0, Blocker())
"""


def source(function: object) -> str:
    return inspect.getsource(inspect.unwrap(function))


def test_the_version_is_one_that_was_checked() -> None:
    assert version("accelerate").startswith(tuple(f"{known}." for known in adapter.CHECKED_ACCELERATE))


@pytest.mark.parametrize(
    ("function", "texts"),
    [
        (adapter._plain_init, ["handler_class_to_attr[handler.__class__]", "self.step = 0", "self._models = []",
                               "self._schedulers = []", "self.scaler = None",
                               "self.state.device_mesh = self.parallelism_config.get_device_mesh(self.device.type)"]),
        (adapter._plain_partial_init, ["self.distributed_type = distributed_type",
                                       "if not torch.distributed.is_initialized():"]),
        (Accelerator.prepare, ["self._prepare_fsdp2(*args)"]),
        (Accelerator._prepare_fsdp2, ["self._models.append(model)", "self._prepare_one(obj, first_pass=True)"]),
        (Accelerator.accumulate, ["self._do_sync()", "self.no_sync(m)"]),
        (Accelerator._do_sync, ["self.step += 1", "self.gradient_state._set_sync_gradients("]),
        (Accelerator.prepare_optimizer, ["AcceleratedOptimizer(optimizer", "_is_accelerate_prepared"]),
        (Accelerator.end_training, ["tracker.finish()", "self.state.destroy_process_group()"]),
        (Accelerator.save_state, ['f"checkpoint_{self.save_iteration}"', "automatic_checkpoint_naming"]),
        (AcceleratedOptimizer.step, ["if self.gradient_state.sync_gradients:", "self.optimizer.step(closure)"]),
        (AcceleratedScheduler.step, ["self.scheduler._step_count += 1"]),
        (DataLoaderShard.__iter__, ["self.end_of_dataloader = True", "synchronize_rng_states("]),
        (DataLoaderDispatcher.__iter__, ["self.end_of_dataloader = True", "batch = broadcast(batch"]),
        (DataLoaderDispatcher._fetch_batches, ["broadcast_object_list(batch_info)"]),
        (AcceleratorState.__init__, ["DistributedType.MULTI_GPU", "self.distributed_type = DistributedType.FSDP"]),
        (ParallelismConfig.build_device_mesh, ["init_device_mesh("]),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)  # fmt: skip
def test_private_attributes_are_used_as_the_adapter_believes(function: object, texts: list[str]) -> None:
    for text in texts:
        assert text in source(function)


def test_shared_states_and_collectives_are_there() -> None:
    assert isinstance(AcceleratorState._shared_state, dict)
    assert isinstance(PartialState._shared_state, dict)
    assert GradientState.num_steps and callable(GradientState._set_sync_gradients)
    for name in adapter._COLLECTIVES:
        assert getattr(accelerate.utils, name).__wrapped__ is not None
    for name in ("broadcast", "broadcast_object_list", "synchronize_rng_states"):
        assert vars(accelerate.data_loader)[name] is getattr(accelerate.utils, name)


def run(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, **options)


def test_it_needs_no_lightning() -> None:
    modules = (
        "accelerate_plugin, accelerate_plugin.launch, lightning_accelpact.recovery.runtime,"
        " lightning_accelpact.goodput.metric"
    )
    assert run(f"{BLOCKER}\nimport lightning").returncode != 0
    result = run(f"{BLOCKER}\nimport {modules}\nassert not {{'lightning', 'lightning_fabric'}} & set(sys.modules)")
    assert result.returncode == 0, result.stderr


def test_an_accelerator_without_the_plugin_is_left_alone() -> None:
    code = (
        "import accelerate_plugin\nfrom accelerate import Accelerator\naccelerator = Accelerator(cpu=True)\n"
        "assert type(accelerator) is Accelerator and not hasattr(accelerator, 'accelpact')\n"
        "import torch\nmodel = torch.nn.Linear(2, 2)\n"
        "model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))\n"
        "assert type(optimizer).__name__ == 'AcceleratedOptimizer'\n"
        "assert accelerator.gather(torch.ones(2)).sum() == 2"
    )
    result = run(code)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        ("", {}, "needs Accelerate's FSDP2"),
        ("fsdp_plugin=FSDP(fsdp_version=1), ", {}, "fsdp_version is 1"),
        ("fsdp_plugin=FSDP(fsdp_version=2), ", {}, "needs at least 2 processes"),
        ("fsdp_plugin=FSDP(fsdp_version=2), ", {"WORLD_SIZE": "4", "replicate": "3"}, "replicate=3 x shard=1"),
        ("fsdp_plugin=FSDP(fsdp_version=2), parallelism_config=PC(dp_replicate_size=2, dp_shard_size=2), ",
         {"WORLD_SIZE": "4", "replicate": "1"}, r"replicate=1\) contradicts ParallelismConfig\(dp_replicate_size=2\)"),
        ("fsdp_plugin=FSDP(fsdp_version=2), parallelism_config=PC(dp_shard_size=2, tp_size=2), ",
         {"WORLD_SIZE": "4"}, "tp_size=2"),
        ("fsdp_plugin=FSDP(fsdp_version=2), mixed_precision='fp8', ", {"WORLD_SIZE": "4"}, "fp8"),
        ("fsdp_plugin=FSDP(fsdp_version=2), ", {"WORLD_SIZE": "4", "ACCELERATE_USE_DEEPSPEED": "true"},
         "deepspeed_plugin"),
        ("fsdp_plugin=FSDP(fsdp_version=2), handlers=[Init(timeout=timedelta(1))], ", {"WORLD_SIZE": "4"},
         r"InitProcessGroupKwargs\(timeout\) has no effect"),
        ("fsdp_plugin=FSDP(fsdp_version=2), handlers=[plugin], ", {"WORLD_SIZE": "4"}, "holds 2 AccelPactPlugin"),
    ],
)  # fmt: skip
def test_what_it_cannot_work_with_is_refused_before_anything_starts(
    arguments: str, environment: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = dict(environment)
    replicate = environment.pop("replicate", "auto")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    plugin = adapter.AccelPactPlugin(replicate=int(replicate) if replicate != "auto" else "auto")
    names = {
        "FSDP": FSDP, "PC": ParallelismConfig, "plugin": plugin, "Init": InitProcessGroupKwargs, "timedelta": timedelta,
    }  # fmt: skip
    if "tp_size" in arguments and find_spec("transformers") is None:
        pytest.skip("Accelerate itself refuses tp_size without transformers")
    options = eval(f"dict({arguments})", names)
    with pytest.raises(ValueError, match=words):
        Accelerator(kwargs_handlers=[plugin, *options.pop("handlers", [])], **options)
    assert PartialState._shared_state == {}
