"""What a training or validation step changes besides gradients, generators and buffers, captured for a window."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torchmetrics import Metric


class LoggedValues:
    """What ``self.log`` has accumulated.

    Args:
        results: Gives Lightning's collection of it.
    """

    def __init__(self, results: Callable[[], dict[str, Metric]]) -> None:
        self._results = results

    def capture(self) -> dict[str, dict[str, Any]]:
        return {key: _metric_state(metric) for key, metric in self._results().items()}

    def restore(self, state: dict[str, dict[str, Any]]) -> None:
        results = self._results()
        for key in [key for key in results if key not in state]:
            dict.pop(results, key)
        for key, values in state.items():
            _set_metric_state(results[key], values)


class Metrics:
    """torchmetrics that belong to a module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def capture(self) -> list[tuple[Metric, dict[str, Any]]]:
        return [(metric, _metric_state(metric)) for metric in self._module.modules() if isinstance(metric, Metric)]

    def restore(self, state: list[tuple[Metric, dict[str, Any]]]) -> None:
        for metric, values in state:
            _set_metric_state(metric, values)


_METRIC_ATTRIBUTES = ("_update_count", "_computed", "_forward_cache", "has_reset", "_is_synced", "_cache")


def _metric_state(metric: Metric) -> dict[str, Any]:
    names = (*metric._defaults, *_METRIC_ATTRIBUTES)
    return {name: _copied(getattr(metric, name)) for name in names if hasattr(metric, name)}


def _set_metric_state(metric: Metric, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(metric, name, _copied(value))


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


class Attributes:
    """The plain attributes of a module or a callback: counters, lists of outputs.

    Containers are copied and set back in place, so that whoever else holds them sees the same.

    Args:
        owners: Whose attributes; what Lightning itself keeps on a module is left out.
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


_FRAMEWORK_NAMES = frozenset(vars(pl.LightningModule()))


def _plain_names(owner: Any) -> list[str]:
    framework = _FRAMEWORK_NAMES if isinstance(owner, pl.LightningModule) else ()
    return [name for name in vars(owner) if name not in framework]


def _plain_attributes(owner: Any) -> dict[str, tuple[Any, Any]]:
    return {name: (vars(owner)[name], _plain_copy(vars(owner)[name])) for name in _plain_names(owner)}


def _plain_copy(value: Any) -> Any:
    """A copy of a container with its containers, and of a tensor or an array; anything else is itself."""
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update({key: _plain_copy(item) for key, item in value.items()})
        return copied
    if isinstance(value, (list, set, deque)):
        copied = copy.copy(value)
        copied.clear()
        getattr(copied, "update" if isinstance(value, set) else "extend")(_plain_copy(item) for item in value)
        return copied
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if type(value).__module__ == "numpy" and hasattr(value, "copy") else value


def _refilled(value: Any, copied: Any) -> Any:
    """The original container with its captured content; for a tensor likewise."""
    if isinstance(value, (list, set, deque, dict)):
        content = _plain_copy(copied)
        value.clear()
        getattr(value, "update" if isinstance(value, (set, dict)) else "extend")(content)
        return value
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            return value.copy_(copied)
    return copied
