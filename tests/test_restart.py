"""When a process goes on with an earlier run, and from which checkpoint: one rank, without a fit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from lightning_accelpact import restart
from lightning_accelpact.journal import Journal, Launch
from lightning_accelpact.recovery import checkpoint
from lightning_accelpact.recovery.checkpoint import FileRecord, Marker
from lightning_accelpact.recovery.policy import FailStop
from lightning_accelpact.restart import Restart, checked_resume

COMMAND = ("/train.py", "--layers=4")


@pytest.fixture(autouse=True)
def a_new_process() -> Iterator[None]:
    """Nothing is known of earlier runs in this process."""
    yield from forget()


def forget() -> Iterator[None]:
    restart._programs.clear()
    yield
    restart._programs.clear()


class Attempts:
    """Attempts at runs in one root folder, each in a process of its own as far as it can tell.

    Args:
        root: The folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def begin(self, given: Path | None = None, *, resume: str = "auto", new: bool = True, **launch: Any) -> Restart:
        if new:
            restart._programs.clear()
        one = Restart(
            resume=resume, root=self.root, rank=0, world_size=1, gather_json=lambda message: [message],
            barrier=lambda: None, launch=Launch(**{"command": COMMAND, **launch}),
        )  # fmt: skip
        self.chosen = one.begin(given)
        return one

    def save(self, one: Restart, update: int, *, name: str = "", obstacle: str = "", world_size: int = 1) -> Path:
        """As :meth:`Restart.write` does, without Lightning's part."""
        path = self.root / (name or f"step={update}.ckpt")
        Journal(self.root).checkpoint(one.run, path)
        folder = checkpoint.staging(path)
        folder.mkdir()
        (folder / "weights").write_text(f"{one.run} {update}")
        marker = Marker(run=one.run, update=update, world_size=world_size, obstacle=obstacle, time=update,
                        files={"weights": FileRecord.of(folder / "weights")})  # fmt: skip
        checkpoint.complete(folder, path, marker)
        return path


@pytest.fixture
def attempts(tmp_path: Path) -> Attempts:
    return Attempts(tmp_path)


def end(one: Restart, how: str) -> None:
    errors = {"fail_stop": FailStop("lost"), "error": ValueError("a bug"), "interrupted": KeyboardInterrupt(),
              "terminated": SIGTERMException()}  # fmt: skip
    if how == "completed":
        one.completed()
    elif how == "killed":
        one.release()  # as the kernel does
    else:
        one.failed(errors[how], update=9, incident=None)


SAME, OTHER = {}, {"command": ("/other.py",)}
RELAUNCH, REQUEUE = {"job": "torchrun a", "restarts": 1}, {"job": "slurm 3", "restarts": 2}
NAMELESS = {"restarts": 1}
TYPED = {"interactive": True}


@pytest.mark.parametrize(
    ("first", "how", "second", "resume", "goes_on"),
    [
        # The same command again
        (SAME, "fail_stop", SAME, "auto", True),
        (SAME, "killed", SAME, "auto", True),
        (SAME, "terminated", SAME, "auto", True),
        (SAME, "error", SAME, "auto", False),
        (SAME, "interrupted", SAME, "auto", False),
        (SAME, "completed", SAME, "auto", False),
        # Another one, or one that is typed in
        (SAME, "fail_stop", OTHER, "auto", False),
        (SAME, "killed", OTHER, "auto", False),
        (TYPED, "fail_stop", TYPED, "auto", False),
        # A supervisor
        (RELAUNCH, "error", RELAUNCH, "auto", True),
        (RELAUNCH, "killed", {**RELAUNCH, **OTHER}, "auto", True),
        (REQUEUE, "terminated", REQUEUE, "auto", True),
        (REQUEUE, "completed", REQUEUE, "auto", True),  # what comes after the fit has failed
        (REQUEUE, "error", RELAUNCH, "auto", False),
        (NAMELESS, "error", NAMELESS, "auto", True),
        (NAMELESS, "completed", NAMELESS, "auto", False),
        (NAMELESS, "error", {**NAMELESS, **OTHER}, "auto", False),
        # By the user's will
        (SAME, "error", OTHER, "always", True),
        (SAME, "completed", SAME, "always", True),
        (TYPED, "interrupted", TYPED, "always", True),
    ],
)
def test_whether_it_goes_on(
    attempts: Attempts, first: Any, how: str, second: Any, resume: str, goes_on: bool, caplog: pytest.LogCaptureFixture
) -> None:
    one = attempts.begin(**first)
    assert attempts.chosen is None
    path = attempts.save(one, 5)
    end(one, how)
    two = attempts.begin(resume=resume, **second)
    assert attempts.chosen == (path if goes_on else None)
    assert (two.run == one.run) is goes_on
    assert ("going on with run" in caplog.text) is (goes_on or how != "completed")  # never in silence
    assert (f"not going on with run {one.run}" in caplog.text) is (not goes_on and how != "completed")
    two.release()


def test_an_error_of_one_rank_counts_although_its_peers_fail_stop(attempts: Attempts) -> None:
    one = attempts.begin()
    attempts.save(one, 5)
    end(one, "fail_stop")
    (record,) = Journal(attempts.root).run_folder(one.run).glob("end-*.json")
    other = json.loads(record.read_text()) | {"rank": 3, "kind": "error"}
    record.with_name("end-attempt0-rank3.json").write_text(json.dumps(other))
    attempts.begin().release()
    assert attempts.chosen is None


def test_only_the_last_attempts_end_counts(attempts: Attempts) -> None:
    one = attempts.begin(**RELAUNCH)
    path = attempts.save(one, 5)
    end(one, "error")
    end(attempts.begin(**RELAUNCH), "killed")
    attempts.begin().release()
    assert attempts.chosen == path


def test_the_newest_complete_and_exact_checkpoint_of_the_run(
    attempts: Attempts, caplog: pytest.LogCaptureFixture
) -> None:
    one = attempts.begin()
    good = attempts.save(one, 3)
    flipped, torn, gone = attempts.save(one, 8), attempts.save(one, 7), attempts.save(one, 6)
    inexact = attempts.save(one, 5, obstacle="in the middle")
    other, unreadable = attempts.save(one, 4), attempts.save(one, 9)
    (flipped / "weights").write_text((flipped / "weights").read_text()[::-1])
    (torn / checkpoint.MARKER).unlink()
    checkpoint.remove(gone)  # the Trainer keeps only some
    Journal(attempts.root).checkpoint(one.run, other)
    foreign = Marker.from_bytes(checkpoint.marker_bytes(other))
    (other / checkpoint.MARKER).write_bytes(Marker(**{**vars(foreign), "run": "another"}).to_bytes())
    (unreadable / checkpoint.MARKER).write_text("{")
    end(one, "killed")
    attempts.begin().release()
    assert attempts.chosen == good
    said = [line for line in caplog.messages if "passing over" in line]
    assert [next(path for path in (flipped, torn, inexact, unreadable) if str(path) in line) for line in said] == [
        torn, unreadable, flipped, inexact
    ]  # fmt: skip
    assert str(gone) not in caplog.text


@pytest.mark.parametrize("place", [checkpoint.replaced, checkpoint.staging])
def test_what_a_killed_writer_has_left_beside_its_place(attempts: Attempts, place: Any) -> None:
    one = attempts.begin()
    path = attempts.save(one, 3)
    path.rename(place(path))
    end(one, "killed")
    attempts.begin().release()
    assert attempts.chosen == place(path)


def test_a_named_checkpoint_always_wins(attempts: Attempts, caplog: pytest.LogCaptureFixture) -> None:
    one = attempts.begin()
    attempts.save(one, 5)
    end(one, "fail_stop")
    given = attempts.root / "mine.ckpt"
    attempts.begin(given).release()
    assert attempts.chosen == given
    assert "so its own checkpoints are not looked for" in caplog.text.replace(f"{one.run}'s", "its")


def test_each_fit_of_a_program_goes_on_with_its_own_run(attempts: Attempts) -> None:
    """A script that fits twice is killed in the second fit."""
    first = attempts.begin()
    pretrained = attempts.save(first, 5, name="first.ckpt")
    first.completed()
    second = attempts.begin(new=False)
    assert attempts.chosen is None
    tuned = attempts.save(second, 2, name="second.ckpt")
    end(second, "killed")
    attempts.begin().completed()
    assert attempts.chosen == pretrained
    attempts.begin(new=False).completed()
    assert attempts.chosen == tuned
    third = attempts.begin(new=False)
    assert attempts.chosen is None
    third.completed()
    attempts.begin().release()
    assert attempts.chosen is None


def test_a_run_that_is_still_going_on_is_left_alone(attempts: Attempts, caplog: pytest.LogCaptureFixture) -> None:
    """In another process: a lock does not hold against its own."""
    one = attempts.begin()
    attempts.save(one, 5)
    code = (
        f"from lightning_accelpact.restart import Restart; from lightning_accelpact.journal import Launch\n"
        f"one = Restart(resume='auto', root={str(attempts.root)!r}, rank=0, world_size=1, gather_json=lambda m: [m],"
        f" barrier=lambda: None, launch=Launch(command={COMMAND!r}))\n"
        "print(one.begin(None), one.run)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "None"
    assert done.stdout.split()[1] != one.run
    assert "it is still running" in done.stderr
    one.release()


def test_a_relaunch_waits_for_the_attempt_before(
    attempts: Attempts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = attempts.begin(**RELAUNCH)
    path = attempts.save(one, 5)
    looks = iter([False, False, True])
    monkeypatch.setattr(restart, "_locked", lambda file: next(looks))
    attempts.begin(**RELAUNCH).release()
    assert attempts.chosen == path
    monkeypatch.setattr(restart, "_locked", lambda file: False)
    monkeypatch.setattr(restart, "_LOCK_WAIT_S", 0.2)
    with pytest.raises(MisconfigurationException, match=f"run {one.run} is still going on"):
        attempts.begin(**RELAUNCH)


def test_where_nothing_can_be_locked(
    attempts: Attempts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(restart.fcntl, "lockf", fail)
    attempts.begin().release()
    assert "do not start the same run twice" in caplog.text


def test_another_number_of_ranks_is_refused(attempts: Attempts) -> None:
    one = attempts.begin()
    attempts.save(one, 5, world_size=8)
    end(one, "fail_stop")
    with pytest.raises(MisconfigurationException, match=r"was written by 8 ranks, but this run has 1.*start as many"):
        attempts.begin()


def test_nodes_that_see_different_folders_are_refused(attempts: Attempts) -> None:
    one = attempts.begin()
    attempts.save(one, 5)
    end(one, "fail_stop")
    restart._programs.clear()

    def gather(message: Any) -> list[Any]:
        if isinstance(message, list) and message and isinstance(message[-1], list):
            return [message, ["elsewhere", [{"digest": "", "there": False} for _ in message[-1]]]]
        return [message, message]

    two = Restart(resume="auto", root=attempts.root, rank=0, world_size=2, gather_json=gather, barrier=lambda: None,
                  launch=Launch(command=COMMAND))  # fmt: skip
    with pytest.raises(MisconfigurationException, match="rank 1 on elsewhere sees another checkpoint at .*step=5.ckpt"):
        two.begin(None)


def test_a_journal_that_cannot_be_read_is_refused_with_the_remedy(attempts: Attempts) -> None:
    folder = attempts.root / "accelpact"
    folder.mkdir()
    (folder / "runs.jsonl").write_text('{"kind": "begin", "run": "x"}\n')
    with pytest.raises(MisconfigurationException, match='cannot be used.*remove it, .* or pass resume="never"'):
        attempts.begin()


def test_a_folder_that_cannot_be_written_is_no_reason_not_to_train(
    attempts: Attempts, caplog: pytest.LogCaptureFixture
) -> None:
    (attempts.root / "accelpact").touch()
    one = attempts.begin()
    assert (attempts.chosen, one.run) == (None, "")
    assert "this run cannot be restarted" in caplog.text
    one.failed(ValueError(), update=1, incident=None)
    one.completed()
    with pytest.raises(MisconfigurationException, match="cannot be used"):
        attempts.begin(resume="always")


def test_a_relaunch_without_a_journal_says_so(attempts: Attempts, caplog: pytest.LogCaptureFixture) -> None:
    attempts.begin(**RELAUNCH).release()
    assert "has been relaunched 1 times, but no attempt has begun a run in" in caplog.text


def test_what_a_killed_writer_has_left_is_removed(attempts: Attempts) -> None:
    one = attempts.begin()
    path = attempts.save(one, 3)
    left = checkpoint.staging(path)
    left.mkdir()
    end(one, "killed")
    attempts.begin().release()
    assert attempts.chosen == path
    assert not left.exists()


def test_a_torn_line_of_the_journal_is_skipped(attempts: Attempts) -> None:
    one = attempts.begin()
    path = attempts.save(one, 5)
    with (attempts.root / "accelpact" / "runs.jsonl").open("a") as file:
        file.write('{"kind": "checkpoint", "ru')
    end(one, "killed")
    attempts.begin().release()
    assert attempts.chosen == path


@pytest.mark.parametrize(
    ("variables", "job", "restarts"),
    [
        ({}, "", 0),
        ({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2"}, "", 2),
        ({"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "1"}, "torchrun x", 1),
        ({"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "1", "SLURM_RESTART_COUNT": "3"}, "torchrun x", 4),
        ({"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "3"}, "slurm 12", 3),
        ({"SLURM_JOB_ID": "12"}, "slurm 12", 0),
    ],
)
def test_what_supervisors_tell(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], job: str, restarts: int
) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    launch = Launch.from_environment()
    assert (launch.job, launch.restarts) == (job, restarts)


def test_other_choices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"resume='maybe' must be one of \['auto', 'always', 'never'\]"):
        checked_resume("maybe")
