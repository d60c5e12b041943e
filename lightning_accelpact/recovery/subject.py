"""The subject of a repair: a sharded model, its references, and the window of its current update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, ClassVar, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from lightning_accelpact.recovery import fsdp1, fsdp2
from lightning_accelpact.recovery.action import Action
from lightning_accelpact.recovery.fault import FaultInjector, FaultPoint
from lightning_accelpact.recovery.options import HsdpShape
from lightning_accelpact.recovery.rebind import Reference, references
from lightning_accelpact.recovery.window import Window


class Subject(Protocol):
    """What is being protected: the wrapped model and its references."""

    def settle_device(self) -> None:
        """Wait until nothing of the aborted step runs on the device."""

    def reset(self) -> None:
        """Bring the wrapper back to IDLE; gradients of parameters stay."""

    def references(self) -> list[Reference]:
        """Every reference that may name a communicator."""

    def obstacle(self) -> str:
        """Why the current update cannot be run again; empty if it can."""

    def unread(self, doubtful: list[torch.Tensor], results: list[torch.Tensor]) -> bool:
        """Whether some all-reduce results are gradients that nobody has read, and all gradients among ``results``."""


class ShardedSubject:
    """What a repair resets and rebinds. Nothing to do before :meth:`attach`, while the model is still being set up.

    Attributes:
        wrapper: The adapter to what shards the model.
        generation: Its name, ``fsdp1`` or ``fsdp2``.
        qualified: The actions that have been proven bit-exact with it; a fault that needs another one fail-stops.
    """

    wrapper: ClassVar[ModuleType]
    generation: ClassVar[str]
    qualified: ClassVar[tuple[Action, ...]]

    def __init__(self) -> None:
        self._root: torch.nn.Module | None = None
        self._meshes: list[DeviceMesh] = []
        self.window: Window | None = None

    def attach(self, root: torch.nn.Module, meshes: Iterable[DeviceMesh]) -> None:
        """Protect this model.

        Args:
            root: The outermost module; may still have to be sharded.
            meshes: Device meshes that name communicators besides those the model itself names.
        """
        self._root = root
        self._meshes = list(meshes)

    def require(self, shape: HsdpShape) -> None:
        """Refuse what the wrapper cannot do; nothing has been started yet.

        Raises:
            ValueError: says what to do.
        """

    def settle_device(self) -> None:
        """Wait until the aborted step's kernels have ended; its collectives have been aborted before."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def reset(self) -> None:
        """Bring FSDP back to IDLE."""
        if self._root is not None:
            self.wrapper.reset_iteration(self._root)

    def references(self) -> list[Reference]:
        """Every place that may name a communicator."""
        return list(references(self._root or torch.nn.Module(), self._meshes, wrapper=self.wrapper))

    def obstacle(self) -> str:
        """Why the current update cannot be run again; empty if it can."""
        return self.window.obstacle if self.window is not None else ""

    def unread(self, doubtful: list[torch.Tensor], results: list[torch.Tensor]) -> bool:
        """Whether these all-reduce results are gradients that nobody has read."""
        return self._root is not None and self.wrapper.gradients_are(self._root, doubtful, results)

    def inject(self, faults: FaultInjector) -> None:
        """Install the hooks for faults that strike inside a forward or a backward; none for an empty plan."""
        if not faults.wants(FaultPoint.FORWARD, FaultPoint.BACKWARD, FaultPoint.ALL_REDUCE):
            return
        blocks = self.wrapper.wrapped_modules(self._root)
        middle = blocks[(len(blocks) + 1) // 2] if len(blocks) > 2 else blocks[-1]
        middle.register_forward_pre_hook(lambda *_: self._fire(faults, FaultPoint.FORWARD))
        middle.register_forward_hook(lambda module, args, output: _on_gradient(
            output, lambda: self._fire(faults, FaultPoint.BACKWARD)
        ))  # fmt: skip
        self.wrapper.hook_last_reduction(self._root, lambda: self._fire(faults, FaultPoint.ALL_REDUCE))

    def _fire(self, faults: FaultInjector, point: FaultPoint) -> None:
        if torch.is_grad_enabled() or point is not FaultPoint.FORWARD:
            faults.fire(point, last=self.wrapper.reduces_gradients(self._root))


class Fsdp2Subject(ShardedSubject):
    """A model that ``fully_shard`` has sharded."""

    wrapper = fsdp2
    generation = "fsdp2"
    qualified = tuple(Action)


class Fsdp1Subject(ShardedSubject):
    """A model that ``FullyShardedDataParallel`` has sharded."""

    wrapper = fsdp1
    generation = "fsdp1"
    qualified = tuple(Action)

    def require(self, shape: HsdpShape) -> None:
        if shape.shard == 1:
            raise ValueError(
                "shard=1: FSDP1 would not average gradients over the replicas then. Choose at least 2, or"
                ' strategy="accelpact_hsdp"'
            )


def _on_gradient(output: Any, action: Callable[[], None]) -> None:
    if isinstance(output, torch.Tensor) and output.requires_grad:
        output.register_hook(lambda gradient: action())
