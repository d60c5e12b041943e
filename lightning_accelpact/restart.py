"""Fail-stop and restart (paper, level 2): a run goes on from its newest complete checkpoint in a new process."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from lightning_accelpact.journal import End, Journal, Launch, RunRecord, new_name
from lightning_accelpact.recovery import checkpoint as files
from lightning_accelpact.recovery.checkpoint import FileRecord, Marker
from lightning_accelpact.recovery.policy import FAIL_STOP_EXIT_CODE, FailStop

log = logging.getLogger("accelpact")

_LOCK_WAIT_S, _LOCK_LOOK_S = 15.0, 0.1  # for rank 0 of the attempt before to end; and how often to look

RESUME = ("auto", "always", "never")


def checked_resume(choice: str) -> str:
    """When to go on from a checkpoint without being told which, if it is one of the choices.

    Raises:
        ValueError: names the value and what is allowed.
    """
    if choice not in RESUME:
        raise ValueError(f"resume={choice!r} must be one of {list(RESUME)}")
    return choice


@dataclass(frozen=True)
class Program:
    """The runs of one process in one root folder.

    Args:
        name: Its name, also of the process that it was relaunched from.
        goes_on: Whether it goes on with that process's runs.
        runs: How many have begun in this process.
    """

    name: str
    goes_on: bool
    runs: int = 0


_programs: dict[Path, Program] = {}


@dataclass(kw_only=True)
class Plan:
    """What rank 0 tells all ranks at the start of a run.

    Args:
        run: The run's name.
        attempt: Which attempt at it begins, from 0.
        places: Folders in which to look for its checkpoints, in no order.
        reached: Updates that earlier attempts have applied.
        said: What is to be said aloud.
        refusal: Why it cannot begin; empty if it can.
    """

    run: str = ""
    attempt: int = 0
    places: list[str] = field(default_factory=list)
    reached: int = 0
    said: list[str] = field(default_factory=list)
    refusal: str = ""


class Restart:
    """One run's journal and checkpoints, on one rank.

    Args:
        resume: ``auto``, ``always`` or ``never``.
        root: The Trainer's ``default_root_dir``.
        rank: Global rank.
        world_size: Number of ranks.
        gather_json: One JSON value per rank on every rank, outside of an operation.
        barrier: Waits for all ranks, inside an operation.
        launch: How the process was started.
    """

    def __init__(
        self,
        *,
        resume: str,
        root: str | Path,
        rank: int,
        world_size: int,
        gather_json: Callable[[Any], list[Any]],
        barrier: Callable[[], None],
        launch: Launch | None = None,
    ) -> None:
        self._resume = resume
        self._journal = Journal(root)
        self._rank = rank
        self._world_size = world_size
        self._gather = gather_json
        self._barrier = barrier
        self._launch = launch or Launch.from_environment()
        self._lock: Any = None
        self._plan = Plan()
        self._newest: tuple[str, int] | None = None
        self._open = False

    @property
    def run(self) -> str:
        """The run's name; empty before :meth:`begin`."""
        return self._plan.run

    @property
    def reached(self) -> int:
        """Updates of the run that earlier attempts are known to have applied."""
        return self._plan.reached

    @property
    def folder(self) -> Path:
        """Where the run's records are."""
        return self._journal.run_folder(self.run)

    # -- the start

    def begin(self, given: str | Path | None) -> Path | None:
        """Begin the run, or another attempt at it; a collective call.

        Args:
            given: The checkpoint that the user has named.

        Returns:
            The checkpoint to go on from, the same on every rank. If no journal can be kept there is none, and
            :attr:`run` stays empty.

        Raises:
            MisconfigurationException: if it cannot begin, on every rank.
        """
        mine = vars(self._guarded_plan(given)) if self._rank == 0 else None
        self._plan = Plan(**self._gather(mine)[0])
        if self._plan.refusal:
            raise MisconfigurationException(f"accelpact_hsdp: {self._plan.refusal}")
        self._open = bool(self.run)
        for line in self._plan.said:
            self._say(line)
        if given is not None:
            return Path(given)
        return self._newest_complete() if self.run else None

    def _guarded_plan(self, given: str | Path | None) -> Plan:
        try:
            return self._make_plan(given)
        except OSError as error:
            if self._resume != "auto" or self._journal.exists:
                return self._refusal(error)
            return Plan(said=[f"this run cannot be restarted: {self._journal.folder} cannot be written: {error}"])
        except (KeyError, TypeError, ValueError) as error:
            return self._refusal(error)

    def _refusal(self, error: Exception) -> Plan:
        remedy = 'remove it, choose another default_root_dir, or pass resume="never"'
        return Plan(refusal=f"the journal in {self._journal.folder} cannot be used: {error!r}; {remedy}")

    def _make_plan(self, given: str | Path | None) -> Plan:
        runs = self._journal.runs()
        program, said = self._program(runs)
        _programs[self._journal.folder] = Program(program.name, program.goes_on, program.runs + 1)
        earlier = [run for run in runs if (run.program, run.ordinal) == (program.name, program.runs)]
        record = earlier[-1] if earlier else RunRecord(
            run=new_name(), program=program.name, ordinal=program.runs, job=self._launch.job,
            command=self._launch.command, began_from="" if given is None else str(given),
        )  # fmt: skip
        if not self._take_lock(record.run):
            return Plan(refusal=f"run {record.run} is still going on; let it end, or use another default_root_dir")
        plan = Plan(run=record.run, attempt=record.attempts, reached=self._journal.reached(record), said=said)
        if given is None:
            plan.places = [str(place) for path in record.checkpoints for place in files.places(Path(path))]
        elif record.checkpoints:
            plan.said.append(f"ckpt_path={given} was given, so {record.run}'s own checkpoints are not looked for")
        self._journal.begin(record)
        return plan

    def _program(self, runs: list[RunRecord]) -> tuple[Program, list[str]]:
        """Whose runs these are, and what to say about it."""
        known = _programs.get(self._journal.folder)
        if known is not None:
            return known, []
        last = runs[-1] if runs else None
        if last is None:
            lost = (
                f"the job has been relaunched {self._launch.restarts} times, but no attempt has begun a run in"
                f" {self._journal.folder}: starting from the first update"
            )
            return Program(new_name(), goes_on=False), [lost] if self._launch.restarts else []
        goes_on, why = self._goes_on(last)
        if goes_on:
            return Program(last.program, goes_on=True), [f"going on with run {last.run}: {why}"]
        said = (
            f"not going on with run {last.run} in {self._journal.folder}: {why}; to do so, pass"
            ' resume="always" or one of its checkpoints as ckpt_path'
        )
        return Program(new_name(), goes_on=False), [said] if last.checkpoints and not last.completed else []

    def _goes_on(self, last: RunRecord) -> tuple[bool, str]:
        """Whether this process goes on with the last run of the root folder, and why (not)."""
        launch = self._launch
        same_command = launch.command == last.command
        if self._resume == "always":
            return True, 'resume="always"'
        if launch.restarts and (launch.job == last.job if launch.job else same_command and not last.completed):
            return True, f"the job has been relaunched {launch.restarts} times"
        if self._is_running(last):
            return False, "it is still running"
        if last.completed:
            return False, "it is done"
        kind = _how(self._journal.ends(last))
        if kind in ("error", "interrupted"):
            return False, f"it ended with: {kind}"
        if launch.interactive:
            return False, "this session is interactive"
        return same_command, f"it ended with: {kind}" if same_command else "its command was another one"

    def _is_running(self, run: RunRecord) -> bool:
        """Whether its rank 0 is alive, on this machine or on another one that shares the folder."""
        path = self._journal.run_folder(run.run) / "lock"
        if not path.exists():
            return False
        with path.open("r+") as file:
            return not _locked(file)

    def _take_lock(self, run: str) -> bool:
        """Hold it until the process ends: a record lock, since forked processes do not inherit those."""
        self.release()
        path = self._journal.run_folder(run) / "lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = path.open("w")
        until = time.monotonic() + _LOCK_WAIT_S
        while not _locked(self._lock):
            if time.monotonic() > until:
                return False
            time.sleep(_LOCK_LOOK_S)
        return True

    def release(self) -> None:
        """Another process may go on with the run."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # -- which checkpoint

    def _newest_complete(self) -> Path | None:
        """The newest of the run's checkpoints that every rank finds complete."""
        for path, marker in self._candidates():
            why = marker.obstacle or "; ".join(self._damage(path, marker))
            if not why:
                self._say(f"resuming from {path} at update {marker.update}")
                return path
            self._say(f"passing over checkpoint {path}: {why}")
        if self._plan.attempt:
            self._say("there is no complete checkpoint to go on from: starting again from the first update")
        return None

    def _candidates(self) -> list[tuple[Path, Marker]]:
        """Checkpoints of this run with a marker, the newest first.

        Raises:
            MisconfigurationException: if ranks see different ones, or one is of another number of ranks.
        """
        found: list[tuple[Path, Marker]] = []
        contents = {place: files.marker_bytes(Path(place)) for place in self._plan.places}
        mine = [
            {"digest": hashlib.sha256(content).hexdigest() if content else "", "there": Path(place).is_dir()}
            for place, content in contents.items()
        ]
        seen = self._gather([socket.gethostname(), mine])
        for number, (place, content) in enumerate(contents.items()):
            self._require_the_same(place, [(host, one[number]) for host, one in seen])
            if content is None:
                if mine[number]["there"]:
                    self._say(f"passing over checkpoint {place}: it was never completed")
                    self._clear(Path(place))
                continue
            try:
                marker = Marker.from_bytes(content)
            except ValueError as error:
                self._say(f"passing over checkpoint {place}: its {files.MARKER} cannot be read: {error}")
                continue
            if marker.run == self.run:
                found.append((Path(place), self._of_this_size(place, marker)))
        return sorted(found, key=lambda one: (one[1].update, one[1].time), reverse=True)

    def _clear(self, place: Path) -> None:
        """Remove what a killed writer has left, unless somebody else has put it there."""
        if self._rank == 0 and place.name.endswith(files.UNFINISHED):
            files.remove(place)

    def _require_the_same(self, place: str, seen: list[tuple[str, Any]]) -> None:
        for rank, (host, one) in enumerate(seen):
            if one != seen[0][1]:
                raise MisconfigurationException(
                    f"accelpact_hsdp: rank {rank} on {host} sees another checkpoint at {place} than rank 0 on"
                    f" {seen[0][0]}: let all nodes write checkpoints to a folder that they share, or pass"
                    ' resume="never"'
                )

    def _of_this_size(self, place: str, marker: Marker) -> Marker:
        if marker.world_size != self._world_size:
            raise MisconfigurationException(
                f"accelpact_hsdp: checkpoint {place} was written by {marker.world_size} ranks, but this run has"
                f" {self._world_size}, so it cannot go on bit for bit: start as many, or pass it as ckpt_path to take"
                ' weights and optimizer over, or pass resume="never" to begin anew'
            )
        return marker

    def _damage(self, path: Path, marker: Marker) -> list[str]:
        """What is wrong with its files, as all ranks have found together."""
        mine = files.damage(path, marker, files.share(marker.files, self._rank, self._world_size))
        return [fault for found in self._gather(mine) for fault in found]

    # -- writing and reading one

    def write(
        self, path: Path, save: Callable[[Path], None], position: dict[str, Any], *, update: int, obstacle: str
    ) -> None:
        """Write a checkpoint; inside an operation of all ranks, which may run it again.

        Args:
            path: Where it belongs.
            save: Lightning's own part.
            position: This rank's.
            update: Updates of the run that are in it.
            obstacle: Why training cannot go on from it bit for bit; empty if it can.
        """
        folder = files.staging(path)
        if self._rank == 0:
            self._journal.checkpoint(self.run, path.absolute())
            files.remove(folder)
        self._barrier()
        save(folder)
        torch.save(position, folder / _position_file(self._rank))
        self._barrier()
        records = self._digests(folder, self._told(files.file_names(folder) if self._rank == 0 else None))
        if self._rank == 0:
            marker = Marker(run=self.run, update=update, world_size=self._world_size, obstacle=obstacle,
                            time=time.time(), files=records)  # fmt: skip
            files.complete(folder, path, marker)
        self._barrier()
        self._newest = (str(path), update)

    def _told(self, message: Any) -> Any:
        """Rank 0's object on every rank."""
        messages = [message]
        dist.broadcast_object_list(messages, src=0)
        return messages[0]

    def _digests(self, folder: Path, names: list[str]) -> dict[str, FileRecord]:
        """Of all files, each read by one rank.

        Raises:
            MisconfigurationException: on every rank, if one does not see a file.
        """
        mine: dict[str, Any] = {}
        for name in files.share(names, self._rank, self._world_size):
            try:
                mine[name] = asdict(FileRecord.of(folder / name))
            except OSError as error:
                mine[name] = f"rank {self._rank} on {socket.gethostname()}: {error}"
        seen: list[Any] = [None] * self._world_size
        dist.all_gather_object(seen, mine)
        found = {name: record for one in seen for name, record in one.items()}
        unseen = [record for record in found.values() if isinstance(record, str)]
        if unseen:
            raise MisconfigurationException(
                f"accelpact_hsdp: a checkpoint's files are not to be seen on every node ({unseen[0]}): let all nodes"
                ' write to a folder that they share, or pass resume="never"'
            )
        return {name: FileRecord(**found[name]) for name in names}

    def went_on_from(self, path: Path, update: int) -> None:
        """Remember it for the record of an end."""
        self._newest = (str(path), update)

    # -- the end

    def completed(self) -> None:
        """The run is done, unless it has :meth:`failed`."""
        if self._open and self._rank == 0:
            self._journal.completed(self.run)
        self._close()

    def _close(self) -> None:
        self._open = False
        self.release()

    def failed(self, error: BaseException, *, update: int, incident: dict[str, Any] | None) -> None:
        """Write down how this rank ends.

        Args:
            error: What it ends with.
            update: Updates of the run that it has applied.
            incident: Its last incident.
        """
        if not self._open:
            return
        path, kept = self._newest or ("", 0)
        end = End(
            kind=_kind(error), run=self.run, attempt=self._plan.attempt, rank=self._rank, world_size=self._world_size,
            time=time.time(), exit_code=FAIL_STOP_EXIT_CODE if isinstance(error, FailStop) else None,
            reason=str(error) or type(error).__name__, update=update, incident=incident,
            checkpoint={"path": path, "update": kept, "replays": update - kept} if path else None,
        )  # fmt: skip
        try:
            log.error("the record of this end: %s", self._journal.write_end(end))
        except OSError as failure:
            log.error("the record of this end could not be written: %s", failure)
        self._close()

    def _say(self, line: str) -> None:
        if self._rank == 0:
            log.warning("accelpact_hsdp: %s", line)


def read_position(path: Path, *, rank: int, world_size: int) -> tuple[dict[str, Any], int] | None:
    """This rank's position in a checkpoint, and the updates in it; ``None`` if there is none for it.

    Raises:
        ValueError: if the marker is damaged.
        OSError: if the file cannot be read.
    """
    content = files.marker_bytes(path)
    if content is None:
        return None
    marker = Marker.from_bytes(content)
    if marker.world_size != world_size:
        if rank == 0:
            log.warning(
                "accelpact_hsdp: checkpoint %s was written by %d ranks: generators and the place in the data are not"
                " taken over", path, marker.world_size,
            )  # fmt: skip
        return None
    return torch.load(path / _position_file(rank), map_location="cpu", weights_only=True), marker.update


def _position_file(rank: int) -> str:
    return f"accelpact-rank{rank}.pt"


def _kind(error: BaseException) -> str:
    if isinstance(error, FailStop):
        return "fail_stop"
    if isinstance(error, SIGTERMException):
        return "terminated"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "error"


def _how(ends: list[End]) -> str:
    """How an attempt ended, given what its ranks have said; a cause goes before what it brings about."""
    kinds = {end.kind for end in ends}
    return next((kind for kind in ("error", "interrupted", "terminated", "fail_stop") if kind in kinds), "killed")


def _locked(file: Any) -> bool:
    """Try to lock it; where the file system knows no locks, nobody can tell, and it counts as locked."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        log.warning("accelpact_hsdp: %s cannot be locked (%s): do not start the same run twice", file.name, error)
    return True
