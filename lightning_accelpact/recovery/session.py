"""The session: this process's control plane and communicators, shared by every run in the process."""

from __future__ import annotations

import atexit
import logging
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_accelpact.recovery import c10d
from lightning_accelpact.recovery.c10d import Collective
from lightning_accelpact.recovery.communicator import Communicators, GlooLinks, Links, NcclLinks, end_disposals
from lightning_accelpact.recovery.control import ControlPlane, Monitor, Notice
from lightning_accelpact.recovery.endpoint import Endpoint
from lightning_accelpact.recovery.line import InterruptibleStore, Line
from lightning_accelpact.recovery.machine import RepairMachine
from lightning_accelpact.recovery.sentinel import Sentinel, Watch

log = logging.getLogger("accelpact")

_PATIENCE = timedelta(seconds=5)
_KEPT = ("backend", "collective_timeout", "rebuild_timeout", "heartbeat_deadline")
_current: Session | None = None


class Session:
    """Control plane, monitor thread and communicators of one rank.

    Args:
        endpoint: Where the control store is.
        rank: Global rank of this process.
        world_size: Number of ranks.
        backend: Backend of the training groups, ``gloo`` or ``nccl``.
        collective_timeout: How long a collective, or a commit vote, may take.
        rebuild_timeout: How long making one communicator may take in a repair.
        heartbeat_deadline: Seconds of silence or standstill after which a rank counts as lost, and a link as broken.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        rank: int,
        world_size: int,
        backend: str,
        collective_timeout: timedelta,
        rebuild_timeout: timedelta,
        heartbeat_deadline: float,
    ) -> None:
        self._collective_timeout = collective_timeout
        self._endpoint = endpoint = replace(endpoint, silence=heartbeat_deadline)
        # First of all: a fork copies what there is
        self._sentinel = Sentinel(
            Watch(
                endpoint=endpoint,
                rank=rank,
                world_size=world_size,
                deadline=heartbeat_deadline,
                connect=collective_timeout,
            )
        )
        self.control = ControlPlane(
            endpoint=endpoint, rank=rank, world_size=world_size, deadline=collective_timeout
        )
        self.control.greet()
        self._meeting = InterruptibleStore(endpoint, rebuild_timeout)
        self.communicators = Communicators(
            rank=rank,
            make_store=self._meeting.for_generation,
            cut_store=self._meeting.cut,
            links=self._links(backend, endpoint, rebuild_timeout, heartbeat_deadline),
            timeout=collective_timeout,
            rebuild_timeout=rebuild_timeout,
        )
        self._meshes: dict[tuple[str, tuple[int, ...]], DeviceMesh] = {}
        self._machine: RepairMachine | None = None
        self._runs = 0
        self.monitor = Monitor(self.control, self._on_notice, self._on_lost)
        self.communicators.create_world(backend, world_size)
        c10d.intercept_collectives(self._run_collective)

    @classmethod
    def open(cls, **options) -> Session:
        """The session of this process; the options count when it is made, that is, the first time. Others are said so.

        Raises:
            RuntimeError: if somebody else has made the default process group, whose links are not known then, or has
                destroyed the session's.
        """
        global _current
        if _current is None:
            if dist.is_initialized():
                raise RuntimeError(
                    "torch.distributed is initialized already. AccelPact has to make the process groups itself to be"
                    " able to replace them: remove the earlier init_process_group() call"
                )
            _current = cls(**options)
            _current._options = options
            atexit.register(close)
        if not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed has been shut down, but AccelPact keeps its process groups for the later runs of a"
                " process: remove the destroy_process_group() call, or begin the next run in a new process"
            )
        for name in _KEPT:
            if options[name] != _current._options[name]:
                log.warning("%s=%s comes too late: a process keeps that of its first run, %s", name, options[name],
                            _current._options[name])  # fmt: skip
        return _current

    def _links(self, backend: str, endpoint: Endpoint, rebuild_timeout: timedelta, silence: float) -> Links:
        if "nccl" in backend:
            return NcclLinks(timeout=self._collective_timeout, deadline=rebuild_timeout)
        return GlooLinks(ignored_ports=(endpoint.port,), silence=silence)

    def mesh(self, device_type: str, shape: tuple[int, int]) -> DeviceMesh:
        """The (replicate, shard) device mesh; made once for each shape."""
        key = (device_type, shape)
        if key not in self._meshes:
            self._meshes[key] = self._make_mesh(device_type, torch.arange(shape[0] * shape[1]).view(shape))
        return self._meshes[key]

    def _make_mesh(self, device_type: str, layout: torch.Tensor) -> DeviceMesh:
        """Like ``init_device_mesh``, but each group's links become known one by one."""
        groups = [self._make_groups("replicate", layout.T.tolist()), self._make_groups("shard", layout.tolist())]
        return DeviceMesh.from_group(groups, device_type, layout, mesh_dim_names=("replicate", "shard"))

    def _make_groups(self, dimension: str, members: list[list[int]]) -> dist.ProcessGroup:
        with self.communicators.adopt(dimension):
            groups = [
                dist.new_group(ranks, timeout=self._collective_timeout, group_desc=f"mesh_{dimension}") for ranks in members
            ]
        return next(group for group, ranks in zip(groups, members, strict=True) if self.control.rank in ranks)

    @property
    def meshes(self) -> list[DeviceMesh]:
        """Every mesh made so far."""
        return list(self._meshes.values())

    def next_run(self) -> int:
        """Number of the run that begins now; the same on every rank."""
        self._runs += 1
        return self._runs

    def attach(self, machine: RepairMachine | None) -> None:
        """Deliver notices to this machine from now on."""
        self._machine = machine
        if machine is not None and self.monitor.latest is not None:
            machine.on_notice(self.monitor.latest, self.control.store)

    def _run_collective(self, collective: Collective) -> Any:
        return collective.plain() if self._machine is None else self._machine.retry.run(collective)

    def _on_notice(self, notice: Notice, store: Line) -> None:
        if self._machine is not None:
            self._machine.on_notice(notice, store)

    def _on_lost(self, reason: str) -> None:
        if self._machine is not None:
            self._machine.on_control_lost(reason)

    def close(self) -> None:
        """Leave, in good order unless the control store is lost: then no peer knows that this rank stops."""
        self._sentinel.close(farewell=not Line.given_up(self._endpoint))
        self.monitor.close()
        self.control.close(_PATIENCE)
        end_disposals(_PATIENCE.total_seconds())


def close() -> None:
    """Close this process's session, if it has one."""
    global _current
    session, _current = _current, None
    if session is not None:
        session.close()

