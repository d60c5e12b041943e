"""What stands in Lightning's tests for ``ModelParallelStrategy``: our strategies, taking its arguments."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from lightning_accelpact import FabricHSDPStrategy, ResilientHSDPStrategy
from lightning_accelpact.recovery import session
from tests.upstream.translation import STRATEGY

Size = int | Literal["auto"]


class TrainerSubstitute(ResilientHSDPStrategy):
    """For the Trainer; a model's own ``configure_model`` shards it, with :func:`shard_layers`."""

    def __init__(self, data_parallel_size: Size = "auto", tensor_parallel_size: Size = "auto", **options: Any) -> None:
        _leave_group_of_another_strategy()
        sizes = _sizes(data_parallel_size, tensor_parallel_size)
        super().__init__(**sizes, resume="never", **options)  # a test lists the files of a checkpoint


class FabricSubstitute(FabricHSDPStrategy):
    """For Fabric; the strategy shards the model itself, and the tests' loops are trained with as they are."""

    _latest: FabricSubstitute | None = None  # set up in this process

    def __init__(
        self,
        parallelize_fn: Any,
        data_parallel_size: Size = "auto",
        tensor_parallel_size: Size = "auto",
        **options: Any,
    ) -> None:
        _leave_group_of_another_strategy()
        sizes = _sizes(data_parallel_size, tensor_parallel_size)
        super().__init__(**sizes, manual_optimization="fail_stop", **options)

    def setup_environment(self) -> None:
        """Remember it, for :meth:`end_of_test`."""
        FabricSubstitute._latest = self
        super().setup_environment()

    @classmethod
    def end_of_test(cls, error: BaseException | None) -> None:
        """What happens at the end of a script: the ranks leave together, or an error stops them."""
        strategy, cls._latest = cls._latest, None
        if strategy is not None and error is None:
            strategy.finish()
        elif strategy is not None:
            strategy.on_exception(error)


for _substitute in (TrainerSubstitute, FabricSubstitute):
    _substitute.__name__ = STRATEGY  # messages name the class, and tests look for that


def _sizes(data_parallel: Size, tensor_parallel: Size) -> dict[str, Size]:
    """A mesh of as many processes, and both of its dimensions in use if both of Lightning's are."""
    if tensor_parallel == 1:
        return {"replicate": 1, "shard": data_parallel}
    return {"replicate": data_parallel, "shard": tensor_parallel}


def _leave_group_of_another_strategy() -> None:
    """Some tests train with DDP first, and our strategy has to make the process groups itself."""
    if dist.is_initialized() and session._current is None:
        dist.destroy_process_group()


def shard_layers(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    """Shard each layer of a model over the whole mesh, as a script does that calls ``fully_shard`` itself."""
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    return model
