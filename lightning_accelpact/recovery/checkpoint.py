"""When a checkpoint counts: a folder whose marker, written last of all, names every file with its size and digest.

A checkpoint is written beside its place and renamed when it is complete, so what stands in its place is either whole or
has been damaged since; a process that is killed while it writes leaves a folder without a marker.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

MARKER = "accelpact.json"
UNFINISHED = ".writing"
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """What a file was when the checkpoint was complete.

    Args:
        size: Bytes.
        sha256: 64 hexadecimal digits.
    """

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """The file as it is now.

        Raises:
            OSError: if it cannot be read.
        """
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return cls(size=file.tell(), sha256=digest)


@dataclass(frozen=True, kw_only=True)
class Marker:
    """Says that a checkpoint is complete, and what it is.

    Args:
        run: The run that has written it.
        update: Updates of the run that are in it.
        world_size: Ranks that have written it.
        obstacle: Why training cannot go on from it as if nothing had happened; empty if it can.
        time: Unix time.
        files: By name, relative to the folder.
    """

    run: str
    update: int
    world_size: int
    obstacle: str
    time: float
    files: dict[str, FileRecord]

    def to_bytes(self) -> bytes:
        """As it stands in the folder."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Marker:
        """The inverse of :meth:`to_bytes`.

        Raises:
            ValueError: if it is damaged, or of another version.
        """
        try:
            values = json.loads(content)
            if values.pop("format") != _FORMAT:
                raise ValueError("it is of another version")
            files = {name: FileRecord(**record) for name, record in values.pop("files").items()}
            return cls(files=files, **values)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it is damaged: {error!r}") from error


def staging(path: Path) -> Path:
    """Where a checkpoint is written before it is renamed."""
    return path.with_name(f".{path.name}{UNFINISHED}")


def replaced(path: Path) -> Path:
    """Where the checkpoint stands for a moment that another one replaces."""
    return path.with_name(f".{path.name}.replaced")


def places(path: Path) -> tuple[Path, ...]:
    """All folders in which the checkpoint of this path may be found after a process was killed at any moment."""
    return (path, replaced(path), staging(path))


def file_names(folder: Path) -> list[str]:
    """The files of a checkpoint but for the marker, in order, relative to its folder."""
    names = (str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    return sorted(name for name in names if name != MARKER)


def share(names: Iterable[str], rank: int, world_size: int) -> list[str]:
    """The files that this rank reads to digest them; every file is one rank's."""
    return list(names)[rank::world_size]


def complete(folder: Path, path: Path, marker: Marker) -> None:
    """Say that the files in ``folder`` are complete, and put it in its place; on one rank, once all have finished.

    Whatever stands there is replaced. If the process is killed on the way, the old one or the new one can be found in one
    of the :func:`places`.

    Args:
        folder: Where they have been written.
        path: Where the checkpoint belongs.
        marker: Names them.

    Raises:
        OSError: if something cannot be written.
    """
    for name in marker.files:
        sync(folder / name)
    unfinished = folder / f"{MARKER}.part"
    unfinished.write_bytes(marker.to_bytes())
    sync(unfinished)
    unfinished.rename(folder / MARKER)
    sync(folder)
    if os.path.lexists(path):
        remove(replaced(path))
        path.rename(replaced(path))
    folder.rename(path)
    sync(path.parent)
    remove(replaced(path))


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def marker_bytes(folder: Path) -> bytes | None:
    """The marker as it stands there; ``None`` without one."""
    try:
        return (folder / MARKER).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def damage(folder: Path, marker: Marker, names: Iterable[str]) -> list[str]:
    """What is wrong with some of a complete checkpoint's files.

    Args:
        folder: Where they are.
        marker: Says what they were.
        names: Which ones to read.

    Returns:
        One sentence for each that is missing, of another size, changed, or cannot be read.
    """
    return [fault for name in names if (fault := _fault(folder / name, marker.files[name]))]


def _fault(path: Path, known: FileRecord) -> str:
    try:
        size = path.stat().st_size
        if size != known.size:
            return f"{path.name} has {size} bytes instead of {known.size}"
        return "" if FileRecord.of(path) == known else f"{path.name} holds other bytes than were written"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {error}"
