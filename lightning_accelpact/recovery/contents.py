"""What a batch is made of: its containers, which can be set back, and its tensors, of which a change can be noticed."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

_CONTAINERS = (dict, list, set, deque)
_SCALARS = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class Contents:
    """The contents of a payload at one moment.

    Containers and arrays are copied, since they are small; tensors may be as large as the device allows, so it is only
    noted how often each had been written to, and a few values, since torch does not count every write (not through
    ``.data``, nor by NumPy).

    Args:
        parts: Every container and array, with a shallow copy of it.
        versions: Every tensor, with its version counter.
        values: Some values of every tensor.
    """

    parts: list[tuple[Any, Any]]
    versions: list[tuple[torch.Tensor, int]]
    values: list[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, payload: Any) -> Contents:
        """The contents as they are now.

        Args:
            payload: Nested dictionaries, lists, sets, queues, tuples, dataclasses and objects that can be moved to a
                device (``to``), which are what a loader makes batches of. Any other object counts as one that does not
                change.
        """
        parts: list[tuple[Any, Any]] = []
        versions: list[tuple[torch.Tensor, int]] = []
        values: list[tuple[torch.Tensor, torch.Tensor]] = []
        for value in _walk(payload):
            if not isinstance(value, torch.Tensor):
                parts.append((value, copy.copy(value)))
                continue
            if not value.is_inference():  # which has no counter
                versions.append((value, value._version))
            if type(value) is torch.Tensor and value.layout is torch.strided and not value.is_meta:
                values.append((value, _grid(value).clone()))
        return cls(parts, versions, values)

    @property
    def overwritten(self) -> bool:
        """Whether a tensor has been written to since, so that the contents cannot be set back."""
        return _counted(self.versions) or not all(_same_bits(_grid(tensor), values) for tensor, values in self.values)

    def restore(self) -> None:
        """Fill every container and array with what it held, in place: others may hold it too."""
        for part, content in self.parts:
            if isinstance(part, _CONTAINERS):
                refill(part, content)
            else:
                part[...] = content


_SAMPLED = 4  # values of a tensor, from its beginning to its end


class Marks:
    """How some tensors were at one moment, so that a later write to them is noticed.

    Args:
        tensors: Of these it is noted how often each has been written to; none made in inference mode.
        samples: Of these the values, since not every write is counted: torch does not count those of its list operations
            (``_foreach_...``) to DTensors, nor those through ``.data``. Flat tensors, sorted by device and type.
        again: Gives what stands in the place of the first of ``tensors`` later: others, if somebody has replaced them.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor] = (),
        samples: Iterable[list[torch.Tensor]] = (),
        again: Callable[[], Iterable[torch.Tensor]] = tuple,
    ) -> None:
        self._versions = [(tensor, tensor._version) for tensor in tensors]
        self._again = again
        self._samples = list(samples)
        self._values = self._look()

    def _look(self) -> list[torch.Tensor]:
        with torch.no_grad():
            return [torch.cat(alike) for alike in self._samples]

    @property
    def moved(self) -> bool:
        """Whether one of them has been written to or replaced since."""
        return _counted(self._versions) or self._replaced or not all(map(_same_bits, self._look(), self._values))

    @property
    def _replaced(self) -> bool:
        return any(one is not known for one, (known, _) in zip(self._again(), self._versions, strict=False))


def _counted(versions: list[tuple[torch.Tensor, int]]) -> bool:
    """Whether torch has counted a write to one of these tensors since its version was noted."""
    return any(tensor._version != version for tensor, version in versions)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _grid(tensor: torch.Tensor) -> torch.Tensor:
    """Some four places along each dimension, as a view."""
    return tensor.detach()[tuple(slice(None, None, max(1, (size - 1) // 3)) for size in tensor.shape)]


def sampled(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """A few values of each tensor, as views of it, for :class:`Marks`; an empty tensor has none."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)  # a view, since shards are contiguous
        step = max(1, (flat.numel() - 1) // (_SAMPLED - 1))
        if flat.numel():
            alike.setdefault((flat.device, flat.dtype), []).append(flat[::step][:_SAMPLED])
    return list(alike.values())


def overwrite(tensor: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    """Replace what a tensor holds, also where a validation has left it, in inference mode."""
    inference = tensor.is_inference() or torch.is_inference_mode_enabled()
    with torch.inference_mode(inference), torch.no_grad():  # in this order: leaving inference mode turns gradients on
        if tensor.layout is torch.strided and 0 in tensor.stride():  # expanded: a value stands for many, and is written once
            once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
            tensor[once].copy_(content[once])
            return tensor
        return tensor.copy_(content)


def refill(container: Any, content: Any) -> None:
    """Replace what a dictionary, list, set or queue holds."""
    content = copy.copy(content)
    container.clear()
    getattr(container, "update" if isinstance(container, (set, dict)) else "extend")(content)


def _walk(payload: Any) -> Iterator[Any]:
    """Every container, array and tensor of a payload, each once."""
    seen: set[int] = set()
    stack = [payload]
    while stack:
        value = stack.pop()
        if isinstance(value, _SCALARS) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _CONTAINERS):
            yield value
            stack.extend(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, (tuple, frozenset)):
            stack.extend(value)
        elif isinstance(value, torch.Tensor) or is_array(value):
            yield value
        elif _is_filled(value):
            stack.append(vars(value))
        elif dataclasses.is_dataclass(value):  # with slots: only its tensors and containers can be seen to
            stack.extend(getattr(value, field.name, None) for field in dataclasses.fields(value))


def is_array(value: Any) -> bool:
    """Whether it is an array of NumPy's, which is not imported for the question."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_filled(value: Any) -> bool:
    """Whether it is an object that a loader makes batches of."""
    if not hasattr(value, "__dict__") or isinstance(value, (type, torch.nn.Module)):
        return False
    return dataclasses.is_dataclass(value) or callable(getattr(type(value), "to", None))
