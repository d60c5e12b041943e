"""``accelpact_hsdp`` for Fabric: FSDP2, hybrid-sharded, for loops of one's own, with faults repaired from memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_accelpact import loop
from lightning_accelpact.goodput import GoodputOptions, TimeClass
from lightning_accelpact.hsdp import STEP_METHODS, ResilientHSDP, checked_manual
from lightning_accelpact.recovery import fsdp2
from lightning_accelpact.recovery.action import Phase
from lightning_accelpact.recovery.fault import FaultPlan
from lightning_accelpact.recovery.options import RecoveryOptions
from lightning_accelpact.recovery.update import UpdateMisuse, UpdateRunner, VotingClosure
from lightning_accelpact.recovery.window import Window
from lightning_accelpact.user_run import UserRun

T = TypeVar("T")


class FabricHSDPStrategy(UserRun, ResilientHSDP, ModelParallelStrategy):
    """Hybrid-sharded data parallelism (FSDP2) for Fabric that survives failed collectives in any phase of an update.

    The same guarantees as :class:`~lightning_accelpact.strategy.ResilientHSDPStrategy` gives under the Trainer. As the
    loop is the user's own, it says what an update is: :meth:`run_update` takes it as a function. :meth:`run` does so
    for a step of an evaluation, and :meth:`finish` says that the run is over.

    Args:
        replicate: Size of a replication group. ``"auto"``: the number of nodes; on one node 2 if that divides.
        shard: Size of a sharding group. ``"auto"``: the rest, which is the devices per node on several nodes.
        wrap: Which modules are sharded as a unit: ``"auto"`` for the model's repeated blocks, or a set of classes.
            A module of which ``fully_shard`` has sharded anything is taken as it is.
        repair_budget: See :class:`~lightning_accelpact.recovery.options.RecoveryOptions`; seconds.
        max_repairs_per_update: See there.
        collective_timeout: See there; seconds.
        rebuild_timeout: See there; seconds.
        control_interface: See there.
        uncommitted: See there.
        digest_every: See there.
        on_divergence: See there.
        envelope: See there.
        manual_optimization: ``"update"``: every backward pass and every optimizer step is in a function given to
            :meth:`run_update`. ``"fail_stop"``: train with a loop as it is, and fail-stop on a fault inside an update.
        goodput: Whether to keep account, or what to do with it; see
            :class:`~lightning_accelpact.goodput.account.GoodputOptions`.
        faults: Faults to inject, for drills and tests.
        save_distributed_checkpoint: As for Fabric's ``ModelParallelStrategy``.
        process_group_backend: Backend of the training groups; ``None`` for the device's own.

    Raises:
        ValueError: if an option is out of range; nothing has been started then.
    """

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
        manual_optimization: Literal["update", "fail_stop"] = "update",
        goodput: bool | GoodputOptions = True,
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
            parallelize_fn=self._parallelize,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=collective_timeout),
        )
        self._prepare(
            options=options,
            replicate=replicate,
            shard=shard,
            wrap=wrap,
            faults=faults,
            resume_with="fabric.load",
            framework="lightning.fabric",
        )
        self._manual = checked_manual(manual_optimization, ("update", "fail_stop"))
        self._backward_sync_control = _GradientSync()
        self._prepare_run(goodput)
        self._optimizers: list[Optimizer] = []
        self._update: UpdateRunner | None = None
        self._window = Window(self._participants(), self._weights)

    # -- set-up

    def setup_environment(self) -> None:
        """Check the options against the world, then make control plane, communicators and device mesh."""
        self._set_world_ranks()
        self._start(redo=self._manual == "update")
        self.runtime.optimizers = lambda: self._optimizers
        self.runtime.protect(self._protected)
        if self._manual == "update":
            self._update = self.runtime.update_runner(self._window, self._drop_gradients)
        self._keep_account(self.global_rank, self.world_size)
        self._open_run(Window(self._participants()))

    def _parallelize(self, module: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
        self._shard(module)
        return module

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Shard a module, unless it is sharded already, and protect it."""
        module = super().setup_module(module)
        self.runtime.align_replicas(module)
        self.track(module)
        module.register_forward_pre_hook(self._before_forward)
        for name in STEP_METHODS:  # a LightningModule's; Fabric calls them without forward()
            if hasattr(module, name):
                fsdp2.register_forward_method(module, name)
        return module

    def setup_module_and_optimizers(
        self, module: torch.nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[torch.nn.Module, list[Optimizer], Any]:
        """Shard a module, and point its optimizers at the sharded parameters."""
        before = dict(module.named_parameters())
        module = self.setup_module(module)
        sharded = {id(before[name]): parameter for name, parameter in module.named_parameters()}
        for optimizer in optimizers:
            _repoint(optimizer, sharded)
        return module, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Take an optimizer in.

        Raises:
            MisconfigurationException: if its steps could not be voted on, or if it was made before its module was
                sharded.
        """
        loop.require_one_closure_call(optimizer)
        known = {id(parameter) for parameter in self._protected.parameters()}
        if not any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"]):
            raise MisconfigurationException(
                f"none of the parameters of {type(optimizer).__name__} belongs to a module that fabric.setup() has"
                " sharded: make it after model = fabric.setup(model), from model.parameters()"
            )
        self._optimizers.append(optimizer)
        return optimizer

    # -- an update

    def run_update(self, update: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run one update so that it can be run again from memory. It begins without gradients.

        What follows a step, such as the other half of an adversarial pair, takes a call of its own. To skip an update,
        let all ranks return without a step. An error that comes out of the function ends the run on every rank.

        Args:
            update: Does it: the forward and backward passes of all micro-batches, clipping, and at its end ``step`` of
                one or more optimizers. May be called several times; batches come from outside.
            args: What it is called with, such as the batches. Not run again if it has written to their tensors in place.
            kwargs: Likewise.

        Returns:
            What ``update`` returned.

        Raises:
            FailStop: if a fault in it could not be repaired.
            UpdateMisuse: if it goes on computing after a step, or leaves gradients for a later update.
        """
        if self._update is None:
            raise UpdateMisuse(_NO_UPDATES if self._manual == "fail_stop" else _NOT_LAUNCHED)
        self._begin_training(between=TimeClass.DATA_LOADING)
        with self.ledger.span(TimeClass.PRODUCTIVE), self._ending_together():
            result = self._update.run(update, *args, **kwargs)
        self._account_for_update()
        return result

    def _begin_training(self, *, between: TimeClass) -> None:
        self._open = True
        self.ledger.switch(between)
        if not self._training:
            self._training = True
            self.runtime.guard_updates(self._window)
            self._account.begin(self.committed_updates)

    def _drop_gradients(self) -> None:
        self.runtime.drop_gradients(self._optimizers)
        self._protected.zero_grad(set_to_none=True)
        loop.reset_scaler(self.precision)

    def _before_forward(self, *_: Any) -> None:
        if self._update is None:
            if torch.is_grad_enabled():
                self._begin_training(between=TimeClass.PRODUCTIVE)  # nothing tells where an update ends
                self.machine.enter(Phase.FORWARD)
        elif self._update.active:
            self._update.enter(Phase.FORWARD)
        elif not self.operations.running:
            rank_zero_warn(
                "the model is called outside of an update and of an evaluation step, where a fault may end the run: call it"
                " in a function given to fabric.strategy.run_update() or fabric.strategy.run()"
            )

    def backward(self, tensor: torch.Tensor, module: torch.nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Backward pass.

        Raises:
            UpdateMisuse: if it is not inside an update, or after a step.
        """
        if self._update is None:
            self._backward_or_stop(tensor, module, *args, **kwargs)
            return
        if not self._update.active:
            raise UpdateMisuse(_OUTSIDE.format(call="fabric.backward()"))
        self._update.enter(Phase.BACKWARD)
        super().backward(tensor, module, *args, **kwargs)
        self.machine.leave_pass()

    def _backward_or_stop(self, *args: Any, **kwargs: Any) -> None:
        self.machine.enter(Phase.BACKWARD)
        try:
            super().backward(*args, **kwargs)
            self.machine.leave_pass()
        except RuntimeError as error:
            self.runtime.stop_on_fault(error, 'inside an update, with manual_optimization="fail_stop"')
            raise

    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Vote and step.

        Raises:
            UpdateMisuse: if it is not inside an update.
        """
        if self._update is None:
            output = self._voted_step(self.machine.vote, optimizer, **kwargs)
            self.machine.stepped()
            self.runtime.replicas.check()
            self._account_for_update()
            return output
        if not self._update.active:
            raise UpdateMisuse(_OUTSIDE.format(call="optimizer.step()"))
        return self._voted_step(self._update.vote, optimizer, **kwargs)

    def _voted_step(
        self, vote: Callable[[], None], optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        step = super().optimizer_step
        if closure is None:
            vote()
            return step(optimizer, **kwargs)
        return step(optimizer, closure=VotingClosure(closure, vote), **kwargs)

    # -- steps and collectives outside an update

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A tensor reduced over all ranks, in place."""
        return self._reduced(super().all_reduce, tensor, group, reduce_op)

    # -- checkpoints and the end

    def save_checkpoint(self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None) -> None:
        """Write a checkpoint, again from the start if a fault strikes in it; remember it for a restart.

        An error in it, such as that of an unknown key, is the script's to catch; one that nobody catches ends the run
        on every rank.
        """
        save = super().save_checkpoint
        with self.ledger.span(TimeClass.CHECKPOINT_SAVE):
            self._run_operation(lambda: save(path, state, storage_options, filter))
        self.runtime.checkpoint_written(path)
        self._account.checkpoint(self.committed_updates)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint into the objects of ``state``; of an error the same holds as when one is written."""
        load = super().load_checkpoint
        with self.ledger.span(TimeClass.CHECKPOINT_RESTORE):
            rest = self._run_operation(lambda: load(path, state, *args, **kwargs))
        self._account.checkpoint(self.committed_updates)
        return rest

    def goodput_metrics(self) -> dict[str, float]:
        """The goodput of all ranks so far, for ``fabric.log_dict``; a collective call, between two updates.

        Returns:
            As of :meth:`~lightning_accelpact.goodput.metric.GoodputMetric.measure`.
        """
        return self._measure_goodput(self.root_device)

    def teardown(self) -> None:
        """Detach from the session; communicators stay for a next run in this process."""
        self.runtime.detach()
        super().teardown()


_OUTSIDE = (
    "{call} was called outside of an update, where it could not be run again: put the update into a function and call"
    ' fabric.strategy.run_update(function), or pass manual_optimization="fail_stop" to stop on a fault instead'
)
_NO_UPDATES = 'run_update() cannot run an update again with manual_optimization="fail_stop": pass "update", the default'
_NOT_LAUNCHED = "run_update() was called before fabric.launch()"


class _GradientSync:
    """Fabric's own leaves gradient sync off after ``no_backward_sync(module, enabled=False)``."""

    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return fsdp2.no_gradient_sync(module, enabled)


def _repoint(optimizer: Optimizer, sharded: dict[int, torch.nn.Parameter]) -> None:
    """Make an optimizer step the parameters that sharding has put in the place of those it was made with."""
    for group in optimizer.param_groups:
        parameters = [sharded.get(id(old), old) for old in group["params"]]
        if optimizer.state and any(new is not old for new, old in zip(parameters, group["params"], strict=True)):
            raise MisconfigurationException(
                f"{type(optimizer).__name__} holds state of a module that was not sharded yet: make it after"
                " model = fabric.setup(model), call fabric.setup_optimizers(optimizer), and load its state then"
            )
        group["params"] = parameters
