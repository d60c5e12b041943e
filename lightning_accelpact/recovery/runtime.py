"""Recovery of a hybrid-sharded training run on one rank, whatever framework drives it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_accelpact.recovery import c10d, digest
from lightning_accelpact.recovery.action import Action, Ruling
from lightning_accelpact.recovery.agreement import EnvelopeSource, agree
from lightning_accelpact.recovery.endpoint import Endpoint, interface_address
from lightning_accelpact.recovery.envelope import Entry
from lightning_accelpact.recovery.fault import Fault, FaultInjector, FaultPlan
from lightning_accelpact.recovery.incident import Incident
from lightning_accelpact.recovery.machine import RepairMachine
from lightning_accelpact.recovery.operation import Operations
from lightning_accelpact.recovery.options import HsdpShape, RecoveryOptions
from lightning_accelpact.recovery.policy import FailStop, RepairPolicy
from lightning_accelpact.recovery.progress import Progress
from lightning_accelpact.recovery.replica import Divergence, ReplicaGuard, replicas
from lightning_accelpact.recovery.session import Session
from lightning_accelpact.recovery.stack import Stack
from lightning_accelpact.recovery.subject import Fsdp2Subject, ShardedSubject
from lightning_accelpact.recovery.update import UpdateRunner
from lightning_accelpact.recovery.window import Window

log = logging.getLogger("accelpact")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this rank runs, as its launcher tells.

    Args:
        rank: Global rank of this process.
        world_size: Number of ranks.
        host: The launcher's rendezvous address.
        port: And its port.
        backend: Backend of the training groups, ``gloo`` or ``nccl``.
        device_type: Type of the device that holds the model.
    """

    rank: int
    world_size: int
    host: str
    port: int
    backend: str
    device_type: str


class HsdpRuntime:
    """Everything that recovery needs besides the framework's own loop: groups, mesh, repairs, operations, records.

    The order of calls is :meth:`check`, :meth:`start`, :meth:`protect`, the updates, :meth:`finish`, :meth:`detach`.

    Args:
        options: What may be repaired, and how long it may take.
        replicate: Size of a replication group, or ``"auto"``.
        shard: Size of a sharding group, or ``"auto"``.
        faults: Faults to inject; ``None`` for none.
        span: Gives the context in which time of a named class (``guard``, ``group_repair``) is spent.
        resume_with: Where the user passes a checkpoint to resume from, as in ``ckpt_path``.
        framework: Whose loop trains, as in ``lightning.pytorch``.
        qualify: Runs the short form of the qualification: called with the stack and ``device_type``.
        subject: What is protected; ``None`` for an FSDP2 model.
    """

    def __init__(
        self,
        *,
        options: RecoveryOptions,
        replicate: int | Literal["auto"] = "auto",
        shard: int | Literal["auto"] = "auto",
        faults: FaultPlan | None = None,
        span: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
        resume_with: str,
        framework: str,
        qualify: Callable[..., Entry] | None = None,
        subject: ShardedSubject | None = None,
    ) -> None:
        self.options = options
        self._framework = framework
        self._qualify = qualify
        self._sizes = (replicate, shard)
        self._plan = faults or FaultPlan()
        self._span = span
        self._resume_with = resume_with
        self._root: torch.nn.Module | None = None
        self._last_checkpoint: tuple[str, int] | None = None
        self.subject = subject or Fsdp2Subject()
        self.shape: HsdpShape | None = None
        self.session: Session | None = None
        self.mesh: DeviceMesh | None = None
        self.machine: RepairMachine | None = None
        self.operations: Operations | None = None
        self.replicas: ReplicaGuard | None = None
        self.optimizers: Callable[[], Iterable[Optimizer]] = tuple  # those whose state replicas compare

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

    @property
    def divergences(self) -> list[Divergence]:
        """In what replicas have been found to differ in the current or last run; the same on every rank."""
        return self.replicas.divergences if self.replicas else []

    def gather_json(self, message: Any) -> list[Any]:
        """Collect one JSON value per rank on every rank, over the control plane; a collective call."""
        return self.operations.gather_json(message)

    # -- set-up

    def check(self, *, num_nodes: int, devices_per_node: int, backend: str, device_type: str) -> HsdpShape:
        """Check the options against the world; nothing is started.

        Args:
            num_nodes: Number of machines.
            devices_per_node: Processes on each.
            backend: Backend of the training groups, ``gloo`` or ``nccl``.
            device_type: Type of the device that holds the model.

        Raises:
            ValueError: names the value, what is allowed and what to do.
        """
        if "nccl" in backend and device_type != "cuda":
            raise ValueError(
                f'process_group_backend="{backend}" needs CUDA devices, but the model is on {device_type}: leave it out, or'
                ' choose "gloo"'
            )
        self.shape = HsdpShape.resolve(*self._sizes, num_nodes=num_nodes, devices_per_node=devices_per_node)
        self.subject.require(self.shape)
        if self.options.digest_every and self.shape.replicate == 1:
            raise ValueError(
                f"digest_every={self.options.digest_every} lets replicas compare their shards, but replicate=1 has no"
                " second one: raise replicate, or leave digest_every at 0"
            )
        self._plan.validate(self.shape.replicate * self.shape.shard)
        if self.options.control_interface is not None:
            interface_address(self.options.control_interface)
        return self.shape

    def start(self, place: Place, *, redo: bool = True) -> None:
        """Begin a run: :meth:`begin`, and make the device mesh.

        Args:
            place: Where this rank runs.
            redo: Whether the framework's loop can run an update again.
        """
        self.begin(place, redo=redo)
        self.mesh = self.session.mesh(place.device_type, (self.shape.replicate, self.shape.shard))

    def begin(self, place: Place, *, redo: bool = True) -> None:
        """Begin a run whose framework makes its own device mesh: control plane, default process group, repair machine.

        Args:
            place: Where this rank runs.
            redo: Whether the framework's loop can run an update again.
        """
        self._last_checkpoint = None
        self.session = self.open_session(place)
        run = self.session.next_run()
        self.machine = self._make_machine(place, redo, run, self._ruling(place, run))
        self.operations = Operations(self.machine)
        self.replicas = ReplicaGuard(
            every=self.options.digest_every,
            on_divergence=self.options.on_divergence,
            machine=self.machine,
            operations=self.operations,
            groups=replicas(self.shape),
            digests=lambda: digest.shard_digests(self._root, self.optimizers()),
        )
        self.session.attach(self.machine)

    def adopt(self, make_groups: Callable[[], T]) -> T:
        """Let somebody else make process groups, which repairs replace from then on like the session's own.

        Args:
            make_groups: Makes them, the same ones on every rank.
        """
        with self.session.communicators.adopt(f"mesh of run {self.machine.progress.run}"):
            result = make_groups()
        for group in c10d.registered_groups().values():
            c10d.set_timeout(group, self.options.seconds("collective_timeout"))
        return result

    def open_session(self, place: Place) -> Session:
        """Make control plane and default process group, or find those of this process."""
        timeout = self.options.seconds("collective_timeout")
        endpoint = Endpoint.from_environment(
            host=place.host,
            port=place.port,
            rank=place.rank,
            world_size=place.world_size,
            interface=self.options.control_interface,
            deadline=timeout,
        )
        return Session.open(
            endpoint=endpoint,
            rank=place.rank,
            world_size=place.world_size,
            backend=place.backend,
            collective_timeout=timeout,
            rebuild_timeout=self.options.seconds("rebuild_timeout"),
            heartbeat_deadline=self.options.heartbeat_deadline,
        )

    def _ruling(self, place: Place, run: int) -> Ruling:
        """What is qualified on this stack; the same on every rank."""
        stack = Stack.here(
            backend=place.backend, device_type=place.device_type, framework=self._framework, fsdp=self.subject.generation
        )
        source = EnvelopeSource(self.options.envelope, lambda stack: self._short_form(stack, place))
        return agree(self.session.control, source, stack, run=run)

    def _short_form(self, stack: Stack, place: Place) -> Entry:
        return self._qualify(stack, device_type=place.device_type)

    def _make_machine(self, place: Place, redo: bool, run: int, ruling: Ruling) -> RepairMachine:
        communicators = self.session.communicators
        progress = Progress(rank=place.rank, run=run)
        return RepairMachine(
            control=self.session.control,
            communicators=communicators,
            progress=progress,
            subject=self.subject,
            policy=RepairPolicy(
                repair_budget=self.options.repair_budget,
                max_repairs_per_update=self.options.max_repairs_per_update,
                allowed=self._allowed(redo=redo),
                ruling=ruling,
            ),
            faults=FaultInjector(self._plan, progress=progress, cut=communicators.links.cut, clock=time.time),
            resume_hint=self._resume_hint,
            span=self._span,
        )

    def _allowed(self, *, redo: bool) -> list[Action]:
        qualified = [action for action in self.options.allowed if action in self.subject.qualified]
        return [action for action in qualified if redo or action is not Action.REDO]

    def protect(self, root: torch.nn.Module) -> None:
        """Reset and rebind this model in a repair.

        Args:
            root: Holds everything that is sharded; may still have to be.
        """
        self._root = root
        meshes = self.session.meshes if self.mesh is None else [*self.session.meshes, self.mesh]
        self.subject.attach(root, meshes)

    def broadcast_weights(self, module: torch.nn.Module) -> None:
        """Start all ranks from rank 0's weights: each may have initialized its own. For a module not sharded yet."""
        tensors = [tensor.detach() for tensor in (*module.parameters(), *module.buffers()) if not tensor.is_meta]
        self.operations.run(lambda: [_broadcast(tensor, 0, dist.group.WORLD) for tensor in tensors])

    def align_replicas(self, module: torch.nn.Module) -> None:
        """Start all replicas from the first one's shards: a model built on the meta device initializes on each rank."""
        source = dist.get_process_group_ranks(self._replicas)[0]
        shards = self.subject.wrapper.shards(module)
        self.operations.run(lambda: [_broadcast(shard, source, self._replicas) for shard in shards])

    @property
    def _replicas(self) -> dist.ProcessGroup:
        """This rank's replication group; never kept, since a repair replaces it."""
        return self.mesh.get_group("replicate")

    def guard_updates(self, window: Window) -> None:
        """The updates begin: what they change is captured in ``window``, and injected faults may strike in them."""
        self.subject.window = window
        self.subject.inject(self.machine.faults)

    def update_runner(self, window: Window, drop_gradients: Callable[[], None]) -> UpdateRunner:
        """Runs updates that are given as functions.

        Args:
            window: Captures what an update changes besides gradients.
            drop_gradients: Clears every gradient; see :meth:`drop_gradients`.
        """
        return UpdateRunner(
            self.machine,
            window,
            drop_gradients=drop_gradients,
            holds_gradients=lambda: self.subject.wrapper.holds_gradients(self._root),
            after_update=self.replicas.check,
        )

    # -- during a run

    def drop_gradients(self, optimizers: Iterable[Optimizer]) -> None:
        """Clear every gradient of an aborted update, also those that FSDP accumulates unsharded."""
        self.subject.wrapper.drop_unsharded_gradients(self._root)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)

    def run_step(self, step: Callable[[], T], window: Window) -> T:
        """Run a step outside an update, such as a validation step; again, from the same state, if a fault strikes.

        Args:
            step: Does it; the same number of times on every rank.
            window: Captures what it may change.
        """
        window.open()
        window.add(None)

        def rewind() -> None:
            window.rewind()
            window.begin()

        return self.operations.run(step, rewind=rewind)

    def stop_on_fault(self, error: BaseException, where: str) -> None:
        """Fail-stop every rank if ``error`` is a communication fault, which came where nothing can be run again.

        Args:
            error: What was raised.
            where: Says where, as in ``inside an update``.
        """
        if self.machine is not None and self.machine.recovers(error):
            self.machine.stop.everywhere(f"a fault {where}: {error}")

    def checkpoint_written(self, path: Any) -> None:
        """Remember the newest checkpoint, for the message of a fail-stop."""
        self._last_checkpoint = (str(path), self.committed_updates)

    def _resume_hint(self) -> str:
        if self._last_checkpoint is None:
            return "this run has written no checkpoint; start again from its first update or an earlier checkpoint"
        path, update = self._last_checkpoint
        age = self.committed_updates - update
        return f"resume from {path} ({self._resume_with}), which replays {age} updates"

    # -- its end

    def finish(self) -> None:
        """Leave together: a rank that had left already could not take part in the repair of the last update."""
        self.operations.run(lambda: None)
        for fault in self.pending_faults:
            log.warning("the injected fault %s has never struck", fault)

    def stop_peers(self, error: BaseException) -> None:
        """An error that is no communication fault ends the run on every rank, instead of leaving peers waiting."""
        if self.machine is not None and not isinstance(error, FailStop):
            self.machine.stop.tell(f"{type(error).__name__}: {error}")

    @property
    def stopped(self) -> bool:
        """Whether this rank has ended the run before its time."""
        return self.machine is not None and self.machine.stop.told

    def detach(self) -> None:
        """The run is over; the communicators stay for a next one in this process."""
        if self.session is not None:
            self.session.attach(None)


def _broadcast(tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Broadcast a tensor in place, over a device of the group where the tensor is on another."""
    sent = tensor.to(c10d.device_of(group))
    dist.broadcast(sent, src=source, group=group)
    tensor.copy_(sent)
