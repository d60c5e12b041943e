"""``accelpact_hsdp``: Lightning's FSDP2 strategy, hybrid-sharded, that repairs communication faults from memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.optim import Optimizer

from lightning_accelpact import loop
from lightning_accelpact.callback import GoodputCallback
from lightning_accelpact.collective import MetricSync, ResilientCollective
from lightning_accelpact.goodput.ledger import Ledger, TimeClass
from lightning_accelpact.recovery import fsdp2
from lightning_accelpact.recovery.action import Action, Phase
from lightning_accelpact.recovery.control import Endpoint, interface_address
from lightning_accelpact.recovery.fault import Fault, FaultInjector, FaultPlan
from lightning_accelpact.recovery.incident import Incident
from lightning_accelpact.recovery.machine import RepairMachine
from lightning_accelpact.recovery.operation import Operations
from lightning_accelpact.recovery.options import HsdpShape, RecoveryOptions
from lightning_accelpact.recovery.policy import FailStop, RepairPolicy
from lightning_accelpact.recovery.progress import Progress
from lightning_accelpact.recovery.session import Session
from lightning_accelpact.recovery.subject import Fsdp2Subject
from lightning_accelpact.recovery.update import UpdateRunner
from lightning_accelpact.recovery.window import RngState, Window
from lightning_accelpact.wrapping import WrapPolicy, shard

log = logging.getLogger("accelpact")
T = TypeVar("T")

_STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")


class ResilientHSDPStrategy(ModelParallelStrategy):
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
        manual_optimization: What to do with a module that steps its optimizers itself: ``"refuse"`` it at set-up;
            ``"update"``: it puts every update into :meth:`run_update`, which can run it again; ``"fail_stop"``: train
            it as it is, and fail-stop on a fault inside an update.
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
        control_interface: str | None = None,
        uncommitted: Literal["redo", "restart"] = "redo",
        manual_optimization: Literal["refuse", "update", "fail_stop"] = "refuse",
        goodput: bool | GoodputCallback = True,
        faults: FaultPlan | None = None,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
    ) -> None:
        self.options = RecoveryOptions(
            repair_budget=repair_budget,
            max_repairs_per_update=max_repairs_per_update,
            collective_timeout=collective_timeout,
            rebuild_timeout=rebuild_timeout,
            control_interface=control_interface,
            uncommitted=uncommitted,
        )
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=collective_timeout),
        )
        self._sizes = (replicate, shard)
        self._wrap = WrapPolicy(wrap)
        self._manual = _checked_manual(manual_optimization)
        self._update: UpdateRunner | None = None
        self._goodput = GoodputCallback() if goodput is True else goodput
        self._faults = faults or FaultPlan()
        self._session: Session | None = None
        self._subject = Fsdp2Subject()
        self.operations: Operations | None = None
        self.collective: ResilientCollective | None = None
        self._evaluation: Window | None = None
        self._last_checkpoint: tuple[str, int] | None = None
        self.machine: RepairMachine | None = None
        self.ledger = Ledger()

    # -- what others read

    @property
    def incidents(self) -> list[Incident]:
        """This rank's incidents of the current or last run."""
        return self.machine.incidents if self.machine else []

    @property
    def committed_updates(self) -> int:
        """The committed frontier: updates applied in this run."""
        return self.machine.progress.frontier if self.machine else 0

    @property
    def pending_faults(self) -> list[Fault]:
        """This rank's injected faults that have not struck in the current or last run."""
        return self.machine.faults.pending if self.machine else []

    def gather_json(self, message: Any) -> list[Any]:
        """Collect one JSON value per rank on every rank, over the control plane; a collective call."""
        return self.operations.gather_json(message)

    # -- set-up

    def setup_environment(self) -> None:
        """Check the options against the world, then make control plane, communicators and device mesh."""
        self.set_world_ranks()
        shape = self._check_world()
        self.accelerator.setup_device(self.root_device)
        self._session = self._open_session()
        self._start_machine()
        self._setup_distributed()  # finds the default group made
        self._device_mesh = self._session.mesh(self.root_device.type, (shape.replicate, shape.shard))
        self._subject.attach(self.model, self._session.meshes)  # a fault may strike before the model is sharded
        self._data_parallel_size, self._tensor_parallel_size = shape.replicate, shape.shard
        self.lightning_module._device_mesh = self._device_mesh
        self._add_callback(self.lightning_module.trainer)

    def _check_world(self) -> HsdpShape:
        shape = HsdpShape.resolve(*self._sizes, num_nodes=self.num_nodes, devices_per_node=self.num_processes)
        self._faults.validate(self.world_size)
        if self.options.control_interface is not None:
            interface_address(self.options.control_interface)
        if shape.caveat:
            rank_zero_warn(f"accelpact_hsdp: {shape.caveat}")
        return shape

    def _open_session(self) -> Session:
        environment = self.cluster_environment
        return Session.open(
            endpoint=Endpoint.from_environment(
                host=environment.main_address,
                port=environment.main_port,
                rank=self.global_rank,
                interface=self.options.control_interface,
                deadline=self.options.seconds("collective_timeout"),
            ),
            rank=self.global_rank,
            world_size=self.world_size,
            backend=self._get_process_group_backend(),
            collective_timeout=self.options.seconds("collective_timeout"),
            rebuild_timeout=self.options.seconds("rebuild_timeout"),
        )

    def _start_machine(self) -> None:
        session = self._session
        progress = Progress(rank=self.global_rank, run=session.next_run())
        self.machine = RepairMachine(
            control=session.control,
            communicators=session.communicators,
            progress=progress,
            subject=self._subject,
            policy=RepairPolicy(
                repair_budget=self.options.repair_budget,
                max_repairs_per_update=self.options.max_repairs_per_update,
                allowed=self._allowed(),
            ),
            faults=FaultInjector(
                self._faults, progress=progress, cut=session.communicators.links.cut, clock=time.time
            ),
            resume_hint=self._resume_hint,
            span=lambda name: self.ledger.span(TimeClass(name)),
        )
        self.operations = Operations(self.machine)
        self.collective = ResilientCollective(self.operations)
        session.attach(self.machine)

    def _allowed(self) -> tuple[Action, ...]:
        """A manual step that cannot be run again allows no REDO."""
        redo = self.lightning_module.automatic_optimization or self._manual == "update"
        return tuple(action for action in self.options.allowed if redo or action is not Action.REDO)

    def _add_callback(self, trainer: pl.Trainer) -> None:
        present = any(isinstance(callback, GoodputCallback) for callback in trainer.callbacks)
        if self._goodput and not present:
            trainer.callbacks.insert(0, self._goodput)

    def setup(self, trainer: pl.Trainer) -> None:
        """Shard the model, unless its ``configure_model`` has, and take charge of its updates."""
        self._shard_model()
        with loop.configured_by_strategy(self.lightning_module):
            super().setup(trainer)
        self._align_replicas()
        self._subject.attach(self.model, self._session.meshes)
        self._evaluation = loop.evaluation_window(trainer)
        for metric in loop.metrics(self.model):
            metric.dist_sync_fn = metric.dist_sync_fn or MetricSync(self.operations)
        if trainer.state.fn == TrainerFn.FITTING:
            self._take_charge(trainer)

    def _shard_model(self) -> None:
        module = self.model
        if not fsdp2.wrapped_modules(module):
            self._broadcast_weights(module)
            blocks = shard(module, self.device_mesh, self._wrap)
            rank_zero_info(f"accelpact_hsdp: sharded {blocks} blocks and the root over {self._describe_mesh()}")
        for name in _STEP_METHODS:  # Lightning calls these, not forward()
            if is_overridden(name, self.lightning_module):
                register_fsdp_forward_method(module, name)

    def _describe_mesh(self) -> str:
        replicate, shard_size = self.device_mesh.shape
        return f"{replicate} replicas x {shard_size} shards"

    def _broadcast_weights(self, module: torch.nn.Module) -> None:
        """Start all ranks from rank 0's weights: each may have initialized its own."""
        tensors = [tensor.detach() for tensor in (*module.parameters(), *module.buffers()) if not tensor.is_meta]
        self.operations.run(lambda: [dist.broadcast(tensor, src=0) for tensor in tensors])

    def _align_replicas(self) -> None:
        """Start all replicas from the first one's shards: a model built on the meta device initializes on each rank."""
        group = self.device_mesh.get_group("replicate")
        source = dist.get_process_group_ranks(group)[0]
        shards = [parameter.to_local().detach() for parameter in fsdp2.sharded_parameters(self.model)]
        self.operations.run(
            lambda: [dist.broadcast(s, src=source, group=self.device_mesh.get_group("replicate")) for s in shards]
        )

    def _take_charge(self, trainer: pl.Trainer) -> None:
        loop.require_one_closure_per_step(trainer)
        self._last_checkpoint = None
        if self.lightning_module.automatic_optimization:
            resilient = loop.ResilientOptimization.install(trainer, self.machine, self._drop_gradients)
            self._subject.window = resilient.window
        else:
            loop.require_manual_choice(self.lightning_module, self._manual)
            window = self._subject.window = loop.manual_window(trainer)
            self._update = UpdateRunner(self.machine, window, self._drop_gradients)
        loop.guard_steps(self.precision_plugin, self.machine)
        loop.agree_on_sigterm(trainer, self.machine)
        self._subject.inject(self.machine.faults)

    def _drop_gradients(self) -> None:
        fsdp2.drop_unsharded_gradients(self.model)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loop.reset_scaler(self.precision_plugin)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every process reads its own data, also inside a sharding group."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    # -- an update

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """No gradient communication for a micro-batch that is not the update's last."""
        fsdp2.set_gradient_sync(self.model, False)
        try:
            yield
        finally:
            fsdp2.set_gradient_sync(self.model, True)

    def backward(self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any):
        """Backward pass."""
        self.machine.enter(Phase.BACKWARD)
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Forward, backward, vote and step; the frontier moves when it returns."""
        if self._update is not None and self._manual == "update" and not self._update.active:
            raise loop.outside_run_update()
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self.machine.stepped()
        return output

    def run_update(self, update: Callable[[], T]) -> T:
        """Manual optimization: run one update so that it can be run again from memory.

        Needs ``manual_optimization="update"``. With several optimizers, one call for each step.

        Args:
            update: Does it: ``zero_grad``, forward and backward passes, and one ``step`` of one optimizer as its last
                communication. May be called several times; batches come from outside.

        Returns:
            What ``update`` returned.
        """
        return self._update.run(update)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """A training step."""
        if self._update is None or self._manual == "update":
            return super().training_step(*args, **kwargs)
        try:
            return super().training_step(*args, **kwargs)
        except RuntimeError as error:
            if not self.machine.recovers(error):
                raise
            self.machine.stop_all(f'a fault inside an update, with manual_optimization="fail_stop": {error}')

    # -- steps outside an update

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """A validation step; run again from its batch if a fault strikes in it."""
        step = super().validation_step
        return self._evaluate(lambda: step(*args, **kwargs))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """A test step; run again from its batch if a fault strikes in it."""
        step = super().test_step
        return self._evaluate(lambda: step(*args, **kwargs))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """A predict step; run again from its batch if a fault strikes in it."""
        step = super().predict_step
        return self._evaluate(lambda: step(*args, **kwargs))

    def _evaluate(self, step: Callable[[], Any]) -> Any:
        window, rng = self._evaluation, RngState.capture()
        window.open()

        def rewind() -> None:
            window.rewind()
            rng.restore()

        return self.operations.run(step, rewind=rewind)

    # -- collectives outside an update

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if self.operations is not None:
            self.operations.run(lambda: super(ResilientHSDPStrategy, self).barrier(name))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """An object of rank ``src`` on every rank."""
        return self.operations.run(lambda: super(ResilientHSDPStrategy, self).broadcast(obj, src))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A tensor reduced over all ranks, in place."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        reduce = super().reduce
        return self.operations.run_in_place(tensor, lambda: reduce(tensor, group, reduce_op))

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """The tensors of all ranks, stacked."""
        return self.operations.run(lambda: super(ResilientHSDPStrategy, self).all_gather(tensor, group, sync_grads))

    # -- checkpoints and the end

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state for a checkpoint."""
        return self.operations.run(super().lightning_module_state_dict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state for a checkpoint."""
        state = super().optimizer_state
        return self.operations.run(lambda: state(optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, again from the start if a fault strikes in it; remember it for a restart."""
        save = super().save_checkpoint
        with self.ledger.span(TimeClass.CHECKPOINT_SAVE):
            self.operations.run(lambda: save(dict(checkpoint), filepath, storage_options))
        self._last_checkpoint = (str(filepath), self.committed_updates)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint."""
        load = super().load_checkpoint
        with self.ledger.span(TimeClass.CHECKPOINT_RESTORE):
            return self.operations.run(lambda: load(checkpoint_path, weights_only))

    def _resume_hint(self) -> str:
        if self._last_checkpoint is None:
            return "this run has written no checkpoint; start again from its first update or an earlier checkpoint"
        path, update = self._last_checkpoint
        age = self.committed_updates - update
        return f"resume from {path} (ckpt_path), which replays {age} updates"

    def on_train_end(self) -> None:
        """Leave together: a rank that had left already could not take part in the repair of the last update."""
        self.operations.run(lambda: None)
        for fault in self.pending_faults:
            log.warning("the injected fault %s has never struck", fault)

    def on_exception(self, exception: BaseException) -> None:
        """An error that is not a communication fault ends the run on every rank, instead of leaving peers waiting."""
        if self.machine is not None and not isinstance(exception, (FailStop, SIGTERMException)):
            self.machine.tell_stop(f"{type(exception).__name__}: {exception}")

    def teardown(self) -> None:
        """Detach from the session; communicators stay for a next run in this process."""
        if self._session is not None:
            self._session.attach(None)
        super().teardown()


_MANUAL = ("refuse", "update", "fail_stop")


def _checked_manual(choice: str) -> str:
    if choice not in _MANUAL:
        raise ValueError(f"manual_optimization={choice!r} must be one of {list(_MANUAL)}")
    return choice
