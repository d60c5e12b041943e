"""What the ranks of Fabric's tests do: loops of their own, with faults, whose end state is digested."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from jobs import Block, Samples
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_accelpact.fabric import FabricHSDPStrategy
from lightning_accelpact.goodput import GoodputOptions
from lightning_accelpact.recovery.digest import state_digest
from lightning_accelpact.recovery.fault import Fault, FaultPlan

Micro = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    """A few blocks with dropout, BatchNorm, a metric and counters of their own, so that everything captured matters."""

    def __init__(self, layers: int = 4, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 4)
        self.mean = MeanMetric()
        self.calls = 0
        self.outputs: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.outputs.append(x.sum().item())
        x = self.embed(x) + 0.01 * self.calls
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def launched(faults: list[Fault] | None = None, *, precision: str = "32-true", **options: Any) -> Fabric:
    """Fabric on this rank, with short timeouts."""
    strategy = FabricHSDPStrategy(
        **{"faults": FaultPlan(faults or ()), "goodput": False, "collective_timeout": 30.0, "repair_budget": 60.0,
           **options}
    )  # fmt: skip
    fabric = Fabric(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, precision=precision
    )
    fabric.launch()
    fabric.seed_everything(11, verbose=False)
    return fabric


def call(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """One of the jobs below, by its name."""
    return globals()[name](*args, **options)


def windows(fabric: Fabric, accumulate: int) -> Iterator[list[Micro]]:
    """The batches of one update after the other."""
    loader = fabric.setup_dataloaders(DataLoader(Samples(), batch_size=4, shuffle=True))
    batches = iter(loader)
    while len(window := [batch for _, batch in zip(range(accumulate), batches, strict=False)]) == accumulate:
        yield window


def result(fabric: Fabric, modules: list[nn.Module], optimizers: list[Any], **more: Any) -> dict[str, Any]:
    """Where a rank ended."""
    strategy = fabric.strategy
    strategy.finish()
    return {
        "digest": digest(modules, optimizers),
        "updates": strategy.committed_updates,
        "pending": [str(fault) for fault in strategy.pending_faults],
        "incidents": [incident.to_dict() for incident in strategy.incidents],
        **more,
    }


def digest(modules: list[nn.Module], optimizers: list[Any]) -> list[str]:
    """This rank's weights, buffers and optimizer state."""
    parts = zip_longest(modules, optimizers)
    return [state_digest(module.module if module else nn.Module(), [o.optimizer] if o else []) for module, o in parts]


def drop_in(fabric: Fabric, fault: Fault | None) -> None:
    """Let a fault strike here, on its rank; for places outside of an update."""
    if fault is not None and fault.rank == fabric.global_rank:
        fabric.strategy.machine.faults.strike(fault)


@contextmanager
def striking(fabric: Fabric, fault: Fault | None, *, late: bool = False) -> Iterator[None]:
    """A fault strikes in the next operation outside of an update, before its work or after it."""
    operations = fabric.strategy.operations
    plain = operations.run

    def run(operation: Callable[[], Any], **options: Any) -> Any:
        vars(operations).pop("run", None)  # once

        def struck() -> Any:
            nonlocal fault
            now, fault = fault, None
            if not late:
                drop_in(fabric, now)
            value = operation()
            if late:
                drop_in(fabric, now)
            return value

        return plain(struck, **options)

    operations.run = run
    yield
    assert "run" not in vars(operations), "no operation has come"


def backward_all(fabric: Fabric, model: nn.Module, window: list[Micro]) -> torch.Tensor:
    """The forward and backward passes of an update."""
    total = torch.zeros(())
    for index, (inputs, targets) in enumerate(window):
        with fabric.no_backward_sync(model, enabled=index < len(window) - 1):
            loss = nn.functional.mse_loss(model(inputs), targets) / len(window)
            fabric.backward(loss)
        model.mean.update(loss.detach())
        total += loss.detach()
    return total


def train(
    faults: list[Fault] | None = None,
    *,
    updates: int = 5,
    accumulate: int = 2,
    jointly: bool = False,
    closure: bool = False,
    sharded: bool = False,
    compiled: str = "",
    evaluation: Fault | None = None,
    **options: Any,
) -> dict[str, Any]:
    """A loop with accumulation, clipping, an LR schedule, a metric, evaluations and a reduction of the loss.

    Args:
        faults: Strike in the updates.
        updates: How many.
        accumulate: Micro-batches of each.
        jointly: Set module and optimizer up in one call.
        closure: Give the optimizer a closure.
        sharded: Shard the module before Fabric gets it.
        compiled: Compile its ``blocks``, or the ``whole``.
        evaluation: Strikes in the evaluation after its update, between two forward passes.
        options: The strategy's.
    """
    fabric = launched(faults, **options)
    net = compile_parts(shard_by_hand(fabric, Net()) if sharded else Net(), compiled)
    if jointly:
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    else:
        model = fabric.setup(net)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 2, 0.9)
    losses, scores = [], []

    def forward_backward_clip(window: list[Micro]) -> torch.Tensor:
        total = backward_all(fabric, model, window)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        return total

    def update(window: list[Micro]) -> float:
        optimizer.zero_grad()
        if closure:
            return optimizer.step(lambda: forward_backward_clip(window)).item()
        total = forward_backward_clip(window)
        optimizer.step()
        return total.item()

    def evaluate(window: list[Micro], fault: Fault | None) -> float:
        model.eval()
        score = torch.rand(())
        with torch.no_grad():
            for number, (inputs, targets) in enumerate(window):
                drop_in(fabric, fault if number == 1 and pop(struck) else None)
                score += nn.functional.mse_loss(model(inputs), targets)
        model.train()
        return score.item()

    for number, window in zip(range(updates), windows(fabric, accumulate), strict=False):
        losses.append(fabric.strategy.run_update(update, window))
        schedule.step()
        fault = evaluation if evaluation and evaluation.update == number else None
        struck = [True]
        scores.append(fabric.strategy.run(evaluate, window, fault))
        scores.append(fabric.all_reduce(torch.tensor(losses[-1])).item())
    return result(
        fabric, [model], [optimizer], losses=losses, scores=scores, mean=model.mean.compute().item(),
        calls=model.calls, outputs=model.outputs, rate=optimizer.param_groups[0]["lr"],
    )  # fmt: skip


def pop(once: list[bool]) -> bool:
    """True for the first time."""
    return bool(once) and once.pop()


def compile_parts(net: Net, parts: str) -> nn.Module:
    """With a backend that needs no compiler."""
    for block in net.blocks if parts == "blocks" else ():
        block.compile(backend="aot_eager")
    return torch.compile(net, backend="aot_eager") if parts == "whole" else net


def shard_by_hand(fabric: Fabric, net: Net) -> Net:
    """As a user does who wants other units than the policy's."""
    for block in net.blocks[::2]:
        fully_shard(block, mesh=fabric.strategy.device_mesh)
    return fully_shard(net, mesh=fabric.strategy.device_mesh)


def two_optimizers(faults: list[Fault] | None = None, **options: Any) -> dict[str, Any]:
    """Two optimizers for the parts of one module, which step in the same update; the last update is skipped."""
    fabric = launched(faults, **options)
    model = fabric.setup(Net())
    matrices = fabric.setup_optimizers(torch.optim.SGD(model.blocks.parameters(), lr=1e-2, momentum=0.9))
    rest = [*model.embed.parameters(), *model.head.parameters()]
    others = fabric.setup_optimizers(torch.optim.AdamW(rest, lr=1e-2))
    losses = []

    def update(window: list[Micro], *, skip: bool) -> float:
        total = backward_all(fabric, model, window)
        if skip:
            others.zero_grad()
            matrices.zero_grad()
        else:
            matrices.step()
            others.step()
        return total.item()

    for number, window in zip(range(5), windows(fabric, 1), strict=False):
        losses.append(fabric.strategy.run_update(update, window, skip=number == 3))
    return result(fabric, [model], [matrices, others], losses=losses, calls=model.calls)


def adversarial(faults: list[Fault] | None = None, **options: Any) -> dict[str, Any]:
    """Two modules that are set up one after the other, with an update of each for every batch."""
    fabric = launched(faults, **options)
    maker, critic = fabric.setup(Net(layers=3)), fabric.setup(Critic())
    adam = torch.optim.AdamW
    make, judge = (fabric.setup_optimizers(adam(module.parameters(), lr=1e-3)) for module in (maker, critic))

    def update_critic(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        loss = (critic(maker(inputs).detach()) - critic(targets)).mean()
        fabric.backward(loss)
        judge.step()
        return loss.item()

    def update_maker(inputs: torch.Tensor) -> float:
        for parameter in critic.parameters():
            parameter.requires_grad_(False)
        loss = -critic(maker(inputs)).mean()
        fabric.backward(loss)
        for parameter in critic.parameters():
            parameter.requires_grad_(True)
        make.step()
        return loss.item()

    losses = []
    for _, ((inputs, targets),) in zip(range(3), windows(fabric, 1), strict=False):
        losses.append(fabric.strategy.run_update(update_critic, inputs, targets))
        losses.append(fabric.strategy.run_update(update_maker, inputs))
    trains = [parameter.requires_grad for parameter in critic.parameters()]
    return result(fabric, [maker, critic], [make, judge], losses=losses, trains=trains)


class Critic(nn.Module):
    """Judges what a :class:`Net` makes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.blocks(x))


def outside_the_module(faults: list[Fault] | None = None, **options: Any) -> dict[str, Any]:
    """A metric and a plain object that an update changes, tracked; a LightningModule's steps."""
    fabric = launched(faults, **options)
    model = fabric.setup(Stepper())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    metric, counter = MeanMetric(), Counter()
    fabric.strategy.track(metric, counter)

    def update(window: list[Micro]) -> None:
        for number, batch in enumerate(window):
            with fabric.no_backward_sync(model, enabled=number == 0):
                loss = model.training_step(batch, number)
                fabric.backward(loss)
            metric.update(loss.detach())
            counter.seen.append(number)
        optimizer.step()

    for _, window in zip(range(4), windows(fabric, 2), strict=False):
        fabric.strategy.run_update(update, window)
    return result(fabric, [model], [optimizer], mean=metric.compute().item(), seen=counter.seen)


class Stepper(pl.LightningModule):
    """A LightningModule under Fabric."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Micro, batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)


class Counter:
    """Keeps a list."""

    def __init__(self) -> None:
        self.seen: list[int] = []


def checkpointed(
    folder: str, save: Fault | None = None, load: Fault | None = None, *, late: bool = False, one_file: bool = False
) -> dict[str, Any]:
    """Save after two updates, train on, load, and train on again from there.

    Args:
        folder: Where to.
        save: Strikes in the saving.
        load: Strikes in the loading.
        late: Whether they do after the work, instead of before it.
        one_file: Whether a checkpoint is one file instead of one per rank.
    """
    fabric = launched(save_distributed_checkpoint=not one_file)
    model = fabric.setup(Net())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    batches = [window for _, window in zip(range(4), windows(fabric, 1), strict=False)]
    path = Path(folder) / "checkpoint"
    path.parent.mkdir(exist_ok=True)

    def update(window: list[Micro]) -> None:
        backward_all(fabric, model, window)
        optimizer.step()

    def state(**more: Any) -> dict[str, Any]:
        return {"model": model, "optimizer": optimizer, **more}

    for window in batches[:2]:
        fabric.strategy.run_update(update, window)
    with striking(fabric, save, late=late):
        fabric.save(path, state(update=2))
    saved = digest([model], [optimizer])
    rng = torch.get_rng_state()
    for window in batches[2:]:
        fabric.strategy.run_update(update, window)
    ended = digest([model], [optimizer])
    restored = state(update=0)
    with striking(fabric, load, late=late):
        fabric.load(path, restored)
    loaded = digest([model], [optimizer])
    torch.set_rng_state(rng)
    model.calls = 2  # what is no weight and no buffer is the user's to save
    for window in batches[2:]:
        fabric.strategy.run_update(update, window)
    return result(
        fabric, [model], [optimizer], saved=saved, loaded=loaded, ended=ended, update=restored["update"],
        folder=str(path.parent), hint=fabric.strategy.runtime._resume_hint(),
    )  # fmt: skip


def collectives(fault: Fault | None = None, *, late: bool = False) -> dict[str, Any]:
    """Every collective of Fabric's, each with a fault in it, given the groups of before the first repair."""
    fabric = launched(max_repairs_per_update=20)  # all these stand between the same two updates
    rank = float(fabric.global_rank)
    world, shard = dist.group.WORLD, fabric.strategy.device_mesh.get_group("shard")
    calls = {
        "barrier": fabric.barrier,
        "broadcast": lambda: fabric.broadcast({"rank": rank}, src=2),
        "all_reduce": lambda: fabric.all_reduce(torch.tensor(rank), reduce_op="sum").item(),
        "all_reduce in a group": lambda: fabric.all_reduce(torch.tensor(rank), group=shard, reduce_op="sum").item(),
        "all_gather": lambda: fabric.all_gather(torch.tensor(rank), group=world).tolist(),
        "all_gather of several": lambda: fabric.all_gather({"a": torch.tensor(rank), "b": 2.0}, group=shard),
        "all agree": lambda: fabric.strategy.reduce_boolean_decision(rank < 3),
    }
    values: dict[str, Any] = {}
    for name, call in calls.items():
        with striking(fabric, fault, late=late):
            values[name] = repr(call())
    incidents = len(fabric.strategy.incidents)
    fabric.strategy.finish()
    return {"values": values, "incidents": incidents}


# -- misuse


def misuse(kind: str) -> str:
    """What is said about a wrong use of the strategy."""
    fabric = launched()
    net = Net(layers=2)
    stale = torch.optim.AdamW(net.parameters())
    model = fabric.setup(net)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
    inputs = torch.ones(4, 16)

    def backward() -> None:
        fabric.backward(model(inputs).sum())

    def backward_after_step() -> None:
        backward()
        optimizer.step()
        backward()

    def closure_twice() -> None:
        fabric.setup_optimizers(Greedy(model.parameters())).step(lambda: model(inputs).sum())

    uses: dict[str, Callable[[], Any]] = {
        "step outside": optimizer.step,
        "backward outside": backward,
        "no step": lambda: fabric.strategy.run_update(backward),
        "backward after step": lambda: fabric.strategy.run_update(backward_after_step),
        "LBFGS": lambda: fabric.setup_optimizers(torch.optim.LBFGS(model.parameters())),
        "stale optimizer": lambda: fabric.setup_optimizers(stale),
        "used optimizer": lambda: fabric.setup(Net(), used_optimizer()),
        "closure twice": lambda: fabric.strategy.run_update(closure_twice),
        "plain backward": lambda: fabric.strategy.run_update(lambda: model(inputs).sum().backward()),
    }
    try:
        uses[kind]()
    except Exception as error:  # the test looks at it
        return f"{type(error).__name__}: {error}"
    return "nothing was said"


class Greedy(torch.optim.SGD):
    """Calls its closure twice."""

    def step(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            closure()
        return super().step(closure)


def used_optimizer() -> torch.optim.Optimizer:
    """An optimizer of another module that has stepped."""
    other = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(other.parameters())
    other(torch.ones(1)).backward()
    optimizer.step()
    return optimizer


def changes_its_batch(fault: Fault) -> None:
    """An update that writes to its batch and meets a fault cannot run again."""
    fabric = launched([fault])
    model = fabric.setup(Net(layers=2))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))

    def update(inputs: torch.Tensor) -> None:
        inputs.mul_(2)
        fabric.backward(model(inputs).sum())
        optimizer.step()

    for _ in range(3):
        fabric.strategy.run_update(update, torch.ones(4, 16))


def as_it_is(faults: list[Fault] | None = None) -> dict[str, Any]:
    """A loop that knows nothing of updates."""
    fabric = launched(faults, manual_optimization="fail_stop")
    model = fabric.setup(Net())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    for _, window in zip(range(4), windows(fabric, 1), strict=False):
        optimizer.zero_grad()
        backward_all(fabric, model, window)
        optimizer.step()
    return result(fabric, [model], [optimizer], calls=model.calls)


def error_on_one_rank() -> None:
    """An error that is no fault comes out of an update on rank 1."""
    fabric = launched()
    model = fabric.setup(Net(layers=2))

    def update() -> None:
        if fabric.global_rank == 1:
            raise ValueError("out of luck")
        fabric.backward(model(torch.ones(4, 16)).sum())

    fabric.strategy.run_update(update)


def goodput(folder: str, faults: list[Fault]) -> dict[str, Any]:
    """What the account says of a short run."""
    fabric = launched(faults, goodput=GoodputOptions(log_dir=folder, restart_seconds=100.0))
    model = fabric.setup(Net(layers=2))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))

    def update(window: list[Micro]) -> None:
        backward_all(fabric, model, window)
        optimizer.step()

    for number, window in zip(range(4), windows(fabric, 2), strict=False):
        fabric.strategy.run_update(update, window)
        if number == 1:
            fabric.save(Path(folder) / "checkpoint", {"model": model})
    fabric.strategy.run(lambda: model(window[0][0]))
    fabric.strategy.finish()
    fabric.strategy.finish()
    return fabric.strategy.summary.to_dict()
