"""A fit that uses as much of Lightning at once as fits together, with faults outside its updates."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import loaders
import torch
from described import checkpoints, numbers, plain, rows
from jobs import Block, Samples
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.utils.data import DataLoader, Subset
from torchmetrics import CatMetric, MeanMetric, MeanSquaredError, MetricCollection, R2Score

from lightning_accelpact.callback import GoodputCallback
from lightning_accelpact.goodput.metric import GoodputMetric
from lightning_accelpact.metric_sync import MetricSync
from lightning_accelpact.recovery.digest import state_digest
from lightning_accelpact.recovery.fault import Fault, FaultKind, FaultPlan, FaultPoint
from lightning_accelpact.strategy import ResilientHSDPStrategy


class Everything(pl.LightningModule):
    """torchmetrics of several kinds, logging of every kind, outputs kept by hand, three LR schedulers."""

    def __init__(
        self, *, data: str = "shuffled", workers: int = 0, persistent: bool = False, compiled: str | None = None
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 32)
        self.blocks = nn.ModuleList(Block(32) for _ in range(4))
        self.head = nn.Linear(32, 4)
        self.train_metrics = MetricCollection([MeanSquaredError(), R2Score()], prefix="train_")
        self.train_mean = MeanMetric()
        self.all_losses = CatMetric()  # its state is a list
        self.val_metrics = nn.ModuleList([MeanSquaredError(), MeanSquaredError()])
        self.outputs: list[torch.Tensor] = []
        self.val_outputs: dict[int, list[torch.Tensor]] = {0: [], 1: []}
        self.history: list[float] = []
        self.steps_seen = 0
        self.data = data
        self.workers = {"num_workers": workers, "persistent_workers": persistent}
        self.loader: Any = None
        for part in {None: [], "blocks": self.blocks, "whole": [self]}[compiled]:
            part.compile(backend="aot_eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        inputs, targets = loaders.joined(batch)
        predicted = self(inputs)
        loss = nn.functional.mse_loss(predicted, targets)
        self.train_metrics.update(predicted, targets)
        self.train_mean(loss.detach())
        self.all_losses.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        self.log("alone", loss.detach() + self.global_rank, on_step=True, on_epoch=True)
        self.log("noise", torch.rand(()), on_epoch=True, on_step=False, sync_dist=True, reduce_fx="max")
        self.log_dict(self.train_metrics, on_step=False, on_epoch=True)
        self.log("train_mean", self.train_mean, on_step=True, on_epoch=True)
        self.outputs.append(loss.detach())
        self.steps_seen += 1
        return {"loss": loss, "seen": torch.tensor(self.steps_seen)}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("seen", outputs["seen"].float(), on_step=True, on_epoch=True)
        self.history.append(outputs["loss"].item())

    def on_train_epoch_end(self) -> None:
        gathered = self.all_gather(torch.stack(self.outputs))
        self.log("outputs", gathered.mean(), rank_zero_only=False)
        self.history += [gathered.sum().item(), self.all_losses.compute().sum().item(), float(len(self.outputs))]
        self.outputs.clear()
        self.all_losses.reset()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        inputs, targets = batch
        predicted = self.forward(inputs) + torch.rand(()) * 1e-3  # generators matter here as well
        metric = self.val_metrics[dataloader_idx]
        metric.update(predicted, targets)
        loss = nn.functional.mse_loss(predicted, targets)
        self.log("val_mse", metric)
        self.log("val_loss", loss, sync_dist=True, prog_bar=True, on_step=True, on_epoch=True)
        self.val_outputs[dataloader_idx].append(loss)
        return loss

    def on_validation_epoch_end(self) -> None:
        means = [torch.stack(losses).mean() for losses in self.val_outputs.values()]
        self.log("val_total", torch.stack(means).mean(), sync_dist=True)
        self.history += [float(len(losses)) for losses in self.val_outputs.values()]
        self.val_outputs = {0: [], 1: []}

    def configure_optimizers(self) -> tuple[list[Any], list[Any]]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        rates = torch.optim.lr_scheduler
        plateau = rates.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1.0)
        return [optimizer], [
            {"scheduler": rates.StepLR(optimizer, 2, 0.9), "interval": "step", "name": "by_step"},
            {"scheduler": rates.ExponentialLR(optimizer, 0.95), "interval": "epoch", "name": "by_epoch"},
            {"scheduler": plateau, "interval": "epoch", "monitor": "val_total", "name": "plateau"},
        ]

    def train_dataloader(self) -> Any:
        self.loader = loaders.make(self.data, **self.workers)
        return self.loader

    def val_dataloader(self) -> list[DataLoader]:
        return [DataLoader(Subset(Samples(), range(size)), batch_size=4, **self.workers) for size in (32, 16)]


class Witness(pl.Callback):
    """Writes down every hook that is called, in order, and what can be seen after every batch."""

    def __init__(self) -> None:
        self.hooks: list[str] = []
        self.trace: list[tuple[Any, ...]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.hooks.append("on_train_batch_end")
        rate = trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else None
        self.trace.append((trainer.global_step, rate, numbers(trainer.callback_metrics)))


def _noting(hook: str) -> Callable[..., None]:
    def note(self: Witness, *_: Any, **__: Any) -> None:
        self.hooks.append(hook)

    return note


for _hook in vars(pl.Callback):
    if _hook.startswith(("on_", "setup", "teardown")) and _hook not in vars(Witness):
        setattr(Witness, _hook, _noting(_hook))


class Clockwork(Timer):
    """Stops after five updates, as rank 0 alone finds out."""

    def __init__(self) -> None:
        super().__init__("00:00:00:05")
        self._updates = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._updates = trainer.global_step
        super().on_train_batch_end(trainer, *args, **kwargs)

    def time_elapsed(self, stage: str = "train") -> float:
        return self._updates if os.environ["RANK"] == "0" else 0.0


def averaging(name: str) -> list[pl.Callback]:
    """One of Lightning's own averages of weights."""
    return [pl.callbacks.StochasticWeightAveraging(1e-2) if name[0] == "S" else getattr(pl.callbacks, name)()]


def clockwork() -> list[pl.Callback]:
    """The callbacks of a run that ends by time."""
    return [Clockwork()]


class MovingAverage(pl.Callback):
    """An exponential moving average of this rank's shards."""

    def __init__(self) -> None:
        self.shards: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        shards = [parameter.detach().to_local() for parameter in module.parameters()]
        if not self.shards:
            self.shards = [shard.clone() for shard in shards]
        for average, shard in zip(self.shards, shards, strict=True):
            average.lerp_(shard, 0.1)


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One fault outside an update.

    Args:
        place: Name of the operation it strikes in, as :class:`Striker` names it, or ``any``.
        kind: What happens.
        rank: The victim.
        nth: Which operation of that name, from 0.
        late: Whether the victim has done the operation by then, and only not voted on it.
    """

    place: str
    kind: FaultKind = FaultKind.SOCKETS
    rank: int = 0
    nth: int = 0
    late: bool = False


class Striker(pl.Callback):
    """Gives the operations of a run names, and strikes in those it is told.

    A name is the stage and what is done there, as in ``validating forward``. First among the callbacks.

    Args:
        strikes: All ranks' faults.
    """

    def __init__(self, strikes: list[Strike]) -> None:
        self._strikes = [strike for strike in strikes if strike.rank == int(os.environ["RANK"])]
        self._counts: dict[str, int] = {}
        self._doing = ["?"]
        self._trainer: pl.Trainer | None = None
        self.names: list[str] = []
        self.struck: list[str] = []

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        self._trainer = trainer
        strategy = trainer.strategy
        self._plain_run = strategy.operations.run
        strategy.operations.run = self._run
        names = {
            "save_checkpoint": "save", "load_checkpoint": "load", "on_train_end": "leave", "gather_json": "gather",
            "lightning_module_state_dict": "model state", "optimizer_state": "optimizer state",
            "validation_step": "forward", "test_step": "forward", "predict_step": "forward",
        }  # fmt: skip
        for method, name in names.items():
            setattr(strategy, method, self._named(name, getattr(strategy, method)))
        for callback in trainer.callbacks:
            if isinstance(callback, EarlyStopping):
                callback._run_early_stopping_check = self._named("stopping", callback._run_early_stopping_check)
            if isinstance(callback, Timer):
                callback._check_time_remaining = self._named("timer", callback._check_time_remaining)
        GoodputMetric.measure = self._named("goodput", GoodputMetric.measure)
        MetricSync.__call__ = self._named("metric sync", MetricSync.__call__)
        _DistWrapper.gather_object = self._striking("plan", _DistWrapper.gather_object)
        module.blocks[2].forward = self._striking("block", module.blocks[2].forward)
        for hook in ("on_train_start", "on_train_epoch_end", "on_train_end", "on_fit_end"):
            setattr(self, hook, self._barrier(hook))

    def _named(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def named(*args: Any, **kwargs: Any) -> Any:
            with self._while(name):
                return function(*args, **kwargs)

        return named

    @contextmanager
    def _while(self, name: str) -> Iterator[None]:
        self._doing.append(name)
        try:
            yield
        finally:
            self._doing.pop()

    def _barrier(self, hook: str) -> Callable[..., None]:
        def hooked(trainer: pl.Trainer, module: pl.LightningModule) -> None:
            with self._while(hook):
                trainer.strategy.barrier(hook)

        return hooked

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        between = "between micro-batches" if trainer.fit_loop._should_accumulate() else "between updates"
        with self._while(between):
            trainer.strategy.barrier(between)

    def _striking(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Strikes not at an operation's begin or end but in its middle; not in updates, which have their own faults."""

        @torch.compiler.disable
        def strike_in_the_middle(name: str) -> None:
            if not self._trainer.strategy.machine.inside_update:
                self._strike_at(f"{self._stage} {name}", late=False)

        def striking(*args: Any, **kwargs: Any) -> Any:
            strike_in_the_middle(name)
            return function(*args, **kwargs)

        return striking

    @property
    def _stage(self) -> str:
        stage = self._trainer.state.stage
        return stage.value if stage else "no stage"

    def _run(self, operation: Callable[[], Any], **options: Any) -> Any:
        machine = self._trainer.strategy.machine
        if machine.inside_update or self._trainer.strategy.operations.running:
            return self._plain_run(operation, **options)
        name = f"{self._stage} {'goodput' if 'goodput' in self._doing else self._doing[-1]}"
        self.names.append(name)
        first = [True]

        def struck() -> Any:
            if not first:
                return operation()
            first.clear()
            self._strike_at(name, late=False)
            result = operation()
            self._strike_at(name, late=True)
            return result

        return self._plain_run(struck, **options)

    def _strike_at(self, name: str, *, late: bool) -> None:
        key = f"{name}/{late}"
        count = self._counts[key] = self._counts.get(key, -1) + 1
        total = self._counts["any"] = self._counts.get("any", -1) + 1
        for strike in self._strikes:
            here = (strike.place, strike.nth) in ((name, count), ("any", total))
            if here and (strike.late == late or strike.place == "any"):
                self._strikes.remove(strike)
                self.struck.append(key)
                self._trainer.strategy.machine.faults.strike(
                    Fault(point=FaultPoint.BOUNDARY, update=0, rank=strike.rank, kind=strike.kind)
                )
                return


class Cutter(pl.Callback):
    """Cuts connections of this rank: at random times, and once each in set-up, in validation and in a checkpoint.

    Args:
        seed: Decides when, and which group's.
        cuts: How many at random times.
    """

    def __init__(self, seed: int, cuts: int = 2) -> None:
        rank = int(os.environ["RANK"])
        self._random = random.Random(10 * seed + rank)
        self._forced = {place for i, place in enumerate(("setup", "validation", "checkpoint")) if (seed + i) % 4 == rank}
        self._cuts = cuts
        self._over = threading.Event()
        self.done: list[str] = []

    def _cut(self, place: str) -> None:
        group = self._random.choice(["world", "replicate", "shard", None])
        self.done.append(f"{place} {group}")
        self._faults.strike(Fault(point=FaultPoint.BOUNDARY, update=0, group=group))

    def _force(self, place: str) -> None:
        if place in self._forced:
            self._forced.remove(place)
            self._cut(place)

    def setup(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self._faults = trainer.strategy.machine.faults
        threading.Thread(target=self._at_random_times, daemon=True).start()
        self._force("setup")

    def _at_random_times(self) -> None:
        for _ in range(self._cuts):
            if self._over.wait(self._random.uniform(0.2, 2.0)):
                return
            self._cut("random")

    def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self._force("validation")

    def on_save_checkpoint(self, *_: Any) -> None:
        self._force("checkpoint")

    def teardown(self, *_: Any, **__: Any) -> None:
        self._over.set()


def fit(
    strikes: list[Strike] | None = None,
    *,
    faults: list[Fault] | None = None,
    cuts: int | None = None,
    folder: str,
    scheduled_accumulation: dict[int, int] | None = None,
    epochs: int = 2,
    module_options: dict[str, Any] | None = None,
    trainer_options: dict[str, Any] | None = None,
    callbacks: Callable[[], list[pl.Callback]] | None = None,
    resume: str | None = None,
    goodput_every: int = 0,
    **strategy_options: Any,
) -> dict[str, Any]:
    """Train on this rank and describe all that must not depend on faults.

    Args:
        strikes: Faults outside updates.
        faults: Faults inside updates.
        cuts: Seed of a :class:`Cutter`; ``None`` for none.
        folder: For logs and checkpoints, the same on all ranks.
        scheduled_accumulation: For a ``GradientAccumulationScheduler``; ``None`` to accumulate 2 throughout.
        epochs: Number of epochs.
        module_options: Passed to the module.
        trainer_options: Passed to the Trainer.
        callbacks: Makes more callbacks.
        resume: Checkpoint to resume from.
        goodput_every: After how many updates the goodput goes to the logger.
        strategy_options: Passed to the strategy.
    """
    pl.seed_everything(11, workers=True, verbose=False)
    module = Everything(**(module_options or {}))
    goodput = GoodputCallback(print_summary=False, progress_bar_metric=False, log_every_n_updates=goodput_every)
    strategy = ResilientHSDPStrategy(
        **{"faults": FaultPlan(faults or ()), "collective_timeout": 30.0, "repair_budget": 60.0,
           "max_repairs_per_update": 50, "goodput": goodput, **strategy_options}
    )  # fmt: skip
    witness, average, striker = Witness(), MovingAverage(), Striker(strikes or [])
    stopper = EarlyStopping("val_total", patience=20, min_delta=0.0)
    best = ModelCheckpoint(f"{folder}/best", "{epoch}-{step}", monitor="val_total", save_top_k=2, save_last=True)
    every = ModelCheckpoint(f"{folder}/every", "{step}", every_n_train_steps=3, save_top_k=-1)
    cutter = [] if cuts is None else [Cutter(cuts)]
    scheduler = [GradientAccumulationScheduler(scheduled_accumulation)] if scheduled_accumulation else []
    trainer = pl.Trainer(
        **{
            "accelerator": "cpu", "devices": int(os.environ["WORLD_SIZE"]), "strategy": strategy,
            "max_epochs": epochs, "accumulate_grad_batches": 1 if scheduled_accumulation else 2,
            "gradient_clip_val": 0.5, "gradient_clip_algorithm": "norm", "num_sanity_val_steps": 1,
            "val_check_interval": 3 / loaders.BATCHES,  # the first of an epoch comes in the middle of an update
            "log_every_n_steps": 1, "logger": CSVLogger(folder, name="csv", version=0),
            "enable_progress_bar": False, "enable_model_summary": False,
            "callbacks": [striker, witness, average, LearningRateMonitor(), stopper, best, every, *cutter, *scheduler,
                          *(callbacks() if callbacks else [])],
            **(trainer_options or {}),
        }
    )  # fmt: skip
    trainer.fit(module, ckpt_path=resume, weights_only=False)
    metrics_file = Path(folder, "csv", "version_0", "metrics.csv")
    roots = [os.path.realpath(path) for path in (folder, resume and Path(resume).parents[1]) if path]
    return {
        "compared": {
            "digest": state_digest(module, trainer.optimizers),
            "updates": strategy.committed_updates,
            "global_step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "callback_metrics": numbers(trainer.callback_metrics),
            "logged_metrics": numbers(trainer.logged_metrics),
            "progress_bar_metrics": numbers(trainer.progress_bar_metrics),
            "metric_states": {name: plain(metric.metric_state) for name, metric in _metrics(module)},
            "hooks": witness.hooks,
            "trace": witness.trace,
            "average": plain(average.shards),
            "history": module.history,
            "steps_seen": module.steps_seen,
            "schedulers": [plain(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
            "stopper": plain(stopper.state_dict()),
            "best": plain(best.state_dict(), roots),
            "every": plain(every.state_dict(), roots),
            "rng": plain(torch.get_rng_state()),
            "rows": rows(metrics_file) if trainer.is_global_zero else [],
            "given": getattr(module.loader, "given", []),
            "checkpoints": checkpoints(roots) if trainer.is_global_zero else {},
        },
        "operations": striker.names,
        "pending": [str(fault) for fault in strategy.pending_faults],
        "struck": striker.struck + [place for one in cutter for place in one.done],
        "incidents": [incident.to_dict() for incident in strategy.incidents],
    }


def fit_with(options: dict[str, Any]) -> dict[str, Any]:
    """:func:`fit` with its options in one dictionary."""
    return fit(**options)


def _metrics(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, part) for name, part in module.named_modules() if hasattr(part, "metric_state"))
