"""Which modules are sharded as a unit."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

_CONTAINERS = (torch.nn.ModuleList, torch.nn.Sequential)


class WrapPolicy:
    """Chooses the blocks of a model.

    Args:
        wrap: ``"auto"`` for its repeated blocks, that is, the members of a ``ModuleList`` or ``Sequential`` that holds
            at least two modules of one class and nothing else; or the classes to wrap.

    Raises:
        ValueError: if it is neither.
    """

    def __init__(self, wrap: Literal["auto"] | Collection[type[torch.nn.Module]]) -> None:
        auto = isinstance(wrap, str) and wrap == "auto"
        classes = () if auto else tuple(wrap) if isinstance(wrap, Collection) else (wrap,)
        if not auto and not (classes and all(_is_module_class(cls) for cls in classes)):
            raise ValueError(f'wrap={wrap!r} must be "auto" or a set of torch.nn.Module classes, such as {{Block}}')
        self._classes = classes

    def blocks(self, root: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """The modules to wrap, innermost first; the root itself is not among them."""
        candidates = self._of_classes(root) if self._classes else self._repeated(root)
        return reversed([module for module in candidates if any(True for _ in module.parameters())])

    def _of_classes(self, root: torch.nn.Module) -> list[torch.nn.Module]:
        return [module for module in root.modules() if module is not root and isinstance(module, self._classes)]

    def _repeated(self, root: torch.nn.Module) -> list[torch.nn.Module]:
        if isinstance(root, _CONTAINERS) and len(root) > 1 and len({type(child) for child in root}) == 1:
            return list(root)
        return [module for child in root.children() for module in self._repeated(child)]


def _is_module_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, torch.nn.Module)


def shard(root: torch.nn.Module, mesh: DeviceMesh, policy: WrapPolicy) -> int:
    """Apply ``fully_shard`` to the policy's blocks and to the root; returns the number of blocks.

    A LightningModule with manual optimization is no unit itself, but each of its children is: its ``training_step`` may
    go forward and backward several times, and a root is gathered once, when the step begins.

    Raises:
        ValueError: if such a module has parameters outside of its children.
    """
    blocks = list(policy.blocks(root))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    for unit in [root] if getattr(root, "automatic_optimization", True) else _children(root, root):
        if unit not in blocks:
            fully_shard(unit, mesh=mesh)
    return len(blocks)


_WITHOUT_FORWARD = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)


def _children(module: torch.nn.Module, root: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The outermost modules with parameters and a forward below a module that has none, or whose forward is not used."""
    if own := [name for name, _ in module.named_parameters(recurse=False)]:
        raise ValueError(
            f"{type(root).__name__} has automatic_optimization=False and keeps the parameters {own} in a"
            f" {type(module).__name__} that is not called: put them into a module whose forward() uses them, or apply"
            " fully_shard() in configure_model()"
        )
    for child in module.children():
        if isinstance(child, _WITHOUT_FORWARD):
            yield from _children(child, root)
        elif any(True for _ in child.parameters()):
            yield child
