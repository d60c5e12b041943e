"""Fingerprints of one rank's weights and optimizer state, to show that two runs or two replicas agree in every bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
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
        _update(sha, name, value, _content)
    return sha.hexdigest()


def shard_digests(module: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, str]:
    """What :func:`state_digest` takes but for buffers, one by one: what replicas of a shard must have alike.

    Of a tensor on a device only a :func:`checksum` of 64 bits is brought to the host, which any change of one element
    alters, and a change of several but for one chance in 2^64. On the host its bits go into the SHA-256 themselves.

    Args:
        module: Its parameters are taken by name.
        optimizers: Each value of their state is taken by its key and the name of the parameter, and so are the options
            of each parameter group.

    Returns:
        64 hexadecimal digits for each ``parameter/NAME``, ``state/OPTIMIZER/NAME/KEY`` and ``group/OPTIMIZER/NUMBER``.

    Raises:
        TypeError: as :func:`state_digest` does.
    """
    digests = {}
    for name, value in _entries(module, optimizers):
        if name.startswith("buffer/"):
            continue
        parts = value.items() if name.startswith("state/") else [("", value)]
        for key, part in parts:
            sha = hashlib.sha256()
            _update(sha, "", part, _content_or_checksum)
            digests[f"{name}/{key}" if key else name] = sha.hexdigest()
    return digests


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


def _update(sha: hashlib._Hash, name: str, value: Any, content: Callable[[torch.Tensor], Any]) -> None:
    """Feed one value, preceded by all that is needed to tell it from any other."""
    if isinstance(value, torch.Tensor):
        _update_tensor(sha, name, value, content)
    elif isinstance(value, Mapping):
        _header(sha, name, "mapping", len(value))
        for key in sorted(value, key=str):
            _update(sha, f"{name}/{key}", value[key], content)
    elif isinstance(value, (list, tuple)):
        _header(sha, name, "sequence", len(value))
        for i, item in enumerate(value):
            _update(sha, f"{name}/{i}", item, content)
    elif value is None or isinstance(value, (bool, int, float, complex, str)):
        # The shortest text that reads back as the same number: as good as its bits
        _header(sha, name, type(value).__name__, repr(value))
    else:
        raise TypeError(
            f"state_digest() met a {type(value).__name__} at {name}; it takes tensors, numbers, strings, None, and"
            " mappings, lists or tuples of them"
        )


def _update_tensor(
    sha: hashlib._Hash, name: str, tensor: torch.Tensor, content: Callable[[torch.Tensor], Any]
) -> None:
    local = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    _header(sha, name, str(tensor.dtype), tuple(tensor.shape), tuple(local.shape))
    sha.update(content(local))


def _content(local: torch.Tensor) -> memoryview:
    # Bytes by way of uint8: NumPy does not know every type that torch has (bfloat16, float8)
    return local.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _content_or_checksum(local: torch.Tensor) -> memoryview | bytes:
    return _content(local) if local.device.type == "cpu" else checksum(local).to_bytes(8, "little", signed=True)


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORDS_AT_ONCE = 1 << 22  # 32 MB


def _signed(number: int) -> int:
    return number - (1 << 64)


_SPREAD, _FIRST, _SECOND = _signed(0x9E3779B97F4A7C15), _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def checksum(tensor: torch.Tensor) -> int:
    """A sum over all words of a tensor, each hashed with its place by SplitMix64, modulo 2^64; computed on its device.

    Source: ``mix64`` of G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014). It
    is a bijection, so another word in one place changes the sum for certain.
    """
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    words = real.contiguous().reshape(-1).view(_WORDS[real.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), _WORDS_AT_ONCE):
        part = words[start : start + _WORDS_AT_ONCE].to(torch.int64)
        places = torch.arange(start + 1, start + len(part) + 1, device=tensor.device)
        total += _hashed(part + places * _SPREAD).sum()
    return int(total)


def _hashed(words: torch.Tensor) -> torch.Tensor:
    words = (words ^ _shifted(words, 30)) * _FIRST
    words = (words ^ _shifted(words, 27)) * _SECOND
    return words ^ _shifted(words, 31)


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right; torch's own shift of signed numbers would copy the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _header(sha: hashlib._Hash, *parts: Any) -> None:
    sha.update(repr(parts).encode())
