"""The digest changes with every bit of a rank's state, and with nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW, Optimizer

from lightning_accelpact.recovery.digest import state_digest


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))


def trained(seed: int = 0) -> tuple[Model, AdamW]:
    """A model after two updates."""
    torch.manual_seed(seed)
    model = Model()
    optimizer = AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def next_float(tensor: torch.Tensor) -> None:
    """Change the first element by its last bit."""
    with torch.no_grad():
        first = tensor.view(-1)[:1]
        first.copy_(torch.nextafter(first, torch.full_like(first, torch.inf)))


def test_equal_runs_have_equal_digests() -> None:
    first, second = (state_digest(model, [optimizer]) for model, optimizer in (trained(), trained()))
    assert first == second
    assert len(first) == 64


CHANGES: dict[str, Callable[[Model, AdamW], Any]] = {
    "weight": lambda model, _: next_float(model.layer.weight),
    "last bias": lambda model, _: next_float(model.norm.bias),
    "buffer": lambda model, _: next_float(model.norm.running_var),
    "counter buffer": lambda model, _: model.norm.num_batches_tracked.add_(1),
    "buffer outside the state dict": lambda model, _: next_float(model.scratch),
    "sign of a zero": lambda model, _: model.scratch.neg_(),
    "first moment": lambda model, optimizer: next_float(optimizer.state[model.layer.weight]["exp_avg"]),
    "second moment": lambda model, optimizer: next_float(optimizer.state[model.norm.bias]["exp_avg_sq"]),
    "step counter": lambda model, optimizer: optimizer.state[model.layer.bias]["step"].add_(1),
    "learning rate": lambda _, optimizer: optimizer.param_groups[0].update(lr=0.1 + 2**-56),
    "lost moment": lambda model, optimizer: optimizer.state[model.layer.weight].pop("exp_avg"),
    "lost state": lambda model, optimizer: optimizer.state.pop(model.layer.weight),
    "dtype": lambda model, _: setattr(model, "scratch", model.scratch.int()),
    "shape": lambda model, _: setattr(model, "scratch", model.scratch.view(2, 1)),
    "name": lambda model, _: setattr(model, "other", model._modules.pop("norm")),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_shows(change: Callable[[Model, AdamW], Any]) -> None:
    model, optimizer = trained()
    before = state_digest(model, [optimizer])
    change(model, optimizer)
    assert state_digest(model, [optimizer]) != before


def test_gradients_and_layout_do_not_count() -> None:
    model, optimizer = trained()
    before = state_digest(model, [optimizer])
    optimizer.zero_grad()
    model.layer.weight.data = model.layer.weight.data.t().contiguous().t()
    assert state_digest(model, [optimizer]) == before


def test_each_optimizer_counts() -> None:
    model, optimizer = trained()
    other = SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    assert len({state_digest(model, optimizers) for optimizers in ([], [optimizer], [optimizer, other])}) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int64])
def test_types_that_numpy_may_not_know(dtype: torch.dtype) -> None:
    model = nn.Module()
    model.register_buffer("values", torch.ones(3).to(dtype))
    before = state_digest(model, [])
    model.values[2:] = torch.zeros(1).to(dtype)
    assert state_digest(model, []) != before


def test_empty_shard_is_taken() -> None:
    model = nn.Module()
    model.register_buffer("values", torch.empty(0, 3))
    before = state_digest(model, [])
    model.values = torch.empty(0, 4)
    assert state_digest(model, []) != before


def test_unknown_value_is_refused_by_name() -> None:
    model, optimizer = trained()
    optimizer.param_groups[0]["schedule"] = print
    with pytest.raises(TypeError, match=r"builtin_function_or_method at group/0/0/schedule"):
        state_digest(model, [optimizer])


def test_tensor_without_data_is_refused() -> None:
    with pytest.raises(NotImplementedError):
        state_digest(nn.Linear(2, 2, device="meta"), [])


def _sharded_rank(rank: int, folder: str) -> None:
    """One of two ranks that shard a layer: its digest, before and after a change of rank 1's shard."""
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    optimizer: Optimizer = AdamW(layer.parameters())
    layer(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    before = state_digest(layer, [optimizer])
    if rank == 1:
        next_float(layer.weight.to_local())
    with open(os.path.join(folder, f"rank{rank}"), "w") as file:
        file.write(f"{before} {state_digest(layer, [optimizer])}")
    torch.distributed.destroy_process_group()


def test_a_sharded_tensor_counts_by_its_local_shard(tmp_path: Any) -> None:
    torch.multiprocessing.spawn(_sharded_rank, args=(str(tmp_path),), nprocs=2)
    (before_0, after_0), (before_1, after_1) = ((tmp_path / f"rank{rank}").read_text().split() for rank in (0, 1))
    assert before_0 == after_0 != before_1 != after_1
