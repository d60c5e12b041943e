"""The modules of a model: they are gone through for every micro-batch and in every repair."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def walk(root: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Every module from ``root`` on, each once, outermost first.

    It is ``root.modules()`` without making their names.
    """
    seen: set[int] = set()
    stack = [root]
    while stack:
        module = stack.pop()
        if module is not None and id(module) not in seen:
            seen.add(id(module))
            yield module
            stack.extend(reversed(module._modules.values()))
