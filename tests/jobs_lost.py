"""A fit in which something happens to the process of one rank, not by its own doing."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

import jobs
import lightning.pytorch as pl


class Witness(pl.Callback):
    """Writes down what becomes of this rank, and lets something happen to it.

    Args:
        folder: Where each rank writes its child processes, when it struck, and when each ended.
        what: What happens to the victim in its fourth update: ``kill``, ``stop``, ``hold`` (the interpreter's lock, for
            5 s), ``freeze`` (its whole job is stopped for 5 s, sentinels and all), ``slow`` (2 s in every update), or
            ``nothing``.
        victim: Whom it happens to.
    """

    def __init__(self, folder: str, what: str, victim: int) -> None:
        self._what = what if int(os.environ["RANK"]) == victim else "nothing"
        self._struck = Path(folder, "struck")
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
        self._folder = Path(folder)
        self._note = lambda: Path(folder, f"children{os.environ['RANK']}").write_text(children.read_text())

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self._note()
        if self._what == "slow":
            time.sleep(1.0)
        if trainer.global_step == 3 and self._what != "nothing":
            getattr(self, f"_{self._what}", lambda: None)()

    def _kill(self) -> None:
        self._struck.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    def _stop(self) -> None:
        self._struck.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGSTOP)

    def _hold(self) -> None:
        self._what = "nothing"
        ctypes.PyDLL(None).sleep(5)  # does not let go of the lock


    def _freeze(self) -> None:
        """Another process stops them all, as a machine that is suspended would."""
        self._what = "nothing"
        sentinels = [int(pid) for file in self._folder.glob("children*") for pid in file.read_text().split()]
        ranks = [int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in sentinels]
        if not os.fork():
            for number, seconds in ((signal.SIGSTOP, 5.0), (signal.SIGCONT, 0.0)):
                for pid in (*ranks, *sentinels):
                    os.kill(pid, number)
                time.sleep(seconds)
            os._exit(0)


def fit(folder: str, what: str, victim: int, options: dict[str, Any]) -> dict[str, Any]:
    """:func:`jobs.fit` with a :class:`Witness`; a fail-stop says when it came."""
    try:
        return jobs.fit(trainer_options={"callbacks": [Witness(folder, what, victim)]}, **options)
    finally:
        Path(folder, f"ended{os.environ['RANK']}").write_text(str(time.time()))
