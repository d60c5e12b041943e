"""The sentinel: a small process beside each rank that says when the rank has died, is stopped, or cannot be heard.

A thread of the rank could not do this. A thread needs the interpreter's lock, so a rank that holds it for some seconds
would look dead, and with a stopped process all its threads are stopped. The sentinel is forked, so it costs no import and
little memory, and it does three things: it waits for the end of its rank, looks whether its rank is stopped, and exchanges
heartbeats with the sentinel of the next rank, which finds a node that is gone. What it finds it says as a stop notice.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from lightning_accelpact.recovery.control import ControlPlane, Notice
from lightning_accelpact.recovery.endpoint import Endpoint
from lightning_accelpact.recovery.line import ControlLost

_BEATS_PER_DEADLINE = 6
_LAST_WORDS_S = 10
_FAREWELL = b"x"
_LEFT = "left"
_STOPPED = frozenset("Tt")  # states in /proc/PID/stat: by a signal, by a debugger
_NAME = "accelpact-guard"  # in `top` and `ps -e`; the kernel keeps 15 characters


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What a sentinel is told.

    Args:
        endpoint: Where the control store is.
        rank: Global rank of its process.
        world_size: Number of ranks.
        deadline: Seconds of silence or standstill after which a rank counts as lost.
        connect: How long to wait for the control store.
    """

    endpoint: Endpoint
    rank: int
    world_size: int
    deadline: float
    connect: timedelta


class Missing:
    """Adds up how long something has been missing while somebody looked for it.

    Time in which nobody looked does not count: whoever was starved or stopped, together with its whole machine perhaps, has
    missed what was there.

    Args:
        interval: Seconds between two looks; of a longer break twice as much counts.
    """

    def __init__(self, interval: float) -> None:
        self._longest = 2 * interval
        self._looked = time.monotonic()
        self._seconds = 0.0

    def look(self, missing: bool) -> float:
        """Say what a look has found; returns for how many seconds it has been missing."""
        now = time.monotonic()
        self._seconds = self._seconds + min(now - self._looked, self._longest) if missing else 0.0
        self._looked = now
        return self._seconds


class Sentinel:
    """This rank's sentinel, from the rank's side.

    Args:
        watch: What it is told.
    """

    def __init__(self, watch: Watch) -> None:
        read, self._farewell = os.pipe()
        rank = os.getpid()
        self._pid = os.fork()
        if not self._pid:
            _stand_guard(watch, rank, read)
        os.close(read)

    def close(self, *, farewell: bool = True) -> None:
        """The rank leaves.

        Args:
            farewell: In good order; else its peers are told that it has ended without.
        """
        with suppress(BrokenPipeError):
            if farewell:
                os.write(self._farewell, _FAREWELL)
        os.close(self._farewell)
        with suppress(ChildProcessError, ProcessLookupError):  # somebody else has waited for it
            self._await_end()

    def _await_end(self) -> None:
        """Wait for the sentinel's process, which ends by itself unless somebody has stopped it."""
        end = os.pidfd_open(self._pid)
        ended = select.poll()
        ended.register(end, select.POLLIN)
        if not ended.poll(_LAST_WORDS_S * 1000):
            os.kill(self._pid, signal.SIGKILL)
        os.close(end)
        os.waitpid(self._pid, 0)


def _stand_guard(watch: Watch, rank: int, farewell: int) -> None:
    """The life of the sentinel's process; does not return."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM):  # meant for the rank, which then ends or says farewell
            signal.signal(number, signal.SIG_IGN)
        # A copy of the rank's connections would keep them open after its end
        os.closerange(3, farewell)
        os.closerange(farewell + 1, os.sysconf("SC_OPEN_MAX"))
        Path("/proc/self/comm").write_text(_NAME)
        _Guard(watch, rank, farewell).run()
    except (ControlLost, dist.DistError):
        pass  # the ranks' own monitors have lost the store as well, and say so
    except BaseException:  # nobody is left to hand it on to; the next rank's sentinel misses the beats of this one
        traceback.print_exc()
    finally:
        os._exit(0)


class _Guard:
    """Looks after its rank in the main thread, which never waits for the store: the rank may be the one that serves it."""

    def __init__(self, watch: Watch, rank: int, farewell: int) -> None:
        self._watch = watch
        self._rank = rank
        self._farewell = farewell
        self._end = os.pidfd_open(rank)
        self._interval = watch.deadline / _BEATS_PER_DEADLINE
        self._control = self._connect()
        self._stopped = Missing(self._interval)

    def _connect(self) -> ControlPlane:
        watch = self._watch
        endpoint = replace(watch.endpoint, hosted_here=False)
        return ControlPlane(endpoint=endpoint, rank=watch.rank, world_size=watch.world_size, deadline=watch.connect)

    def run(self) -> None:
        """Watch until there is nothing left to watch."""
        beats = Heartbeats(self._connect(), self._watch)
        threading.Thread(target=beats.run, args=(self._say,), daemon=True).start()
        while not self._rank_has_left():
            if self._standstill():
                # Nobody waits for it any more: it must not wake up and go on by itself
                os.kill(self._rank, signal.SIGKILL)
                signal.alarm(_LAST_WORDS_S)
                return self._obituary(f"its process {self._rank} was stopped for {self._watch.deadline:g} s")

    def _rank_has_left(self) -> bool:
        ready, _, _ = select.select([self._farewell, self._end], [], [], self._interval)
        if ready:
            signal.alarm(_LAST_WORDS_S)  # ends this process, also if the store does not answer
        if self._farewell in ready and os.read(self._farewell, 1) == _FAREWELL:
            self._control.publish(_beat_key(self._watch.rank), _LEFT)
        elif ready:
            self._obituary(f"its process {self._rank} has ended without a farewell")
        return bool(ready)

    def _standstill(self) -> bool:
        """Whether the rank has been stopped for too long."""
        try:
            state = Path(f"/proc/{self._rank}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):  # it has ended just now: the next look says so
            return False
        return self._stopped.look(state in _STOPPED) > self._watch.deadline - self._interval

    def _obituary(self, reason: str) -> None:
        """Its rank is gone: everybody stops, and the one that serves the store need not wait for it."""
        self._say(self._watch.rank, reason)
        self._control.say_closed()

    def _say(self, rank: int, reason: str) -> None:
        self._control.notify(Notice(generation=1, rank=rank, reason=reason, time=time.time(), stop=True))


class Heartbeats:
    """One sentinel's part in the ring: gives its own beat, and listens to the next rank's.

    Args:
        control: A connection of its own.
        watch: What the sentinel is told.
    """

    def __init__(self, control: ControlPlane, watch: Watch) -> None:
        self._control = control
        self._watch = watch
        self._next = (watch.rank + 1) % watch.world_size
        self._interval = watch.deadline / _BEATS_PER_DEADLINE
        self._last = 0
        self._missing = Missing(self._interval)

    def run(self, say: Callable[[int, str], None]) -> None:
        """Beat until the sentinel ends; says so once if the next rank falls silent."""
        beat = 0
        with suppress(ControlLost, dist.DistError):
            while (silence := self._silence()) <= self._patience():
                beat += 1
                self._control.publish(_beat_key(self._watch.rank), str(beat))
                time.sleep(self._interval)
            say(
                self._next,
                f"nothing has been heard of its sentinel for {silence:.1f} s (heartbeat_deadline="
                f"{self._watch.deadline:g} s): its node or link is gone, or {_NAME}, the process beside it, was stopped or"
                " got no time on a machine too busy; raise heartbeat_deadline then",
            )

    def _silence(self) -> float:
        """For how many seconds the next rank's beat has been missing."""
        beat = self._control.peek(_beat_key(self._next)) or "0"
        if beat == _LEFT:
            return self._missing.look(False)
        fresh = int(beat) > self._last  # an earlier one has been written again by somebody else
        self._last = max(self._last, int(beat))
        return self._missing.look(not fresh)

    def _patience(self) -> float:
        """Seconds; the first beat comes once its process has found the store."""
        deadline = self._watch.deadline
        return deadline if self._last else self._watch.connect.total_seconds() + deadline


def _beat_key(rank: int) -> str:
    return f"beat/{rank}"
