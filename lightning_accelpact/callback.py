"""Goodput accounting for a fit: live in the progress bar, summarised at its end, kept as JSON lines."""

from __future__ import annotations

import math
import time
import warnings
from array import array
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback, RichProgressBar
from rich.console import Console

from lightning_accelpact.goodput import (
    GoodputSummary,
    Ledger,
    TimeClass,
    append_jsonl,
    process_age,
    render,
    summarize,
)

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_accelpact.recovery.incident import Incident

# Logging a value costs the better part of a millisecond, too much for every micro-batch
_SHOW_EVERY_S = 1.0


class GoodputCallback(Callback):
    """Says at the end of a fit what the time went to, what the faults cost and what recovery from memory saved.

    It sets the base class of the ledger at the Trainer's hooks (see :class:`~.goodput.TimeClass` for when each class
    holds) and issues no collective of its own. From the strategy it takes what it finds there:

    * ``ledger``: the :class:`~.goodput.Ledger` to write to; without one the callback keeps its own.
    * ``incidents``: ``list[Incident]``, those of this rank. The detection and the redone work that a new one states
      are taken out of the ledger's productive time at the end of its micro-batch, so the strategy must not do so.
    * ``committed_updates``: the committed frontier; else ``trainer.global_step``.
    * ``gather_json(obj) -> list | None``: every rank's object; without it, or if it gives None, the summary covers
      this rank alone and says so.

    Time inside ``strategy.save_checkpoint`` and ``strategy.load_checkpoint`` has no pair of hooks around it: a
    strategy counts it by wrapping them in ``ledger.span(TimeClass.CHECKPOINT_SAVE)`` and ``CHECKPOINT_RESTORE``.
    Under any other strategy it stays in the surrounding class. A checkpoint counts as the one to restart from as soon
    as its writing begins.

    The totals run from the start of the process, over all fits of one Trainer. The time before the setup goes to the
    first Trainer of the process. What other callbacks do at the end of training, such as to write a last checkpoint, is
    in the summary; what the module does in its own ``on_train_end``, and what comes later, is not.

    Args:
        print_summary: Print the summary on rank 0: after the fit, or, if it ends with an error, what rank 0 knows
            by itself.
        log_dir: Folder for one file of JSON lines per rank, ``goodput-rank<rank>.jsonl``, made if missing and
            appended to: a record of ``"kind": "incident"`` for each incident at the end of its micro-batch, and one
            of ``"kind": "summary"`` at the end. None: no file. A file that cannot be written is a warning.
        restart_seconds: What it takes to relaunch the job and reload a checkpoint, for the estimate of the time
            saved. None counts 0 s and makes the estimate a lower bound.
        progress_bar_metric: Show the goodput of this rank so far as ``goodput`` in the progress bar, renewed once a
            second.

    Raises:
        ValueError: if ``restart_seconds`` is negative or not finite.
    """

    # Whether the time before the setup has been counted: once per process, not once per Trainer
    _startup_counted = False

    def __init__(
        self,
        *,
        print_summary: bool = True,
        log_dir: str | Path | None = None,
        restart_seconds: float | None = None,
        progress_bar_metric: bool = True,
    ) -> None:
        if restart_seconds is not None and not (math.isfinite(restart_seconds) and restart_seconds >= 0):
            raise ValueError(
                f"restart_seconds must be a finite number of seconds of at least 0, got {restart_seconds!r};"
                " leave it None if the time of a relaunch and reload is unknown"
            )
        self.print_summary = print_summary
        self.log_dir = None if log_dir is None else Path(log_dir)
        self.restart_seconds = restart_seconds
        self.progress_bar_metric = progress_bar_metric
        self.summary: GoodputSummary | None = None
        self._after_all = _AfterAll(self._conclude_together)
        self._fitting = False
        self._resumed = False
        self._shown_at = -math.inf
        self._begin(Ledger())

    def _begin(self, ledger: Ledger) -> None:
        """Account for a Trainer from its start."""
        self._ledger = ledger
        # Updates committed since then, and the frontier from which this fit's are counted on
        self._updates = 0
        self._origin: int | None = None
        # Productive seconds of each update; the frontier and the productive total up to which they are known
        self._update_seconds = array("d")
        self._timed = (0, 0.0)
        # (frontier, wall clock) of every checkpoint that a restart could begin from
        self._checkpoints: list[tuple[int, float]] = []
        self._incidents: list[dict[str, Any]] = []
        self._newest: Incident | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Bind to the strategy's ledger and end the program's startup."""
        ledger = getattr(trainer.strategy, "ledger", self._ledger)
        if ledger is not self._ledger:
            self._begin(ledger)
        self._fitting = stage == "fit"
        self._resumed = False
        self.summary = None
        self._shown_at = -math.inf
        if not GoodputCallback._startup_counted:
            GoodputCallback._startup_counted = True
            self._ledger.backdate(TimeClass.PROGRAM_STARTUP, max(0.0, process_age() - self._ledger.elapsed))
        self._ledger.switch(TimeClass.INITIALIZATION)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The strategy has set up model and optimizer."""
        self._ledger.switch(TimeClass.TRAINING_PREP)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember where training begins, and whether it is at a checkpoint."""
        if self._after_all not in trainer.callbacks:
            trainer.callbacks.append(self._after_all)
        frontier = _frontier(trainer)
        if self._origin is not None and frontier < self._origin + self._updates:
            self._checkpoints.clear()  # this fit counts from 0 again, and they bear the numbers of the last one
        if self._resumed:
            self._checkpoints.append((frontier, time.time()))
        self._origin = frontier - self._updates
        self._timed = (frontier, self._ledger.totals()[TimeClass.PRODUCTIVE])
        self._ledger.switch(TimeClass.DATA_LOADING)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """A micro-batch has arrived."""
        self._ledger.switch(TimeClass.PRODUCTIVE)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A micro-batch is done, with all that had to be run again for it."""
        self._ledger.switch(TimeClass.DATA_LOADING)
        self._take_in_incidents(trainer)
        self._time_update(_frontier(trainer))
        if self.progress_bar_metric and trainer.progress_bar_callback is not None:
            self._show_goodput(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The validation loop begins."""
        self._ledger.switch(TimeClass.EVALUATION)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The validation loop is over."""
        self._ledger.switch(TimeClass.TRAINING_PREP if trainer.sanity_checking else TimeClass.DATA_LOADING)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Remember the frontier of a checkpoint that training could resume from (not of weights alone)."""
        self._checkpoints.append((_frontier(trainer), time.time()))

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Training will begin at the checkpoint's frontier."""
        self._resumed = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last micro-batch is done."""
        self._ledger.switch(TimeClass.OTHER)

    def _conclude_together(self, trainer: Trainer) -> None:
        """Put all ranks' records together, while the strategy can still reach them."""
        gather = getattr(trainer.strategy, "gather_json", None)
        record = self._record(trainer)
        self._conclude(trainer, (gather(record) if gather else None) or [record])

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Conclude with what this rank knows: its peers may be gone, and no teardown hook follows an error."""
        if self._fitting and self.summary is None:
            self._conclude(trainer, [self._record(trainer)])
        self._print(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Print the summary of a fit."""
        self._ledger.switch(TimeClass.OTHER)
        self._print(trainer)

    def _time_update(self, frontier: int) -> None:
        timed, before = self._timed
        if frontier > timed:
            productive = self._ledger.totals()[TimeClass.PRODUCTIVE]
            self._update_seconds.append((productive - before) / (frontier - timed))
            self._timed = (frontier, productive)

    def _show_goodput(self, pl_module: LightningModule) -> None:
        elapsed = self._ledger.elapsed
        if elapsed >= self._shown_at + _SHOW_EVERY_S:
            self._shown_at = elapsed
            pl_module.log("goodput", self._ledger.goodput, prog_bar=True, logger=False, on_step=True, on_epoch=False)

    def _conclude(self, trainer: Trainer, records: list[dict[str, Any]]) -> None:
        self.summary = summarize(records, restart_s=self.restart_seconds)
        self._append(trainer, [{"kind": "summary", "time": time.time(), **self.summary.to_dict()}])

    def _print(self, trainer: Trainer) -> None:
        """Print the summary, once, on rank 0."""
        fitted, self._fitting = self._fitting, False
        if not (fitted and self.summary and self.print_summary and trainer.is_global_zero):
            return
        bar = trainer.progress_bar_callback
        # A live bar draws itself once more when it stops, which without this would be below the summary
        if isinstance(bar, RichProgressBar) and bar.progress is not None:
            bar.progress.stop()
        Console().print(render(self.summary))

    def _record(self, trainer: Trainer) -> dict[str, Any]:
        """This rank's part of the summary as plain JSON values."""
        self._take_in_incidents(trainer)
        if self._origin is not None:
            self._updates = _frontier(trainer) - self._origin
        totals = self._ledger.totals()
        return {
            "rank": trainer.global_rank,
            "world_size": trainer.world_size,
            "elapsed": sum(totals.values()),
            "totals": {cls.value: seconds for cls, seconds in totals.items()},
            "updates": self._updates,
            "update_s": median(self._update_seconds) if self._update_seconds else 0.0,
            "incidents": self._incidents,
        }

    def _take_in_incidents(self, trainer: Trainer) -> None:
        """Account for the incidents that are new since the last call, and log them."""
        incidents = _incidents(trainer)
        if not incidents or incidents[-1] is self._newest:
            return
        begin = next((number for number, one in enumerate(incidents, start=1) if one is self._newest), 0)
        self._newest = incidents[-1]
        new = [self._take_in(incident) for incident in incidents[begin:]]
        self._incidents += new
        self._append(trainer, [{"kind": "incident", **record} for record in new])

    def _take_in(self, incident: Incident) -> dict[str, Any]:
        """The incident with the frontier of the newest checkpoint that existed when it happened."""
        self._ledger.move(TimeClass.PRODUCTIVE, TimeClass.DETECTION, incident.detect_s)
        self._ledger.move(TimeClass.PRODUCTIVE, TimeClass.REDONE_WORK, incident.redo_s)
        earlier = [
            update for update, when in self._checkpoints if when <= incident.time and update <= incident.frontier
        ]
        return {**incident.to_dict(), "checkpoint": max(earlier, default=None)}

    def _append(self, trainer: Trainer, records: list[dict[str, Any]]) -> None:
        if self.log_dir is None:
            return
        path = self.log_dir / f"goodput-rank{trainer.global_rank}.jsonl"
        try:
            append_jsonl(path, records)
        except OSError as error:
            # A full disk must neither end a training that is fine nor, in on_exception, keep the strategy from its own
            warnings.warn(f"{len(records)} goodput records could not be written to {path}: {error}", stacklevel=2)


class _AfterAll(Callback):
    """Comes after every other callback, also after those that write a last checkpoint at the end of training.

    Args:
        conclude: What to do then.
    """

    def __init__(self, conclude: Callable[[Trainer], None]) -> None:
        self._conclude = conclude

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._conclude(trainer)


def _frontier(trainer: Trainer) -> int:
    return getattr(trainer.strategy, "committed_updates", trainer.global_step)


def _incidents(trainer: Trainer) -> list[Incident]:
    return getattr(trainer.strategy, "incidents", [])
