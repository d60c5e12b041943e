"""``accelpact_hsdp``: Lightning's FSDP2 strategy, hybrid-sharded, that repairs communication faults from memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from lightning_accelpact import loop
from lightning_accelpact.callback import GoodputCallback
from lightning_accelpact.goodput.ledger import TimeClass
from lightning_accelpact.hsdp import STEP_METHODS, ResilientHSDP, checked_manual
from lightning_accelpact.metric_sync import MetricSync
from lightning_accelpact.participants import modules_with_attributes, of_modules, owner_of
from lightning_accelpact.position import Position, choose_checkpoint, obstacle
from lightning_accelpact.recovery import fsdp2
from lightning_accelpact.recovery.action import Phase
from lightning_accelpact.recovery.fault import FaultPlan
from lightning_accelpact.recovery.options import RecoveryOptions
from lightning_accelpact.recovery.update import UpdateRunner
from lightning_accelpact.recovery.window import Parameters, Window
from lightning_accelpact.restart import Restart, checked_resume, read_position

T = TypeVar("T")


class ResilientTraining(ResilientHSDP):
    """What the Trainer's strategies have in common; goes in front of one of Lightning's FSDP strategies."""

    def _prepare_training(
        self, *, manual_optimization: str, goodput: bool | GoodputCallback, resume: str = "never", **options: Any
    ) -> None:
        """Take the options in; starts nothing."""
        self._prepare(resume_with="ckpt_path", framework="lightning.pytorch", **options)
        self._manual = checked_manual(manual_optimization)
        self._resume = checked_resume(resume)
        self._restart: Restart | None = None
        self._position: Position | None = None
        self._goodput = GoodputCallback() if goodput is True else goodput
        self._update: UpdateRunner | None = None
        self._evaluation: Window | None = None
        self._tracked: list[Any] = []
        self._tracked_modules = torch.nn.ModuleList()

    def track(self, *objects: Any) -> None:
        """Set these back, too, when an update or an evaluation step runs again; the module's own attributes are anyway.

        Args:
            objects: Objects of other classes (their attributes: numbers, texts, tensors, generators, and lists, sets and
                dictionaries of them), random generators, or modules that are no part of the trained one (their
                parameters, which are copied for every micro-batch, buffers, metrics and attributes). To be given before
                the updates that change them.
        """
        for one in objects:
            if isinstance(one, torch.nn.Module):
                self._tracked_modules.append(one)
                self._tracked += modules_with_attributes(one)
            else:
                self._tracked.append(owner_of(one))

    def _include_tracked(self, window: Window) -> None:
        modules = self._tracked_modules
        for participant in (Parameters(modules), *of_modules(modules, self._tracked)):
            window.include(participant)

    # -- set-up

    def setup_environment(self) -> None:
        """Check the options against the world, then make control plane, communicators and device mesh."""
        self.set_world_ranks()
        trainer = self.lightning_module.trainer
        if trainer.state.fn == TrainerFn.FITTING:
            loop.require_shards_to_be_averaged(trainer)
        # A manual step that cannot be run again allows no REDO
        self._start(redo=self.lightning_module.automatic_optimization or self._manual == "update")
        self.runtime.protect(self.model)  # a fault may strike before the model is sharded
        self.lightning_module._device_mesh = self._device_mesh
        self._add_callback(trainer)
        self._restart = self._make_restart(trainer)

    def _add_callback(self, trainer: pl.Trainer) -> None:
        present = any(isinstance(callback, GoodputCallback) for callback in trainer.callbacks)
        if self._goodput and not present:
            trainer.callbacks.insert(0, self._goodput)

    def _make_restart(self, trainer: pl.Trainer) -> Restart | None:
        """What lets a later process go on with a fit, if it writes checkpoints that one can go on from."""
        fits = trainer.state.fn == TrainerFn.FITTING and self._writes_folders
        if "://" in str(trainer.default_root_dir):  # no folder that can be locked and renamed in
            return None
        if not fits or self._resume == "never" or not (trainer.checkpoint_callbacks or self._resume == "always"):
            return None
        choose_checkpoint(trainer, self._begin_run)
        return Restart(
            resume=self._resume,
            root=trainer.default_root_dir,
            rank=self.global_rank,
            world_size=self.world_size,
            gather_json=self.gather_json,
            barrier=self.barrier,
        )

    @property
    def _writes_folders(self) -> bool:
        """Whether a checkpoint is a folder that all ranks write to, which is what a restart can go on from."""
        return False

    def _begin_run(self, given: Any) -> Any:
        """The checkpoint that the fit begins with."""
        chosen = self._restart.begin(given)
        if not self._restart.run:
            self._restart = None
            return chosen
        for callback in self.lightning_module.trainer.callbacks:
            if isinstance(callback, GoodputCallback):
                callback.keep_in(self._restart.folder)
        return chosen

    @property
    def reached_before(self) -> int:
        """Updates of the run that earlier attempts at it have applied; 0 if none is known."""
        return self._restart.reached if self._restart else 0

    def setup(self, trainer: pl.Trainer) -> None:
        """Shard the model, unless its ``configure_model`` has, and take charge of its updates."""
        with self._sharded():
            super().setup(trainer)
        self.runtime.protect(self.model)
        self.runtime.align_replicas(self.model)
        self._evaluation = loop.evaluation_window(trainer)
        self._include_tracked(self._evaluation)
        for metric in loop.metrics(self.model):
            if metric.dist_sync_fn is None or isinstance(metric.dist_sync_fn, MetricSync):  # perhaps of an earlier run
                metric.dist_sync_fn = MetricSync(self.operations)
        loop.agree_on_sigterm(trainer, self.machine)
        if trainer.state.fn == TrainerFn.FITTING:
            self._take_charge(trainer)

    @contextmanager
    def _sharded(self) -> Iterator[None]:
        """In which Lightning's own set-up finds the model ready."""
        yield

    def _take_charge(self, trainer: pl.Trainer) -> None:
        loop.require_one_closure_per_step(trainer)
        self._position = Position(trainer)
        self._update = None
        self.runtime.optimizers = lambda: self.optimizers
        weights = self.runtime.subject.wrapper.Weights(self.model)
        if self.lightning_module.automatic_optimization:
            resilient = loop.ResilientOptimization.install(
                trainer, self.machine, self._drop_gradients, self.runtime.replicas.check, weights
            )
            window = resilient.window
        else:
            loop.require_manual_choice(self.lightning_module, self._manual)
            window = loop.manual_window(trainer, weights)
            if self._manual == "update":
                self._update = self.runtime.update_runner(window, self._drop_gradients)
        loop.guard_steps(self.precision_plugin, self._update or self.machine)
        self._include_tracked(window)
        self.runtime.guard_updates(window)

    def _drop_gradients(self) -> None:
        self.runtime.drop_gradients(self.optimizers)
        loop.reset_scaler(self.precision_plugin)

    # -- an update

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """No gradient communication for a micro-batch that is not the update's last."""
        return self.runtime.subject.wrapper.no_gradient_sync(self.model)

    def backward(self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any):
        """Backward pass."""
        (self._update or self.machine).enter(Phase.BACKWARD)
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        self.machine.leave_pass()
        return loss

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Forward, backward, vote and step; the frontier moves when it returns."""
        if self._update is not None and not self._update.active:
            raise loop.outside_run_update()
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._update is None:
            self.machine.stepped()
            if not self.lightning_module.automatic_optimization:
                self.runtime.replicas.check()
        return output

    def run_update(self, update: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Manual optimization: run one update so that it can be run again from memory.

        Needs ``manual_optimization="update"``. What follows a step, such as the other half of an adversarial pair,
        takes a call of its own.

        Args:
            update: Does it: ``zero_grad``, forward and backward passes, and at its end ``step`` of one or more
                optimizers. May be called several times; batches come from outside.
            args: What it is called with, such as the batches. Not run again if it has written to their tensors in place.
            kwargs: Likewise.

        Returns:
            What ``update`` returned.

        Raises:
            UpdateMisuse: if it goes on computing after a step, or leaves gradients for a later update.
        """
        if self._update is None:
            raise loop.no_manual_update()
        return self._update.run(update, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """A training step."""
        if self.lightning_module.automatic_optimization or self._update is not None:
            return super().training_step(*args, **kwargs)
        try:
            return super().training_step(*args, **kwargs)
        except RuntimeError as error:
            self.runtime.stop_on_fault(error, 'inside an update, with manual_optimization="fail_stop"')
            raise

    # -- steps outside an update

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """A validation step; run again from its batch if a fault strikes in it."""
        step = super().validation_step
        return self.runtime.run_step(lambda: step(*args, **kwargs), self._evaluation)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """A test step; run again from its batch if a fault strikes in it."""
        step = super().test_step
        return self.runtime.run_step(lambda: step(*args, **kwargs), self._evaluation)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """A predict step; run again from its batch if a fault strikes in it."""
        step = super().predict_step
        return self.runtime.run_step(lambda: step(*args, **kwargs), self._evaluation)

    # -- collectives outside an update

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A tensor reduced over all ranks, in place."""
        return self._reduced(super().reduce, tensor, group, reduce_op)

    # -- checkpoints and the end

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state for a checkpoint."""
        return self._run_operation(super().lightning_module_state_dict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state for a checkpoint."""
        state = super().optimizer_state
        return self._run_operation(lambda: state(optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, again from the start if a fault strikes in it; remember it for a restart."""
        save = super().save_checkpoint
        with self.ledger.span(TimeClass.CHECKPOINT_SAVE):
            self._run_operation(lambda: self._write(checkpoint, filepath, storage_options, save))
        self.runtime.checkpoint_written(filepath)

    def _write(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any, save: Callable[..., None]
    ) -> None:
        if self._restart is None:
            return save(copy(checkpoint), filepath, storage_options)
        trainer = self.lightning_module.trainer
        self._restart.write(
            Path(self.broadcast(filepath)),
            lambda folder: save(copy(checkpoint), folder, storage_options),
            self._position.capture(),
            update=trainer.global_step,
            obstacle=obstacle(trainer, checkpoint),
        )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint, and this rank's position if there is one."""
        load = super().load_checkpoint
        with self.ledger.span(TimeClass.CHECKPOINT_RESTORE):
            checkpoint = self._run_operation(lambda: load(checkpoint_path, weights_only))
            if self._resume != "never" and self.operations is not None:
                self._take_position(Path(checkpoint_path), checkpoint)
        return checkpoint

    def _take_position(self, path: Path, checkpoint: dict[str, Any]) -> None:
        fits = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        found = read_position(path, rank=self.global_rank, world_size=self.world_size) if fits else None
        if found is None:
            return
        state, update = found
        self._position.resume(state, checkpoint["loops"])
        self.runtime.checkpoint_written(path)
        if self._restart is not None:
            self._restart.went_on_from(path, update)

    def on_train_end(self) -> None:
        """Leave together: a rank that had left already could not take part in the repair of the last update."""
        self.runtime.finish()

    def on_exception(self, exception: BaseException) -> None:
        """An error that is not a communication fault ends the run on every rank, instead of leaving peers waiting."""
        if not isinstance(exception, SIGTERMException):
            self.runtime.stop_peers(exception)
        elif self.machine.leave.agreed:
            self.runtime.finish()
        if self._restart is not None:
            incident = self.incidents[-1].to_dict() if self.incidents else None
            update = self.lightning_module.trainer.global_step
            self._restart.failed(exception, update=update, incident=incident)

    def teardown(self) -> None:
        """Detach from the session; communicators stay for a next run in this process."""
        if self._restart is not None:
            self._restart.completed()
        self.runtime.detach()
        super().teardown()


class ResilientHSDPStrategy(ResilientTraining, ModelParallelStrategy):
    """Hybrid-sharded data parallelism (FSDP2) that survives failed collectives in any phase of an update.

    Weights, optimizer state, random state and data position stay in memory; only the communicators are replaced. No
    checkpoint is read, at most one update is run again, and the final weights are bit-for-bit those of a run without
    the fault.

    Args:
        replicate: Size of a replication group. ``"auto"``: the number of nodes; on one node 2 if that divides.
        shard: Size of a sharding group. ``"auto"``: the rest, which is the devices per node on several nodes.
        wrap: Which modules are sharded as a unit: ``"auto"`` for the model's repeated blocks, or a set of classes.
            A ``configure_model`` that calls ``fully_shard`` itself stays in charge.
        repair_budget: See :class:`~lightning_accelpact.recovery.options.RecoveryOptions`; seconds.
        max_repairs_per_update: See there.
        collective_timeout: See there; seconds.
        rebuild_timeout: See there; seconds.
        control_interface: See there.
        uncommitted: See there.
        digest_every: See there.
        on_divergence: See there.
        envelope: See there.
        manual_optimization: What to do with a module that steps its optimizers itself: ``"refuse"`` it at set-up;
            ``"update"``: it puts every update into :meth:`run_update`, which can run it again; ``"fail_stop"``: train
            it as it is, and fail-stop on a fault inside an update.
        resume: When ``fit`` goes on from a checkpoint of an earlier attempt at the run that it has not been given:
            ``"auto"``: if a supervisor has relaunched the job, or the same command is run again after the run was
            stopped or killed; ``"always"``: from whatever the last run in the root folder has left; ``"never"``.
        goodput: The callback that keeps account, ``True`` for one with its defaults, ``False`` for none.
        faults: Faults to inject, for drills and tests.
        save_distributed_checkpoint: As for Lightning's ``ModelParallelStrategy``.
        process_group_backend: Backend of the training groups; ``None`` for the device's own.

    Raises:
        ValueError: if an option is out of range; nothing has been started then.
    """

    strategy_name = "accelpact_hsdp"

    def __init__(
        self,
        *,
        replicate: int | Literal["auto"] = "auto",
        shard: int | Literal["auto"] = "auto",
        wrap: Literal["auto"] | Collection[type[torch.nn.Module]] = "auto",
        repair_budget: float = RecoveryOptions.repair_budget,
        max_repairs_per_update: int = RecoveryOptions.max_repairs_per_update,
        collective_timeout: float = RecoveryOptions.collective_timeout,
        rebuild_timeout: float = RecoveryOptions.rebuild_timeout,
        heartbeat_deadline: float = RecoveryOptions.heartbeat_deadline,
        control_interface: str | None = None,
        uncommitted: Literal["retry", "redo", "restart"] = "retry",
        digest_every: int = RecoveryOptions.digest_every,
        on_divergence: Literal["warn", "stop"] = RecoveryOptions.on_divergence,
        envelope: Literal["auto", "off"] | str | os.PathLike[str] = RecoveryOptions.envelope,
        manual_optimization: Literal["refuse", "update", "fail_stop"] = "refuse",
        resume: Literal["auto", "always", "never"] = "auto",
        goodput: bool | GoodputCallback = True,
        faults: FaultPlan | None = None,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
    ) -> None:
        options = RecoveryOptions(
            repair_budget=repair_budget,
            max_repairs_per_update=max_repairs_per_update,
            collective_timeout=collective_timeout,
            rebuild_timeout=rebuild_timeout,
            heartbeat_deadline=heartbeat_deadline,
            control_interface=control_interface,
            uncommitted=uncommitted,
            digest_every=digest_every,
            on_divergence=on_divergence,
            envelope=envelope,
        )
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=collective_timeout),
        )
        self._prepare_training(
            options=options,
            replicate=replicate,
            shard=shard,
            wrap=wrap,
            faults=faults,
            manual_optimization=manual_optimization,
            resume=resume,
            goodput=goodput,
        )

    @property
    def _writes_folders(self) -> bool:
        return self._save_distributed_checkpoint

    @contextmanager
    def _sharded(self) -> Iterator[None]:
        self._shard(self.model)
        for name in STEP_METHODS:  # Lightning calls these, not forward()
            if is_overridden(name, self.lightning_module):
                fsdp2.register_forward_method(self.model, name)
        with loop.configured_by_strategy(self.lightning_module):
            yield
