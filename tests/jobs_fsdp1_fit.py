"""What the ranks of the tests of FSDP1 under the Trainer do."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import jobs_must_show
import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import wrap
from torch.utils.data import DataLoader

from lightning_accelpact.fsdp1_strategy import ResilientFSDP1Strategy
from lightning_accelpact.recovery import machine
from lightning_accelpact.recovery.digest import state_digest
from lightning_accelpact.recovery.fault import Fault, FaultPlan, FaultPoint
from lightning_accelpact.recovery.options import HsdpShape
from lightning_accelpact.recovery.rebind import rebind


def strategy_with(*faults: Fault, **options: Any) -> ResilientFSDP1Strategy:
    """The strategy with limits that a healthy test never reaches."""
    return ResilientFSDP1Strategy(
        **{"faults": FaultPlan(faults), "goodput": False, "collective_timeout": 30.0, "repair_budget": 60.0, **options}
    )


class Digests(pl.Callback):
    """What this rank holds after each update."""

    def __init__(self) -> None:
        self.digests: list[str] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step > len(self.digests):
            self.digests.append(state_digest(module, trainer.optimizers))


def fit(options: dict[str, Any]) -> dict[str, Any]:
    """The fit of the fault matrix with FSDP1, and the state after each update."""
    look = Digests()
    trainer_options = {"callbacks": [look], "precision": options.pop("precision", None)}
    result = jobs.fit(strategy_class=ResilientFSDP1Strategy, trainer_options=trainer_options, **options)
    return {**result, "digests": look.digests}


# -- references


class References(jobs_must_show.Census):
    """The census, and how many of each kind the repair has redirected."""

    def on_fit_start(self, *_: Any) -> None:
        def counting(found: list[Any], retired: list[Any], replacements: Any) -> Any:
            old = set(map(id, retired))
            self.found["redirected"] = Counter(one.key for one in found if id(one.group) in old)
            return rebind(found, retired, replacements)

        machine.rebind = counting


def census(fault: Fault, layers: int) -> dict[str, Any]:
    """What the repair has redirected, and what a walk over everything that the trainer reaches finds."""
    look = References()
    jobs_must_show.trainer_with(strategy_with(fault), look).fit(jobs_must_show.regressor(layers))
    (incident,) = jobs_must_show.trainer_incidents(look)
    return {"incident": incident, **look.found}


class Passes(pl.Callback):
    """Prints each backward pass that ends, and leaves the replication group's references as they are."""

    def on_fit_start(self, *_: Any) -> None:
        def without_replication(found: list[Any], retired: list[Any], replacements: Any) -> Any:
            return rebind([one for one in found if one.key != "_inter_node_pg"], retired, replacements)

        machine.rebind = without_replication

    def on_after_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        progress = trainer.strategy.machine.progress
        print(f"BACKWARD {progress.frontier}.{progress.micro_batch}", flush=True)


def without_rebinding(fault: Fault) -> None:
    """The paper's ablation: everything is made again and proven, but the units keep their replication group."""
    # Not with retries, which look a group up by its name
    strategy = strategy_with(fault, uncommitted="redo", max_repairs_per_update=2)
    trainer = jobs_must_show.trainer_with(strategy, Passes(), accumulate_grad_batches=8, max_steps=3)
    trainer.fit(jobs_must_show.regressor())


# -- outside an update


class Evaluated(jobs.Regressor):
    """With a validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("error", nn.functional.l1_loss(self(batch[0]), batch[1]), sync_dist=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(jobs.Samples(16), batch_size=4)


class Strikes(pl.Callback):
    """Writes a checkpoint after the second update, and cuts connections right before that and in a validation."""

    def __init__(self, path: Path, *, active: bool) -> None:
        self._path = path
        self._active = active and int(os.environ["RANK"]) == 3

    def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._strike(trainer, "validation")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2 and not self._path.exists():
            self._strike(trainer, "checkpoint")
            trainer.save_checkpoint(self._path)

    def _strike(self, trainer: pl.Trainer, place: str) -> None:
        if self._active and trainer.global_step == 2:
            trainer.strategy.machine.faults.strike(Fault(point=FaultPoint.BOUNDARY, update=2, group="shard"))


def evaluate_and_save(folder: Path, state_dict_type: str, active: bool) -> dict[str, Any]:
    """Train with validations and a checkpoint, and go on from that in a second run."""
    path = folder / f"{state_dict_type}-{active}"
    runs = []
    for start in (None, path):
        pl.seed_everything(11, workers=True, verbose=False)
        module = Evaluated(layers=2)
        strategy = strategy_with(state_dict_type=state_dict_type)
        callbacks = [Strikes(path, active=active)] if start is None else []
        trainer = jobs_must_show.trainer_with(
            strategy, *callbacks, accumulate_grad_batches=1, max_steps=4, val_check_interval=2, num_sanity_val_steps=0
        )
        trainer.fit(module, ckpt_path=start)
        runs.append({
            "digest": state_digest(module, trainer.optimizers), "updates": trainer.global_step,
            "error": trainer.callback_metrics["error"].item(),
            "incidents": [incident.to_dict() for incident in strategy.incidents],
        })  # fmt: skip
    return {"first": runs[0], "second": runs[1]}


class Cuts(pl.Callback):
    """Cuts this rank's connections in a validation after the fit."""

    def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.state.fn == "validate" and trainer.global_rank == 3:
            trainer.strategy.machine.faults.strike(Fault(point=FaultPoint.BOUNDARY, update=0))


def fit_and_evaluate() -> dict[str, Any]:
    """Fit, validate once more with the same trainer, and then try another one with the same module."""
    pl.seed_everything(11, workers=True, verbose=False)
    module = Evaluated(layers=2)
    options = {"max_steps": 2, "val_check_interval": 4, "limit_val_batches": 1}
    trainer = jobs_must_show.trainer_with(strategy_with(), Cuts(), **options)
    trainer.fit(module)
    facts = {"fitted": trainer.callback_metrics["error"].item(), "digest": state_digest(module, [])}
    trainer.validate(module, verbose=False)
    facts |= {
        "validated": trainer.callback_metrics["error"].item(),
        "digest_after": state_digest(module, []),
        "incidents": [incident.to_dict() for incident in trainer.strategy.incidents],
    }
    try:
        jobs_must_show.trainer_with(strategy_with()).validate(module, verbose=False)
    except MisconfigurationException as error:
        facts["refused"] = str(error)
    return facts


# -- models of the user's own wrapping


class SelfWrapped(jobs.Regressor):
    """Wraps its blocks itself, and leaves the rest."""

    def configure_model(self) -> None:
        self.blocks = nn.ModuleList(wrap(block) for block in self.blocks)


class WrappedOtherwise(jobs.Regressor):
    """Wraps its blocks in a way that repairs were not proven with."""

    def configure_model(self) -> None:
        options = {"device_id": torch.device("cpu"), "use_orig_params": True}
        self.blocks = nn.ModuleList(FullyShardedDataParallel(block, **options) for block in self.blocks)


class Manual(jobs.Regressor):
    """Steps its optimizers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def fit_self_wrapped(fault: Fault | None) -> dict[str, Any]:
    """Train the module that wraps its blocks itself, while replicas compare their shards and account is kept."""
    pl.seed_everything(11, workers=True, verbose=False)
    module = SelfWrapped()
    strategy = strategy_with(*([fault] if fault else []), digest_every=1, goodput=True)
    trainer = jobs_must_show.trainer_with(strategy)
    trainer.fit(module)
    return {
        "digest": state_digest(module, trainer.optimizers),
        "incidents": [incident.to_dict() for incident in strategy.incidents],
        "units": sum(isinstance(part, FullyShardedDataParallel) for part in strategy.model.modules()),
        "divergences": len(strategy.divergences),
    }


BARE = {"gradient_clip_val": None, "accumulate_grad_batches": 1}  # else Lightning refuses manual optimization itself


def refusals() -> dict[str, str]:
    """What is said before anything has been started, and while a model is wrapped: in one process, as it never trains."""
    os.environ["WORLD_SIZE"] = "2"
    said = {
        "manual": _refusal(lambda: jobs_must_show.trainer_with(strategy_with(), **BARE).fit(Manual())),
        "shard": _refusal(lambda: jobs_must_show.trainer_with(strategy_with(shard=1), **BARE).fit(jobs.Regressor())),
    }
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    strategy = strategy_with()
    strategy.parallel_devices, strategy.cluster_environment = [torch.device("cpu")], LightningEnvironment()
    strategy.runtime.mesh = init_device_mesh("cpu", (1, 1))
    strategy.runtime.shape = HsdpShape(replicate=1, shard=1)
    module = WrappedOtherwise()
    module.configure_model()
    return {**said, "wrapped": _refusal(lambda: strategy._wrap_all(module))}


def _refusal(attempt: Callable[[], Any]) -> str:
    os.environ["WORLD_SIZE"] = "2"  # Lightning takes it out when a run has failed
    try:
        attempt()
    except (ValueError, MisconfigurationException) as error:
        return str(error)
    return "nothing"
