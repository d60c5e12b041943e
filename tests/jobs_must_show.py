"""What the ranks of the must-show tests do: whole fits through the Trainer, looked into from a callback."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import jobs
import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_accelpact.recovery import c10d, fsdp2, session
from lightning_accelpact.recovery.digest import state_digest
from lightning_accelpact.recovery.fault import Fault, FaultPlan, FaultPoint
from lightning_accelpact.strategy import ResilientHSDPStrategy

COLLECTIVE_TIMEOUT = 60.0


def strategy_with(*faults: Fault, **options: Any) -> ResilientHSDPStrategy:
    """The strategy with limits that a healthy test never reaches."""
    return ResilientHSDPStrategy(
        **{"faults": FaultPlan(faults), "goodput": False, "collective_timeout": COLLECTIVE_TIMEOUT,
           "repair_budget": 2 * COLLECTIVE_TIMEOUT, **options}
    )  # fmt: skip


def trainer_with(strategy: Any, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """A quiet trainer of all ranks."""
    return pl.Trainer(
        **{"accelerator": "cpu", "devices": int(os.environ.get("WORLD_SIZE", 4)), "strategy": strategy, "max_steps": 3,
           "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "logger": False, "enable_checkpointing": False,
           "enable_progress_bar": False, "enable_model_summary": False, "callbacks": list(callbacks), **options}
    )  # fmt: skip


def regressor(layers: int = 4) -> jobs.Regressor:
    """The model, with the same weights on every rank."""
    pl.seed_everything(11, workers=True, verbose=False)
    return jobs.Regressor(layers=layers, width=16)


# -- the ablation


class NoRebinding(pl.Callback):
    """Switches the paper's rebinding off for all repairs."""

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        machine = trainer.strategy.machine
        machine._policy = dataclasses.replace(machine._policy, rebinding=False)


def without_rebinding(fault: Fault, max_repairs: int) -> None:
    """Ends by an exception. Not with retries, which look a group up by its name."""
    strategy = strategy_with(fault, max_repairs_per_update=max_repairs, uncommitted="redo")
    trainer_with(strategy, NoRebinding()).fit(regressor())


# -- the paper's own behaviour


class Saves(pl.Callback):
    """Writes one checkpoint, after the first update."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 1 and not self.path.exists():
            trainer.save_checkpoint(self.path)


class LastToVote(pl.Callback):
    """The victim of a fault in a vote comes to it when all its peers have cast theirs."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        machine = trainer.strategy.machine
        fire = machine.faults.fire

        def fire_late(point: FaultPoint, **options: Any) -> None:
            if point is FaultPoint.VOTE and machine.progress.frontier == self.fault.update:
                ballot = machine.guard.open(machine.generation)
                while machine._control.store.add(f"{ballot}/count", 0) < trainer.world_size - 1:
                    time.sleep(0.001)
            fire(point, **options)

        if trainer.global_rank == self.fault.rank:
            machine.faults.fire = fire_late


def restart(fault: Fault, checkpoint: Path | None) -> list[dict[str, Any]]:
    """A fault under ``uncommitted="restart"``; the incidents, printed as well if the run fail-stops."""
    strategy = strategy_with(fault, uncommitted="restart")
    callbacks: list[pl.Callback] = [Saves(checkpoint)] if checkpoint else []
    if fault.point is FaultPoint.VOTE:
        callbacks.append(LastToVote(fault))
    try:
        trainer_with(strategy, *callbacks).fit(regressor())
    finally:
        incidents = [incident.to_dict() for incident in strategy.incidents]
        print("INCIDENTS", json.dumps(incidents), flush=True)
    return incidents


# -- the census


def census(fault: Fault, layers: int) -> dict[str, Any]:
    """The incident's count, and what a walk over everything that the trainer reaches finds."""
    look = Census()
    trainer_with(strategy_with(fault), look).fit(regressor(layers))
    (incident,) = trainer_incidents(look)
    return {"incident": incident, **look.found}


def trainer_incidents(look: Census) -> list[dict[str, Any]]:
    """The incidents of the run that it has looked into."""
    return [incident.to_dict() for incident in look.strategy.incidents]


_retired: list[dist.ProcessGroup] = []  # global, so that the walk does not come to them from here


class Census(pl.Callback):
    """Walks over everything once before the fault and once after the repair."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        strategy = self.strategy = trainer.strategy
        roots = [module, trainer, strategy, strategy.device_mesh, *trainer.optimizers]
        if trainer.global_step == 1 and not _retired:
            _retired.extend(c10d.registered_groups().values())
            self.found["before"] = self._count(roots)
        elif trainer.global_step == 2 and "after" not in self.found:
            self.found["after"] = self._count(roots)
            self.found["alive"] = self._alive()

    def _count(self, roots: list[Any]) -> dict[str, int]:
        """How many places name a retired and a current group, and how many objects were walked over."""
        retired, current = set(map(id, _retired)), set(map(id, c10d.registered_groups().values()))
        counts = Counter(walked=0)
        for value in everything_named_from(roots):
            counts["walked"] += 1
            counts["retired"] += id(value) in retired
            counts["current"] += id(value) in current
        return dict(counts)

    @staticmethod
    def _alive() -> int:
        """How many retired groups anything at all in the process keeps alive, once they had the time to end."""
        watched = [weakref.ref(group) for group in _retired]
        _retired.clear()
        deadline = time.monotonic() + 1.5 * COLLECTIVE_TIMEOUT  # a collective that was left behind waits that long
        while any(ref() is not None for ref in watched) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
        return sum(ref() is not None for ref in watched)


_CLOSED = (type, ModuleType, FrameType, CodeType, BuiltinFunctionType, str, bytes, int, float)


def everything_named_from(roots: Iterable[Any]) -> Iterator[Any]:
    """The target of every reference in the graph of objects below the roots: an object once per reference to it.

    Modules, classes and the global names of functions are left out: through them everything in the process is reached.
    """
    seen: dict[int, Any] = {}
    queue = list(roots)
    while queue:
        value = queue.pop()
        if id(value) in seen or isinstance(value, _CLOSED):
            continue
        seen[id(value)] = value  # kept, so that no other object gets its id
        named = _named_by(value)
        yield from named
        queue.extend(named)


def _named_by(value: Any) -> list[Any]:
    if isinstance(value, FunctionType):
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
    return gc.get_referents(value)


# -- bad input


def _fit(strategy: Any, **options: Any) -> None:
    # Lightning takes the world's size out of the environment when a run has failed
    trainer_with(strategy, **{"devices": 4, **options}).fit(regressor())


BAD_INPUT: dict[str, Callable[[], Any]] = {
    "sizes that do not multiply": lambda: _fit(strategy_with(replicate=3, shard=2)),
    "one process only": lambda: _fit(strategy_with(), devices=1),
    "unknown option": lambda: _fit(strategy_with(replicas=2)),
    "collectives longer than the budget": lambda: _fit(strategy_with(collective_timeout=200.0)),
    "rebuilds longer than collectives": lambda: _fit(strategy_with(rebuild_timeout=COLLECTIVE_TIMEOUT)),
    "unknown interface": lambda: _fit(strategy_with(control_interface="nowhere0")),
    "victim that does not exist": lambda: _fit(strategy_with(Fault.parse("backward@1:7"))),
    "what to wrap": lambda: _fit(strategy_with(wrap="blocks")),
    "what to do": lambda: _fit(strategy_with(uncommitted="maybe")),
}
if not torch.cuda.is_available():
    BAD_INPUT["CUDA that is absent"] = lambda: _fit(strategy_with(), accelerator="cuda")
    BAD_INPUT["NCCL without CUDA"] = lambda: _fit(strategy_with(process_group_backend="nccl"))


def refusals() -> dict[str, tuple[str, str, bool]]:
    """For each bad input: the error's type and message, and whether a control store or a process group had been made."""
    found = {}
    for name, attempt in BAD_INPUT.items():
        try:
            attempt()
        except Exception as error:  # whatever it is, the test looks at it
            found[name] = (type(error).__name__, str(error), _has_started())
        else:
            found[name] = ("", "was taken", _has_started())
    return found


def _has_started() -> bool:
    return dist.is_initialized() or session._current is not None


# -- a bug of the user's own


class Buggy(jobs.Regressor):
    """Fails on one rank at one place of the second update."""

    def __init__(self, place: str, rank: int) -> None:
        super().__init__(layers=2, width=16)
        self.place = place
        self.victim = rank

    def fail_at(self, place: str) -> None:
        if place == self.place and int(os.environ["RANK"]) == self.victim:
            raise ValueError("a bug of my own")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2:
            self.fail_at("training_step")
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        if self.trainer.global_step == 1:
            self.fail_at("on_after_backward")

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 1:
            self.fail_at("on_train_batch_end")

    def on_train_end(self) -> None:
        self.fail_at("on_train_end")

    def configure_optimizers(self) -> Any:
        self.fail_at("configure_optimizers")
        return super().configure_optimizers()

    def setup(self, stage: str) -> None:
        self.fail_at("setup")


def users_bug(place: str, rank: int) -> None:
    """Ends by the bug on one rank and by a fail-stop on the others."""
    trainer_with(strategy_with()).fit(Buggy(place, rank))


class LosesALinkAfterItsStep(jobs.Regressor):
    """On one rank, what follows the optimizer's step in ``optimizer_step`` fails as a lost connection would."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.trainer.global_rank == 3 and self.trainer.global_step == 2:
            raise RuntimeError("Connection closed by peer [127.0.0.1]:4711")


def fault_after_a_step() -> None:
    """Ends by a fail-stop on every rank."""
    trainer_with(strategy_with()).fit(LosesALinkAfterItsStep())


# -- models that are set up in other ways


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 8)
        self.blocks = nn.ModuleList(jobs.Block(8) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class BuildsOnly(pl.LightningModule):
    """Makes its layers in ``configure_model`` and leaves the sharding to the strategy."""

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    training_step = jobs.Regressor.training_step
    train_dataloader = jobs.Regressor.train_dataloader
    configure_optimizers = jobs.Regressor.configure_optimizers


class Shards(BuildsOnly):
    """Shards two of its parts by itself, differently from what the wrap policy would do."""

    def configure_model(self) -> None:
        super().configure_model()
        fully_shard(self.net.blocks[0], mesh=self.device_mesh)
        fully_shard(self.net, mesh=self.device_mesh)


MODELS: dict[str, Callable[[], pl.LightningModule]] = {
    "blocks": lambda: jobs.Regressor(layers=3, width=8),
    "configure_model builds": BuildsOnly,
    "configure_model shards": Shards,
}


class SetUp(pl.Callback):
    """What is wrapped, and the weights that training starts from."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        wrapped = fsdp2.wrapped_modules(module)
        self.wrapped = sorted(name for name, part in module.named_modules() if any(part is one for one in wrapped))
        self.start = state_digest(module, [])


def set_up(model: str, *faults: Fault) -> dict[str, Any]:
    """Fit a model whose weights every rank initializes from a seed of its own."""
    pl.seed_everything(100 + int(os.environ["RANK"]), verbose=False)
    look = SetUp()
    module = MODELS[model]()
    trainer = trainer_with(strategy_with(*faults), look)
    torch.manual_seed(int(os.environ["RANK"]))
    trainer.fit(module)
    weights = torch.cat([parameter.to_local().detach().flatten() for parameter in module.parameters()])
    return {
        "wrapped": look.wrapped,
        "start": look.start,
        "weights": hashlib.sha256(weights.numpy()).hexdigest(),  # buffers follow each rank's own data
        "end": state_digest(module, trainer.optimizers),
        "incidents": len(trainer.strategy.incidents),
    }


# -- accumulation and data


class Counts(pl.Callback):
    """How many collectives of each kind each micro-batch has issued."""

    NAMES = ("reduce_scatter_single", "all_reduce", "all_gather_single")

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.by_micro_batch: list[dict[str, int]] = []

    def on_train_start(self, *_: Any) -> None:
        for name in self.NAMES:
            setattr(dist, name, self._counting(name, getattr(dist, name)))

    def _counting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return original(*args, **kwargs)

        return count

    def on_train_batch_start(self, *_: Any) -> None:
        self.calls.clear()

    def on_train_batch_end(self, *_: Any) -> None:
        self.by_micro_batch.append(dict(self.calls))


def collectives(accumulate: int, *faults: Fault) -> list[dict[str, int]]:
    """The calls of each micro-batch of two updates; without clipping, which reduces a norm."""
    counts = Counts()
    options = {"accumulate_grad_batches": accumulate, "max_steps": 2, "gradient_clip_val": None}
    trainer_with(strategy_with(*faults), counts, **options).fit(regressor(3))
    return counts.by_micro_batch


class Numbered(jobs.Samples):
    """Samples that know their own number."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return *super().__getitem__(index), index


class Remembers(jobs.Regressor):
    """Keeps the numbers of the samples that it has seen in finished micro-batches."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Numbered(64), batch_size=4, shuffle=True)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch[:2], batch_idx)


class Seen(pl.Callback):
    def __init__(self) -> None:
        self.numbers: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.numbers += batch[2].tolist()


def data(*faults: Fault) -> list[int]:
    """The numbers of all samples of one epoch on this rank."""
    seen = Seen()
    pl.seed_everything(5, verbose=False)
    options = {"max_steps": -1, "max_epochs": 1}
    trainer_with(strategy_with(*faults), seen, **options).fit(Remembers(layers=2, width=8))
    return seen.numbers


# -- precision


class Dtypes(pl.Callback):
    """The type that forward passes compute in, and the scaler's scale after each micro-batch."""

    def __init__(self) -> None:
        self.dtypes: set[str] = set()
        self.scales: list[float] = []

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        module.head.register_forward_hook(lambda part, args, output: self.dtypes.add(str(output.dtype)))

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.scales += [scaler.get_scale()] if scaler is not None else []


def precision(name: str, *faults: Fault) -> dict[str, Any]:
    """Fit in a precision, and describe where it ended."""
    look = Dtypes()
    module = regressor()
    options = _scaled() if "scaler" in name else {"precision": name}
    trainer = trainer_with(strategy_with(*faults), look, max_steps=6, **options)
    trainer.fit(module)
    return {
        "digest": state_digest(module, trainer.optimizers),
        "dtypes": sorted(look.dtypes),
        "scales": look.scales,
        "incidents": [incident.to_dict() for incident in trainer.strategy.incidents],
    }


def _scaled() -> dict[str, Any]:
    """A gradient scaler that begins too high and grows after every second good step; it does not go with clipping."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=2)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)], "gradient_clip_val": None}
