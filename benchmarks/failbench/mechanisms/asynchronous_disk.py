"""FT3: checkpoints on disk at an interval, written in the background."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from benchmarks.failbench.mechanisms.periodic_disk import PeriodicDisk


class AsynchronousDisk(PeriodicDisk):
    """Training stands still for a copy in memory alone; a thread writes that, one checkpoint at a time."""

    _writing: Future[None] | None = None

    def save(self) -> None:
        self._wait()
        if not hasattr(self, "_writer"):
            self._writer = ThreadPoolExecutor(1)
        copy = self.architecture.state().clone()
        self._writing = self._writer.submit(self.write, copy)

    def close(self) -> None:
        self._wait()

    def _wait(self) -> None:
        """For the last checkpoint, so that no more than one copy is held.

        Raises:
            OSError: if it could not be written.
        """
        if self._writing is not None:
            self._writing.result()
