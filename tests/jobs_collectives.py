"""A training step that calls collectives of its own, of one form in each update, just after its links have gone."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from jobs import Block, Regressor
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_accelpact.recovery.digest import state_digest
from lightning_accelpact.strategy import ResilientHSDPStrategy

SIZE = 2


def own(shape: tuple[int, ...] = (8,), dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """This rank's input."""
    draw = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return (10 * torch.randn(shape, generator=draw)).to(dtype)


def summed(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
    dist.all_reduce(tensor, **options)
    return tensor


def waited(*calls: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """All are begun before the first one is waited for."""
    tensors = [own(seed=seed) for seed in range(len(calls))]
    for work in [call(tensor) for call, tensor in zip(calls, tensors, strict=True)]:
        work.wait()
    return torch.cat(tensors)


def gathered(outputs: list[torch.Tensor]) -> torch.Tensor:
    dist.all_gather(outputs, own())
    return torch.cat(outputs)


def gathered_in_place() -> torch.Tensor:
    output = torch.zeros(8 * SIZE)
    part = output.view(SIZE, 8)[dist.get_rank()]
    part.copy_(own())
    dist.all_gather_single(output, part)
    return output


def gathered_objects() -> torch.Tensor:
    found: list[Any] = [None] * SIZE
    dist.all_gather_object(found, "x" * (1 + dist.get_rank()))
    return torch.tensor([len(text) for text in found])


def scattered(output: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    dist.reduce_scatter_single(output, source)
    source.data.zero_()  # its owner may do with it what he likes
    return output


def scattered_in_place() -> torch.Tensor:
    source = own((4 * SIZE,))
    part = source.view(SIZE, 4)[dist.get_rank()]
    dist.reduce_scatter_single(part, source)
    return part.clone()


def of_a_sharded_tensor(mesh: Any) -> torch.Tensor:
    """Its shard is written to while a peer may still need it."""
    tensor = DTensor.from_local(own((2, 3)), mesh, [Shard(0)], run_check=False)
    whole = tensor.redistribute(placements=[Replicate()]).to_local()
    tensor.mul_(0)
    return whole


def in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return summed(own())


def with_a_gradient() -> torch.Tensor:
    source = own().requires_grad_()
    result = differentiable.all_reduce(2 * source)
    result.square().sum().backward()
    return torch.cat([result.detach(), source.grad])


def broadcast(source: int) -> torch.Tensor:
    tensor = own()
    dist.broadcast(tensor, source)
    return tensor


def exchanged() -> torch.Tensor:
    received = torch.empty(8)
    peer = 1 - dist.get_rank()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, own(), peer), dist.P2POp(dist.irecv, received, peer)]):
        work.wait()
    return received


def swapped() -> torch.Tensor:
    output = torch.empty(4)
    dist.all_to_all_single(output, own((4,)))
    return output


def barrier() -> torch.Tensor:
    dist.barrier()
    return torch.zeros(1)


def begun(tensor: torch.Tensor) -> dist.Work:
    return dist.all_reduce(tensor, async_op=True)


AGAIN: dict[str, Callable[[Any], torch.Tensor]] = {
    "all-reduce": lambda _: summed(own()),
    "all-reduce of a number": lambda _: summed(own(())),
    "all-reduce of nothing": lambda _: summed(own((0,))),
    "all-reduce of integers": lambda _: summed(own(dtype=torch.int64), op=dist.ReduceOp.MAX),
    "all-reduce of 16 bits": lambda _: summed(own(dtype=torch.bfloat16)),
    "all-reduce of complex numbers": lambda _: summed(torch.complex(own(), own(seed=1))),
    "all-reduce in inference mode": lambda _: in_inference_mode(),
    "all-reduce with a gradient": lambda _: with_a_gradient(),
    "all-gather": lambda _: gathered([torch.empty(8) for _ in range(SIZE)]),
    "all-gather into rows": lambda _: gathered(list(torch.empty(SIZE, 8).unbind())),
    "all-gather in place": lambda _: gathered_in_place(),
    "all-gather of objects": lambda _: gathered_objects(),
    "reduce-scatter": lambda _: scattered(torch.empty(4), own((4 * SIZE,))),
    "reduce-scatter of rows": lambda _: scattered(torch.empty(2, 3), own((2 * SIZE, 3))),
    "reduce-scatter of 16 bits": lambda _: scattered(torch.empty(4).bfloat16(), own((4 * SIZE,)).bfloat16()),
    "reduce-scatter in place": lambda _: scattered_in_place(),
    "barrier": lambda _: barrier(),
    "functional all-reduce": lambda _: functional.all_reduce(own(), "sum", dist.group.WORLD) + 0,
    "functional all-gather": lambda _: functional.all_gather_tensor(own((2, 4)), 1, dist.group.WORLD) + 0,
    "functional reduce-scatter": lambda _: functional.reduce_scatter_tensor(own((3, 4)), "sum", 1, dist.group.WORLD) + 0,
    "sharded tensor": of_a_sharded_tensor,
}
ANEW: dict[str, Callable[[Any], torch.Tensor]] = {
    "all-reduce without waiting": lambda _: waited(begun),
    "two at once": lambda _: waited(begun, begun),
    "broadcast": lambda _: broadcast(0),
    "broadcast from the other": lambda _: broadcast(1),
    "send and receive": lambda _: exchanged(),
    "all-to-all": lambda _: swapped(),
    "several functional ones": lambda _: torch.cat(
        [one + 0 for one in functional.all_reduce_coalesced([own(), own(seed=1)], "sum", dist.group.WORLD)]
    ),
}
_struck: set[int] = set()  # not the module's own, which is set back before an update runs again


class Caller(Regressor):
    """Calls one form in each update; what it gets is digested."""

    def __init__(self, forms: list[Callable[[Any], torch.Tensor]], *, struck: bool) -> None:
        super().__init__(layers=2)
        self.forms, self.struck = tuple(forms), struck
        self.results: dict[int, str] = {}

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.struck and batch_idx not in _struck and batch_idx % SIZE == dist.get_rank():
            _struck.add(batch_idx)
            assert self.trainer.strategy.runtime.session.communicators.links.cut() > 0
        mesh = self.trainer.strategy.device_mesh
        result = self.forms[batch_idx](mesh[mesh.mesh_dim_names[-1]])
        plain = torch.view_as_real(result) if result.is_complex() else result
        self.results[batch_idx] = hashlib.sha256(plain.float().numpy().tobytes()).hexdigest()
        return super().training_step(batch, batch_idx)


def fit(names: list[str], struck: bool) -> dict[str, Any]:
    """Train one update for each of these forms."""
    pl.seed_everything(11, workers=True, verbose=False)
    strategy = ResilientHSDPStrategy(
        wrap={Block}, replicate=1, shard=SIZE, goodput=False, collective_timeout=30.0, repair_budget=60.0
    )
    trainer = pl.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, max_steps=len(names), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=-1,
    )  # fmt: skip
    forms = AGAIN | ANEW
    trained = Caller([forms[name] for name in names], struck=struck)
    trainer.fit(trained)
    return {
        "digest": state_digest(trained, trainer.optimizers),
        "results": [trained.results[index] for index in range(len(names))],
        "actions": [incident.action for incident in strategy.incidents],
    }
