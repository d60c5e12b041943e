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

from lightning_accelpact.recovery.digest import checksum, shard_digests, state_digest


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


# -- digests of shards, one by one


def test_shard_digests_name_everything_but_buffers() -> None:
    model, optimizer = trained()
    names = {name for name, _ in model.named_parameters()}
    expected = {f"parameter/{name}" for name in names} | {"group/0/0"}
    expected |= {f"state/0/{name}/{key}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")}
    assert set(shard_digests(model, [optimizer])) == expected


def changed(change: Callable[[Model, AdamW], Any]) -> set[str]:
    """The names whose digests a change has altered."""
    model, optimizer = trained()
    before = shard_digests(model, [optimizer])
    change(model, optimizer)
    after = shard_digests(model, [optimizer])
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


SHARD_CHANGES: dict[str, tuple[Callable[[Model, AdamW], Any], set[str]]] = {
    "weight": (lambda model, _: next_float(model.layer.weight), {"parameter/layer.weight"}),
    "state": (
        lambda model, optimizer: next_float(optimizer.state[model.layer.bias]["exp_avg"]),
        {"state/0/layer.bias/exp_avg"},
    ),
    "step": (
        lambda model, optimizer: optimizer.state[model.norm.weight]["step"].add_(1),
        {"state/0/norm.weight/step"},
    ),
    "rate": (lambda _, optimizer: optimizer.param_groups[0].update(lr=0.2), {"group/0/0"}),
    "buffer": (lambda model, _: next_float(model.norm.running_mean), set()),
    "nothing": (lambda *_: None, set()),
}


@pytest.mark.parametrize("case", SHARD_CHANGES)
def test_shard_digests_tell_what_has_changed(case: str) -> None:
    change, names = SHARD_CHANGES[case]
    assert changed(change) == names


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_counts_in_a_checksum(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).to(dtype)
    seen = {checksum(tensor)}
    width = 8 * tensor.element_size() if dtype != torch.bool else 1
    for place in range(len(tensor)):
        for bit in range(width):
            other = tensor.clone()
            other.view(torch.uint8)[place * other.element_size() + bit // 8] ^= 1 << bit % 8
            seen.add(checksum(other))
    assert len(seen) == 1 + len(tensor) * width


def test_a_checksum_depends_on_the_order() -> None:
    assert checksum(torch.tensor([1.0, 2.0])) != checksum(torch.tensor([2.0, 1.0]))
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))


def test_a_checksum_is_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000)
    whole = checksum(tensor)
    monkeypatch.setattr("lightning_accelpact.recovery.digest._WORDS_AT_ONCE", 7)
    assert checksum(tensor) == whole


def test_changes_in_two_places_do_not_cancel() -> None:
    tensor = torch.arange(1, 9, dtype=torch.float64)
    sums = {checksum(tensor)}
    for first in range(8):
        for second in range(first):
            other = tensor.clone()
            other[[first, second]] *= -1  # the highest bit, which multiplication alone does not spread
            sums.add(checksum(other))
    assert len(sums) == 1 + 8 * 7 // 2


def test_a_checksum_is_that_of_the_definition() -> None:
    """Against Python's own integers."""
    words = [5, -3, 2**62, -(2**63)]
    total = sum(_splitmix(word + place * 0x9E3779B97F4A7C15) for place, word in enumerate(words, 1))
    assert checksum(torch.tensor(words)) % 2**64 == total % 2**64


def _splitmix(word: int) -> int:
    word %= 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)


def test_a_checksum_of_a_view_is_that_of_its_content() -> None:
    base = torch.randn(4, 6)
    assert checksum(base.t()[1:]) == checksum(base.t()[1:].contiguous())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_checksum_is_the_same_on_a_device() -> None:
    tensor = torch.randn(1000)
    assert checksum(tensor.cuda()) == checksum(tensor)
