"""What a run has left behind, as plain values that compare bit for bit across processes."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp


def rows(file: Path) -> list[dict[str, str]]:
    """What a ``CSVLogger`` has logged, row by row, but for the goodput, whose values are times."""
    with file.open() as lines:
        table = [
            {name: value for name, value in row.items() if value and not name.startswith("goodput")}
            for row in csv.DictReader(lines)
        ]
    return [row for row in table if row.keys() != {"step"}]


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Logged values as plain numbers."""
    return {name: float(value) for name, value in metrics.items()}


def checkpoints(roots: list[str]) -> dict[str, dict[str, Any]]:
    """The content of every checkpoint below the first folder: a digest of each tensor, and the rest as it is."""
    found, root = {}, roots[0]
    for file in filter(Path.is_file, sorted(Path(root).rglob("*.ckpt"))):
        found[str(file.relative_to(root))] = plain(torch.load(file, weights_only=False), roots)
    for metadata in sorted(Path(root).rglob(".metadata")):
        folder = metadata.parent
        found[str(folder.relative_to(root))] = {"tensors": _tensors(folder), "meta": plain(_meta(folder), roots)}
    return found


def _meta(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "meta.pt", weights_only=False)


def _tensors(folder: Path) -> Any:
    reader = dcp.FileSystemReader(folder)
    state: dict[str, Any] = {}
    for name, description in reader.read_metadata().state_dict_metadata.items():
        is_tensor = hasattr(description, "size")
        state[name] = torch.empty(description.size, dtype=description.properties.dtype) if is_tensor else None
    dcp.load(state, storage_reader=reader, no_dist=True)
    return plain(state)


def plain(value: Any, roots: Iterable[str] = ()) -> Any:
    """A value that compares bit for bit across processes: digests for tensors, ``<root>`` for the runs' folders."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return (str(value.dtype), tuple(value.shape), hashlib.sha256(raw).hexdigest())
    if isinstance(value, dict):
        return {plain(key, roots): plain(item, roots) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, roots) for item in value]
    if isinstance(value, str):
        for root in roots:
            value = value.replace(root, "<root>")
        return value
    return value if isinstance(value, (int, float, bool, type(None))) else repr(value)
