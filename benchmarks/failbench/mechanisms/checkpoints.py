"""Checkpoints on disk: one file for each shard, and a small one for each rank."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

_NAME = re.compile(r"(?P<step>\d+)-(?P<part>.+)\.pt")


class Checkpoints:
    """A folder of checkpoints. A file is there whole or not at all.

    Args:
        folder: Made if missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, part: str, content: Mapping[str, Any]) -> None:
        """Write a part and wait until the disk has it.

        Raises:
            OSError: if it cannot be written.
        """
        path = self._path(step, part)
        unfinished = path.with_suffix(f".{os.getpid()}")
        with unfinished.open("wb") as file:
            torch.save(dict(content), file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)

    def read(self, step: int, part: str) -> dict[str, Any]:
        """A part that was written.

        Raises:
            OSError: if it cannot be read.
        """
        return torch.load(self._path(step, part), weights_only=True)

    def complete(self, parts: Iterable[str]) -> tuple[int, ...]:
        """Steps of which all parts are there."""
        needed = {_file_name(part) for part in parts}
        found: dict[int, set[str]] = {}
        for path in self.folder.iterdir():
            if match := _NAME.fullmatch(path.name):
                found.setdefault(int(match["step"]), set()).add(match["part"])
        return tuple(sorted(step for step, there in found.items() if needed <= there))

    def _path(self, step: int, part: str) -> Path:
        return self.folder / f"{step:06}-{_file_name(part)}.pt"


def _file_name(part: str) -> str:
    return part.replace(" ", "_").replace("/", "_")
