"""What a training or validation step changes in metrics, logged values and plain attributes, captured for a window."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_accelpact.recovery.contents import is_array, overwrite, refill
from lightning_accelpact.recovery.generators import GeneratorState
from lightning_accelpact.recovery.held import Held, as_written
from lightning_accelpact.recovery.modules import walk
from lightning_accelpact.recovery.window import Buffers, Modes, Participant


class LoggedValues:
    """What ``self.log`` has accumulated.

    Args:
        results: Gives Lightning's collection of it.
    """

    def __init__(self, results: Callable[[], dict[str, Metric]]) -> None:
        self._results = results

    def capture(self) -> dict[str, tuple[Metric, dict[str, Any]]]:
        return {key: (metric, metric_state(metric)) for key, metric in self._results().items()}

    def restore(self, state: dict[str, tuple[Metric, dict[str, Any]]]) -> None:
        results = self._results()
        results.clear()  # a key that is missing, or there too early, is one that the replay comes to in its own time
        for key, (metric, values) in state.items():
            results[key] = metric
            set_metric_state(metric, values)


class Metrics:
    """torchmetrics that belong to a module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def capture(self) -> list[tuple[Metric, dict[str, Any]]]:
        return [(metric, metric_state(metric)) for metric in walk(self._module) if isinstance(metric, Metric)]

    def restore(self, state: list[tuple[Metric, dict[str, Any]]]) -> None:
        for metric, values in state:
            set_metric_state(metric, values)


_METRIC_ATTRIBUTES = ("_update_count", "_computed", "_forward_cache", "has_reset", "_is_synced", "_cache")


def metric_state(metric: Metric) -> dict[str, Any]:
    """A copy of what a metric has accumulated."""
    names = (*metric._defaults, *_METRIC_ATTRIBUTES)
    return {name: _copied(getattr(metric, name)) for name in names if hasattr(metric, name)}


def set_metric_state(metric: Metric, state: dict[str, Any]) -> None:
    """Give a metric what another one, or itself, had accumulated."""
    for name, value in state.items():
        setattr(metric, name, _copied(value))


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


class Attributes:
    """The plain attributes of modules and callbacks: counters, lists of outputs, random generators of their own.

    Containers are copied and set back in place, so that whoever else holds them sees the same.

    Args:
        owners: Whose attributes; what torch and Lightning themselves keep on a module is left out.
    """

    def __init__(self, owners: list[Any]) -> None:
        self._owners = owners

    def capture(self) -> list[tuple[Any, dict[str, tuple[Any, Any]]]]:
        return [(owner, _plain_attributes(owner)) for owner in self._owners]

    def restore(self, state: list[tuple[Any, dict[str, tuple[Any, Any]]]]) -> None:
        for owner, attributes in state:
            for name in set(_plain_names(owner)) - set(attributes):
                del vars(owner)[name]
            for name, (value, kept) in attributes.items():
                vars(owner)[name] = _refilled(value, kept)


def of_modules(root: torch.nn.Module, owners: list[Any]) -> list[Participant]:
    """What a step changes in modules besides parameters and gradients.

    Args:
        root: The outermost module.
        owners: Whose plain attributes.
    """
    return [Metrics(root), Attributes(owners), Buffers(root), Modes(root)]


def owner_of(tracked: Any) -> Any:
    """Whose attributes to capture for what a user wants to have set back: the object, or a holder of a generator."""
    return SimpleNamespace(generator=tracked) if GeneratorState.of(tracked) else tracked


class Options:
    """The options of optimizers' parameter groups, such as the learning rate, which a hook may change.

    Args:
        optimizers: Gives the optimizers.
    """

    def __init__(self, optimizers: Callable[[], Iterable[Optimizer]]) -> None:
        self._optimizers = optimizers

    def capture(self) -> list[tuple[dict[str, Any], dict[str, tuple[Any, Any]]]]:
        groups = (group for optimizer in self._optimizers() for group in optimizer.param_groups)
        return [
            (group, {name: (value, _plain_copy(value)) for name, value in group.items() if name != "params"})
            for group in groups
        ]

    def restore(self, state: list[tuple[dict[str, Any], dict[str, tuple[Any, Any]]]]) -> None:
        for group, options in state:
            group.update({name: _refilled(value, kept) for name, (value, kept) in options.items()})


_LIBRARIES = ("torch.", "lightning.pytorch.core.", "lightning.fabric.", "builtins", "typing", "abc")


def modules_with_attributes(root: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules from ``root`` on that may keep attributes of their own making: not those of torch or torchmetrics."""
    return [module for module in walk(root) if not isinstance(module, Metric) and _is_home_made(type(module))]


def _is_home_made(cls: type) -> bool:
    # FSDP puts a class of its own in front, which says that it is from torch
    return any(not base.__module__.startswith(_LIBRARIES) for base in cls.__mro__)


def _framework_names(owner: Any) -> frozenset[str]:
    lightning = sys.modules.get("lightning.pytorch.core.module")  # imported if the owner is one of its modules
    if lightning is not None and isinstance(owner, lightning.LightningModule):
        return _names_of_a_new(lightning.LightningModule)
    return _names_of_a_new(torch.nn.Module) if isinstance(owner, torch.nn.Module) else frozenset()


@cache
def _names_of_a_new(cls: type) -> frozenset[str]:
    return frozenset(vars(cls()))


_FSDP_NAMES = ("__composable_api_state_key", "_is_fsdp_managed_module", "_fsdp_use_orig_params")


def _plain_names(owner: Any) -> list[str]:
    framework = _framework_names(owner)
    return [name for name in vars(owner) if name not in framework and not name.startswith(_FSDP_NAMES)]


def _plain_attributes(owner: Any) -> dict[str, tuple[Any, Any]]:
    return {name: (vars(owner)[name], _plain_copy(vars(owner)[name])) for name in _plain_names(owner)}


def _plain_copy(value: Any) -> Any:
    """A copy of a container with its containers, of a tensor or an array; anything else is itself.

    A generator becomes its state, and what a list holds and is large is held.
    """
    state = GeneratorState.of(value)
    return state or _copy_of(value, _plain_copy, lambda item: Held.of(item) or _plain_copy(item))


def _thawed(copied: Any) -> Any:
    """A copy of what :func:`_plain_copy` has made, with generators and held values themselves."""
    if isinstance(copied, (GeneratorState, Held)):
        return copied.restore()
    return _copy_of(copied, _thawed, _thawed_item)


def _thawed_item(item: Any) -> Any:
    return item.restore() if isinstance(item, Held) else as_written(_thawed(item))


def _copy_of(value: Any, copy_one: Callable[[Any], Any], copy_item: Callable[[Any], Any]) -> Any:
    """A copy, with the values of dictionaries copied in one way and the items of lists, sets and queues in another."""
    if isinstance(value, dict):
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = copy_one(item)  # a Counter's update() would add
        return copied
    if isinstance(value, (list, set, deque)):
        copied = copy.copy(value)
        copied.clear()
        getattr(copied, "update" if isinstance(value, set) else "extend")(map(copy_item, value))
        return copied
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if is_array(value) else value


def _refilled(value: Any, copied: Any) -> Any:
    """The original container with its captured content; for a tensor or an array likewise."""
    if isinstance(copied, GeneratorState):
        return copied.restore()
    if isinstance(value, (list, set, deque, dict)):
        refill(value, _thawed(copied))
        return value
    if isinstance(value, torch.Tensor):
        return overwrite(value, copied)
    if is_array(value):
        value[...] = copied
        return value
    return copied
