"""Puts the strategies' names into the registries of frameworks that may not have been imported yet, and Accelerate's switch
where it is looked for.

torch calls :func:`autoload` at the end of ``import torch`` (entry-point group ``torch.backends``), so the name exists
in scripts that never import this package. Standard library only, and light: every torch user of an environment pays
for what happens here.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

SWITCH = "ACCELPACT_AUTOLOAD"
ACCELERATE_SWITCH = "ACCELERATE_USE_ACCELPACT"

_log = logging.getLogger("accelpact")


class _Entry(NamedTuple):
    """One name in one registry.

    Args:
        registry: Attribute of the framework's module that holds the registry.
        name: What the user writes, as in ``Trainer(strategy=name)``.
        target: ``module:class`` that the name stands for.
        description: One line for those who list the registry.
    """

    registry: str
    name: str
    target: str
    description: str


_DESCRIPTION = "{} hybrid sharding that recovers from failed collectives without reading a checkpoint"

# The module that is importable once its registry is complete -> what goes into that registry
_ENTRIES = {
    "lightning.pytorch.strategies": (
        _Entry(
            registry="StrategyRegistry",
            name="accelpact_hsdp",
            target="lightning_accelpact.strategy:ResilientHSDPStrategy",
            description=_DESCRIPTION.format("FSDP2"),
        ),
        _Entry(
            registry="StrategyRegistry",
            name="accelpact_hsdp_fsdp1",
            target="lightning_accelpact.fsdp1_strategy:ResilientFSDP1Strategy",
            description=_DESCRIPTION.format("FSDP1"),
        ),
    ),
    "lightning.fabric.strategies": (
        _Entry(
            registry="STRATEGY_REGISTRY",
            name="accelpact_hsdp",
            target="lightning_accelpact.fabric:FabricHSDPStrategy",
            description=_DESCRIPTION.format("FSDP2"),
        ),
    ),
}


def _turn_on_accelerate() -> None:
    """In a process whose environment says so, every ``Accelerator`` becomes resilient. What is wrong with that is raised."""
    if os.environ.get(ACCELERATE_SWITCH):
        import_module("accelerate_plugin")


def _extend_accelerate_launch() -> None:
    import_module("accelerate_plugin.launch").extend()


# The module of Accelerate that has just been imported -> what to do then
_HOOKS: dict[str, Callable[[], None]] = {
    # The package imports it after accelerate.accelerator, in whose middle torch may have been imported, and so this
    "accelerate.launchers": _turn_on_accelerate,
    "accelerate.commands.launch": _extend_accelerate_launch,
}


def autoload() -> None:
    """Entry point for torch: register, or leave no trace if ``ACCELPACT_AUTOLOAD=0``."""
    try:
        if os.environ.get(SWITCH) != "0":
            install()
        elif not _installed():
            _forget_package()
    except Exception as error:  # whatever is broken here must not break `import torch`
        _complain(error)


def on_package_import() -> None:
    """Register, unless it is torch that imports the package: then :func:`autoload`, which follows, decides."""
    if not _is_being_imported("torch"):
        install()


def install() -> None:
    """Register at once with the frameworks that are imported already, and with the others when they are."""
    for module_name in (*_ENTRIES, *_HOOKS):
        if module_name in sys.modules and not _is_being_imported(module_name):
            _register(sys.modules[module_name])
    if not _installed():
        sys.meta_path.insert(0, _Finder())


def _register(module: ModuleType) -> None:
    if module.__name__ in _HOOKS:
        _HOOKS[module.__name__]()
        return
    try:
        for entry in _ENTRIES[module.__name__]:
            registry = getattr(module, entry.registry)
            if entry.name not in registry:
                registry.register(entry.name, _factory(entry.target), description=entry.description)
    except Exception as error:  # a framework that changed its registry must still be importable
        _complain(error)


def _factory(target: str) -> Callable[..., Any]:
    """A stand-in for a class that is imported when the first instance is wanted."""
    module_name, class_name = target.split(":")

    def create(**options: Any) -> Any:
        return getattr(import_module(module_name), class_name)(**options)

    create.__name__ = create.__qualname__ = class_name
    return create


def _installed() -> bool:
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def _forget_package() -> None:
    """Undo the import that torch made to find :func:`autoload`, so that an explicit import starts afresh."""
    package = __name__.partition(".")[0]
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]


def _is_being_imported(name: str) -> bool:
    # The flag by which the import system itself tells a module that is still executing
    return bool(getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False))


def _complain(error: Exception) -> None:
    # Logged, because a warning raises under `python -W error`
    _log.warning("accelpact_hsdp is not available as a strategy name: %s: %s", type(error).__name__, error)


class _Finder(MetaPathFinder):
    """Finds the modules of :data:`_ENTRIES` and :data:`_HOOKS` as the other finders do, and acts once they have executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _ENTRIES and fullname not in _HOOKS:
            return None
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None) if finder is not self else None
            spec = find_spec(fullname, path, target) if find_spec is not None else None
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(Loader):
    """Stands in for a module's own loader until the module has executed."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        _register(module)
