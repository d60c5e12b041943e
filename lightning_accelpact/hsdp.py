"""What the Trainer's strategy and Fabric's have in common."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal, TypeVar

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_accelpact import observer
from lightning_accelpact.collective import ResilientCollective
from lightning_accelpact.goodput.ledger import Ledger, TimeClass
from lightning_accelpact.qualification.short import short_form
from lightning_accelpact.recovery import c10d, secret
from lightning_accelpact.recovery.fault import Fault, FaultPlan
from lightning_accelpact.recovery.incident import Incident
from lightning_accelpact.recovery.machine import RepairMachine
from lightning_accelpact.recovery.operation import Operations
from lightning_accelpact.recovery.options import HsdpShape, RecoveryOptions
from lightning_accelpact.recovery.replica import Divergence
from lightning_accelpact.recovery.runtime import HsdpRuntime, Place
from lightning_accelpact.recovery.subject import ShardedSubject
from lightning_accelpact.wrapping import WrapPolicy, shard

T = TypeVar("T")

STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")


class ResilientHSDP:
    """Goes in front of one of Lightning's FSDP strategies, either package's, in the bases of a strategy."""

    def _prepare(
        self,
        *,
        options: RecoveryOptions,
        replicate: int | Literal["auto"],
        shard: int | Literal["auto"],
        wrap: Literal["auto"] | Collection[type[torch.nn.Module]],
        faults: FaultPlan | None,
        resume_with: str,
        framework: str,
        subject: ShardedSubject | None = None,
    ) -> None:
        """Take the options in; starts nothing."""
        self.ledger = Ledger()
        self.runtime = HsdpRuntime(
            options=options,
            replicate=replicate,
            shard=shard,
            faults=faults,
            span=lambda name: self.ledger.span(TimeClass(name)),
            resume_with=resume_with,
            framework=framework,
            qualify=short_form,
            subject=subject,
        )
        self.collective: ResilientCollective | None = None
        self._wrap = WrapPolicy(wrap)

    # -- what others read

    @property
    def options(self) -> RecoveryOptions:
        """What may be repaired, and how long it may take."""
        return self.runtime.options

    @property
    def machine(self) -> RepairMachine | None:
        """Guards and repairs; ``None`` before the set-up."""
        return self.runtime.machine

    @property
    def operations(self) -> Operations | None:
        """Runs what all ranks do outside an update; ``None`` before the set-up."""
        return self.runtime.operations

    @property
    def incidents(self) -> list[Incident]:
        """This rank's incidents of the current or last run."""
        return self.runtime.incidents

    @property
    def committed_updates(self) -> int:
        """The committed frontier: updates applied in this run."""
        return self.runtime.committed_updates

    @property
    def pending_faults(self) -> list[Fault]:
        """This rank's injected faults that have not struck in the current or last run."""
        return self.runtime.pending_faults

    @property
    def divergences(self) -> list[Divergence]:
        """In what replicas have been found to differ in the current or last run; the same on every rank."""
        return self.runtime.divergences

    def gather_json(self, message: Any) -> list[Any]:
        """Collect one JSON value per rank on every rank, over the control plane; a collective call."""
        return self.runtime.gather_json(message)

    # -- set-up

    def _configure_launcher(self) -> None:
        """Where this process starts all ranks, it hands them the run's secret; otherwise their launcher has to."""
        super()._configure_launcher()
        if not self.cluster_environment.creates_processes_externally and self.num_nodes == 1:
            secret.hand_out()

    def _start(self, *, redo: bool) -> None:
        """Check the options against the world, then make control plane, communicators and device mesh.

        Args:
            redo: Whether an update can be run again.
        """
        shape = self.runtime.check(
            num_nodes=self.num_nodes,
            devices_per_node=self.num_processes,
            backend=self._get_process_group_backend(),
            device_type=self.root_device.type,
        )
        if shape.caveat:
            rank_zero_warn(f"accelpact_hsdp: {shape.caveat}")
        self.accelerator.setup_device(self.root_device)
        self.runtime.start(self._place(), redo=redo)
        self.machine.on_stop = observer.stand_down
        self.collective = ResilientCollective(self.operations)
        self._adopt_groups(shape)

    def _adopt_groups(self, shape: HsdpShape) -> None:
        """Let Lightning's FSDP2 strategy find the groups made."""
        self._setup_distributed()
        self._device_mesh = self.runtime.mesh
        self._data_parallel_size, self._tensor_parallel_size = shape.replicate, shape.shard

    def _place(self) -> Place:
        return Place(
            rank=self.global_rank,
            world_size=self.world_size,
            host=self.cluster_environment.main_address,
            port=self.cluster_environment.main_port,
            backend=self._get_process_group_backend(),
            device_type=self.root_device.type,
        )

    def _shard(self, module: torch.nn.Module) -> torch.nn.Module:
        """Shard a module by the policy, unless parts of it are sharded already; returns it, or what it is wrapped in."""
        if self.runtime.subject.wrapper.wrapped_modules(module):
            return module
        self.runtime.broadcast_weights(module)
        sharded, blocks = self._wrap_units(module)
        rank_zero_info(
            f"accelpact_hsdp: sharded {blocks} blocks and the root over {self.runtime.shape.replicate} replicas x"
            f" {self.runtime.shape.shard} shards"
        )
        return sharded

    def _wrap_units(self, module: torch.nn.Module) -> tuple[torch.nn.Module, int]:
        """Shard the policy's blocks and the root; returns what to call instead of it, and the number of blocks."""
        return module, shard(module, self.runtime.mesh, self._wrap)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every process reads its own data, also inside a sharding group."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    # -- collectives outside an update

    def _run_operation(self, operation: Callable[[], T]) -> T:
        """An operation of all ranks. Before the set-up nothing can be repaired, and Lightning's own answer stands."""
        return operation() if self.operations is None else self.operations.run(operation)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        barrier = super().barrier
        self._run_operation(lambda: barrier(*args, **kwargs))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """An object of rank ``src`` on every rank."""
        broadcast = super().broadcast
        return self._run_operation(lambda: broadcast(obj, src))

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """The tensors of all ranks, stacked."""
        gather = super().all_gather
        return self._run_operation(lambda: gather(tensor, c10d.current(group), sync_grads))

    def _reduced(self, reduce: Callable[..., T], tensor: T, group: Any, reduce_op: Any) -> T:
        """What ``reduce`` makes of a tensor, in place; anything else is left alone."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if self.operations is None:
            return reduce(tensor, group, reduce_op)
        return self.operations.run_in_place(tensor, lambda: reduce(tensor, c10d.current(group), reduce_op))


MANUAL = ("refuse", "update", "fail_stop")


def checked_manual(choice: str, allowed: tuple[str, ...] = MANUAL) -> str:
    """What to do with steps that the user's own loop makes, if it is one of the choices.

    Raises:
        ValueError: names the value and what is allowed.
    """
    if choice not in allowed:
        raise ValueError(f"manual_optimization={choice!r} must be one of {list(allowed)}")
    return choice
