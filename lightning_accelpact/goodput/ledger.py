"""Where every second of one process went, and the append-only file that keeps such records."""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import time
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any


class TimeClass(str, Enum):
    """What a second was spent on. All but ``PRODUCTIVE`` are badput.

    The first eleven names are those of Google's goodput accounting, so that reports of both can be compared.
    """

    # Between the start and the end of a micro-batch, minus everything below that happens inside it
    PRODUCTIVE = "productive"
    # From the Trainer's setup until the strategy has set up model and optimizer
    INITIALIZATION = "initialization"
    # From there until the first training epoch begins: restored progress, loaders, hooks
    TRAINING_PREP = "training_prep"
    # From the start of the process until setup: imports, launch, process groups
    PROGRAM_STARTUP = "program_startup"
    # Between two micro-batches: the loader, the transfer to the device, other callbacks and loggers
    DATA_LOADING = "data_loading"
    # While a checkpoint is being written
    CHECKPOINT_SAVE = "checkpoint_save"
    # While a checkpoint is being read
    CHECKPOINT_RESTORE = "checkpoint_restore"
    # Work of an earlier attempt that its last checkpoint did not keep
    WASTED_PROGRESS = "wasted_progress"
    # From the end of one attempt until the program of the next one starts
    INFRASTRUCTURE_RECOVERY = "infrastructure_recovery"
    # Whatever the user's own code puts here
    CUSTOM = "custom"
    # Outside of a fit, and what has no class of its own
    OTHER = "other"
    # From a fault until this rank observed it
    DETECTION = "detection"
    # From the observation until the replacement communicators are released
    GROUP_REPAIR = "group_repair"
    # Work that a REDO threw away: the micro-batches of the interrupted update, up to the fault
    REDONE_WORK = "redone_work"
    # Running updates again that had been committed before a RESTART
    REPLAYED_UPDATES = "replayed_updates"
    # While application state moves from a replica peer during a HEAL
    STATE_TRANSFER = "state_transfer"
    # The boundary guard and its vote, in every update
    GUARD = "guard"
    # Running on with fewer ranks than the run was started with
    DEGRADED_WORLD = "degraded_world"
    # Validation, the sanity check included
    EVALUATION = "evaluation"


class Ledger:
    """Puts every second of one process into exactly one :class:`TimeClass`.

    A base class, set by :meth:`switch`, holds whenever no :meth:`span` is open. Spans nest and are exclusive: while
    the inner one runs, the outer one stands still. At any moment the totals add up to :attr:`elapsed` (to within the
    rounding of float sums). Entering, leaving and switching cost about a microsecond.

    One thread writes at a time: a thread that runs while the owner waits for it (autograd's) may, a monitor may not.

    Args:
        clock: Returns seconds on a scale that never goes back.
        base: The class that holds until the first :meth:`switch`.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, base: TimeClass = TimeClass.PROGRAM_STARTUP
    ) -> None:
        self._clock = clock
        self._start = self._charged = clock()
        self._totals = dict.fromkeys(TimeClass, 0.0)
        # The base class, then the open spans from the outermost to the innermost; time goes to the last one
        self._stack = [base]

    def switch(self, cls: TimeClass) -> None:
        """Set the base class from now on. Open spans stay open; it holds once the outermost of them is left."""
        self._charge()
        self._stack[0] = cls

    def span(self, cls: TimeClass) -> Span:
        """A context manager that counts the time inside as ``cls``. Left by an exception it still ends there."""
        return Span(self, cls)

    def move(self, source: TimeClass, target: TimeClass, seconds: float) -> float:
        """Reclassify time already counted, as a REDO does: productive work it threw away becomes redone work.

        Args:
            source: The class the time was counted as.
            target: The class it belongs to.
            seconds: How much to move; no more than ``source`` holds is taken.

        Returns:
            The seconds moved.

        Raises:
            ValueError: if ``seconds`` is negative, infinite or not a number.
        """
        _check_seconds(seconds, "move()")
        self._charge()
        moved = min(seconds, self._totals[source])
        self._totals[source] -= moved
        self._totals[target] += moved
        return moved

    def backdate(self, cls: TimeClass, seconds: float) -> None:
        """Count ``seconds`` before the ledger was made as ``cls``, for example the imports that came before it.

        Raises:
            ValueError: if ``seconds`` is negative, infinite or not a number.
        """
        _check_seconds(seconds, "backdate()")
        self._start -= seconds
        self._totals[cls] += seconds

    def totals(self) -> dict[TimeClass, float]:
        """Seconds of every class, those of the open span up to now included."""
        self._charge()
        return dict(self._totals)

    @property
    def elapsed(self) -> float:
        """Seconds that the ledger accounts for, up to now."""
        return self._clock() - self._start

    @property
    def goodput(self) -> float:
        """Productive share of the elapsed time, 0 to 1; 0 before any time has passed."""
        self._charge()
        elapsed = self._charged - self._start
        return self._totals[TimeClass.PRODUCTIVE] / elapsed if elapsed > 0 else 0.0

    def _charge(self) -> None:
        """Give the time since the last call to the class that holds now."""
        now = self._clock()
        self._totals[self._stack[-1]] += now - self._charged
        self._charged = now

    def _enter(self, cls: TimeClass) -> None:
        self._charge()
        self._stack.append(cls)

    def _leave(self) -> None:
        self._charge()
        self._stack.pop()


class Span:
    """One open class of a :class:`Ledger`; made by :meth:`Ledger.span`."""

    __slots__ = ("_cls", "_ledger")

    def __init__(self, ledger: Ledger, cls: TimeClass) -> None:
        self._ledger = ledger
        self._cls = cls

    def __enter__(self) -> None:
        self._ledger._enter(self._cls)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ledger._leave()


def _check_seconds(seconds: float, caller: str) -> None:
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"{caller} needs finite seconds of at least 0, got {seconds!r}; swap the classes to move back")


def process_age() -> float:
    """Seconds since this program was started, as far as that can be known.

    ``exec`` keeps the start time of a process, and nothing tells when it was called. So a shell that runs
    ``pip install ... && python train.py`` and becomes Python in the end would pass its own time on. But it has waited
    for its commands: a process that has waited for a child counts from the loading of :mod:`logging` instead, which is
    among the first things that torch and Lightning import. So does one without ``/proc``.
    """
    since_logging = max(0.0, logging.makeLogRecord({}).relativeCreated / 1e3)
    try:
        stat = Path("/proc/self/stat").read_text()
    except OSError:
        return since_logging
    # Field 22, in clock ticks since boot; the fields are counted from behind the name, which may hold blanks
    ticks = int(stat[stat.rindex(")") :].split()[20])
    since_start = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    has_waited = any(resource.getrusage(resource.RUSAGE_CHILDREN))
    return min(since_start, since_logging) if has_waited else since_start


def append_jsonl(path: str | Path, records: Iterable[Mapping[str, Any]], *, durable: bool = True) -> None:
    """Append one JSON line per record; missing parent directories are made.

    If the last writer died within a line, the new records begin on a line of their own, so no more than the torn one
    is lost. Nothing is written if one of the records cannot be.

    Args:
        path: The file.
        records: Plain JSON values.
        durable: Force them to disk, so that they outlive the machine; without it, they outlive the process alone.

    Raises:
        ValueError: if a record holds NaN or infinity.
        TypeError: if a record holds something that JSON has no form for.
        OSError: if the file cannot be written.
    """
    lines = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records).encode()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell() and _last_byte(file) != b"\n":
            lines = b"\n" + lines
        file.write(lines)
        file.flush()
        if durable:
            os.fsync(file.fileno())


def _last_byte(file: Any) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read(1)


def read_jsonl(path: str | Path) -> tuple[list[dict[str, Any]], int]:
    """Read what :func:`append_jsonl` wrote.

    Returns:
        The records, and how many lines were skipped because a writer died within them.

    Raises:
        OSError: if the file cannot be read.
    """
    lines = [line for line in Path(path).read_bytes().split(b"\n") if line.strip()]
    records = [record for record in map(_parse, lines) if record is not None]
    return records, len(lines) - len(records)


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record in one line, or None if the line is torn."""
    try:
        record = json.loads(line)
    except ValueError:  # no JSON, or (UnicodeDecodeError) not even text
        return None
    return record if isinstance(record, dict) else None
