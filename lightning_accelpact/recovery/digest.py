"""A fingerprint of one rank's weights and optimizer state, to show that two runs agree in every bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def state_digest(module: nn.Module, optimizers: Iterable[Optimizer]) -> str:
    """The SHA-256 of what this rank holds: parameters, buffers, optimizer state and hyperparameters.

    Equal digests mean equal names, types, shapes and bits. Of a sharded tensor only this rank's shard counts, so a
    run is compared with another rank by rank. No communication; a device is synchronized by the copy to the host.

    Args:
        module: Its parameters and buffers (persistent or not) are taken by name, tied ones once.
        optimizers: Their state is taken by the name of the parameter that it belongs to, or by its place in its
            group for a parameter that ``module`` does not hold.

    Returns:
        64 hexadecimal digits.

    Raises:
        TypeError: if an optimizer holds a value whose bits cannot be told, such as a function.
        NotImplementedError: if a tensor has no data (it is on the meta device).
    """
    sha = hashlib.sha256()
    for name, value in sorted(_entries(module, optimizers), key=lambda entry: entry[0]):
        _update(sha, name, value)
    return sha.hexdigest()


def _entries(module: nn.Module, optimizers: Iterable[Optimizer]) -> Iterator[tuple[str, Any]]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    yield from ((f"parameter/{name}", parameter) for name, parameter in module.named_parameters())
    yield from ((f"buffer/{name}", buffer) for name, buffer in module.named_buffers())
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            yield f"group/{i}/{j}", {key: value for key, value in group.items() if key != "params"}
            for k, parameter in enumerate(group["params"]):
                name = names.get(id(parameter), f"{j}.{k}")
                yield f"state/{i}/{name}", optimizer.state.get(parameter, {})


def _update(sha: hashlib._Hash, name: str, value: Any) -> None:
    """Feed one value, preceded by all that is needed to tell it from any other."""
    if isinstance(value, torch.Tensor):
        _update_tensor(sha, name, value)
    elif isinstance(value, Mapping):
        _header(sha, name, "mapping", len(value))
        for key in sorted(value, key=str):
            _update(sha, f"{name}/{key}", value[key])
    elif isinstance(value, (list, tuple)):
        _header(sha, name, "sequence", len(value))
        for i, item in enumerate(value):
            _update(sha, f"{name}/{i}", item)
    elif value is None or isinstance(value, (bool, int, float, complex, str)):
        # The shortest text that reads back as the same number: as good as its bits
        _header(sha, name, type(value).__name__, repr(value))
    else:
        raise TypeError(
            f"state_digest() met a {type(value).__name__} at {name}; it takes tensors, numbers, strings, None, and"
            " mappings, lists or tuples of them"
        )


def _update_tensor(sha: hashlib._Hash, name: str, tensor: torch.Tensor) -> None:
    local = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    local = local.cpu().contiguous()
    _header(sha, name, str(tensor.dtype), tuple(tensor.shape), tuple(local.shape))
    # Bytes by way of uint8: NumPy does not know every type that torch has (bfloat16, float8)
    sha.update(local.reshape(-1).view(torch.uint8).numpy().data)


def _header(sha: hashlib._Hash, *parts: Any) -> None:
    sha.update(repr(parts).encode())
