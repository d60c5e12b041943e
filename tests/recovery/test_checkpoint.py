"""What makes a checkpoint complete, and what is found wrong with one that is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_accelpact.recovery import checkpoint
from lightning_accelpact.recovery.checkpoint import FileRecord, Marker


def written(folder: Path, **changes: object) -> Marker:
    """A folder with three files in it, and what its marker will say."""
    (folder / "inner").mkdir(parents=True)
    for name in ("a", "b", "inner/c"):
        (folder / name).write_bytes(name.encode() * 1000)
    names = checkpoint.file_names(folder)
    values = {"run": "one", "update": 7, "world_size": 2, "obstacle": "", "time": 1.5, **changes}
    return Marker(files={name: FileRecord.of(folder / name) for name in names}, **values)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A complete checkpoint."""
    path = tmp_path / "step=7.ckpt"
    checkpoint.complete(checkpoint.staging(path), path, written(checkpoint.staging(path)))
    return path


def read(path: Path) -> Marker:
    content = checkpoint.marker_bytes(path)
    assert content is not None
    return Marker.from_bytes(content)


def test_a_complete_one_is_in_its_place_and_says_what_it_is(path: Path) -> None:
    marker = read(path)
    assert (marker.run, marker.update, marker.world_size, marker.time) == ("one", 7, 2, 1.5)
    assert list(marker.files) == ["a", "b", "inner/c"] == checkpoint.file_names(path)
    assert checkpoint.damage(path, marker, marker.files) == []
    assert [one.name for one in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("name", ["a", "b", "inner/c"])
def test_any_damage_is_found(path: Path, name: str) -> None:
    marker = read(path)
    file = path / name
    content = file.read_bytes()
    for position in (0, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        assert checkpoint.damage(path, marker, marker.files) == [f"{file.name} holds other bytes than were written"]
    file.write_bytes(content[:-1])
    size = len(content)
    assert checkpoint.damage(path, marker, marker.files) == [f"{file.name} has {size - 1} bytes instead of {size}"]
    file.unlink()
    assert checkpoint.damage(path, marker, marker.files) == [f"{file.name} is missing"]
    file.mkdir()
    (fault,) = checkpoint.damage(path, marker, marker.files)
    assert fault.startswith(f"{file.name} ")


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_file_is_read_by_one_rank(path: Path, world_size: int) -> None:
    marker = read(path)
    shares = [checkpoint.share(marker.files, rank, world_size) for rank in range(world_size)]
    assert sorted(name for one in shares for name in one) == sorted(marker.files)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 2}', b'{"format": 1, "files": {}}', b"\xff"])
def test_a_damaged_marker_is_none(content: bytes) -> None:
    with pytest.raises(ValueError):
        Marker.from_bytes(content)


def test_without_a_marker_it_is_not_complete(tmp_path: Path) -> None:
    assert checkpoint.marker_bytes(tmp_path / "nowhere") is None
    written(tmp_path / "torn")
    assert checkpoint.marker_bytes(tmp_path / "torn") is None
    (tmp_path / "file").touch()
    assert checkpoint.marker_bytes(tmp_path / "file") is None


class Killed(BaseException):
    """The process has been killed."""


@pytest.mark.parametrize("occupied", ["nothing", "folder", "file", "link"])
def test_whenever_the_writer_is_killed_the_old_one_or_the_new_one_is_whole(
    tmp_path: Path, occupied: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before each change to the file system in turn, until one attempt comes through."""
    for step in range(30):
        path = tmp_path / str(step) / "last.ckpt"
        path.parent.mkdir()
        occupy(path, occupied)
        staged = checkpoint.staging(path)
        marker = written(staged, update=8)
        with monkeypatch.context() as patch:
            kill_before_change(patch, step)
            try:
                checkpoint.complete(staged, path, marker)
                survived = True
            except Killed:
                survived = False
        whole = [read(place).update for place in checkpoint.places(path) if is_whole(place)]
        if occupied == "folder" or survived:
            # Not only where the next writer begins by clearing up
            assert any(is_whole(place) for place in (path, checkpoint.replaced(path))), step
        assert set(whole) <= {7, 8}
        if survived:
            assert read(path).update == 8
            assert [one.name for one in path.parent.iterdir() if one.name.startswith("last")] == ["last.ckpt"]
            assert step > 3
            return
    pytest.fail("it never comes through")


def is_whole(place: Path) -> bool:
    return bool(checkpoint.marker_bytes(place)) and not checkpoint.damage(place, read(place), read(place).files)


def occupy(path: Path, how: str) -> None:
    if how == "folder":
        checkpoint.complete(checkpoint.staging(path), path, written(checkpoint.staging(path)))
    elif how == "file":
        path.write_text("weights")
    elif how == "link":
        path.symlink_to(path.parent / "elsewhere")


def kill_before_change(patch: pytest.MonkeyPatch, step: int) -> None:
    """The process does not live to make the change with this number."""
    left = [step]

    def mortal(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: object, **kwargs: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return original(*args, **kwargs)

        patch.setattr(owner, name, call)

    for name in ("rename", "write_bytes", "unlink"):
        mortal(Path, name)
    mortal(os, "fsync")
    mortal(checkpoint.shutil, "rmtree")
