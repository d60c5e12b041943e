"""Goodput accounting for a fit: live in the progress bar and the loggers, summarised at its end, kept as JSON lines."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.callbacks import Callback, RichProgressBar
from rich.console import Console

from lightning_accelpact.goodput import (
    GoodputAccount,
    GoodputOptions,
    GoodputSummary,
    Ledger,
    TimeClass,
    process_age,
    render,
)
from lightning_accelpact.goodput.metric import GoodputMetric
from lightning_accelpact.metric_sync import MetricSync

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_accelpact.recovery.incident import Incident

# Logging a value costs the better part of a millisecond, too much for every micro-batch
_SHOW_EVERY_S = 1.0


class GoodputCallback(Callback):
    """Says at the end of a fit what the time went to, what the faults cost and what recovery from memory saved.

    It sets the base class of the ledger at the Trainer's hooks (see :class:`~.goodput.TimeClass` for when each class
    holds). It communicates for the loggers alone, and for the summary through ``gather_json``. From the strategy it
    takes what it finds there:

    * ``ledger``: the :class:`~.goodput.Ledger` to write to; without one the callback keeps its own.
    * ``incidents``: ``list[Incident]``, those of this rank. The detection and the redone work that a new one states
      are taken out of the ledger's productive time at the end of its micro-batch, so the strategy must not do so.
    * ``committed_updates``: the committed frontier; else ``trainer.global_step``.
    * ``operations``: repairs a fault in the gathering for the loggers, and runs it again.
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
        log_dir: Folder of the run, for one file of JSON lines per rank, ``goodput-rank<rank>.jsonl``, made if missing
            and appended to, also by further attempts at the run. By their ``"kind"``: ``start`` of an attempt,
            ``totals`` every second at first and every half minute later, ``incident`` at the end of its micro-batch,
            ``checkpoint``, and ``summary`` at the end. None: no file. A file that cannot be written is a warning.
        restart_seconds: What it takes to relaunch the job and reload a checkpoint, for the estimate of the time
            saved. None counts 0 s and makes the estimate a lower bound.
        progress_bar_metric: Show the goodput of this rank so far as ``goodput`` in the progress bar, renewed once a
            second.
        log_every_n_updates: After how many updates the goodput of all ranks so far goes to the trainer's loggers, and
            once more at the end of training. ``"auto"``: as the Trainer's ``log_every_n_steps``. 0: never. Each time
            costs two gathers over all ranks (:class:`~.goodput.metric.GoodputMetric`); without loggers there are none.
        metrics_dir: Folder that Prometheus' node exporter reads, for one file of OpenMetrics text per rank,
            ``accelpact-rank<rank>.prom``, renewed as often as ``totals``. None: no file. Needs prometheus-client.

    Raises:
        ValueError: if ``restart_seconds`` is negative or not finite, or ``log_every_n_updates`` is neither ``"auto"``
            nor a whole number of at least 0.
        ModuleNotFoundError: if ``metrics_dir`` is given without prometheus-client.
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
        log_every_n_updates: int | Literal["auto"] = "auto",
        metrics_dir: str | Path | None = None,
    ) -> None:
        options = GoodputOptions(
            print_summary=print_summary, log_dir=log_dir, restart_seconds=restart_seconds, metrics_dir=metrics_dir
        )
        self.progress_bar_metric = progress_bar_metric
        self.summary: GoodputSummary | None = None
        self._logged = _Logged(log_every_n_updates)
        self._after_all = _AfterAll(self._conclude_together)
        self._fitting = False
        self._resumed = False
        self._shown_at = -math.inf
        self._account = GoodputAccount(Ledger(), options)

    def keep_in(self, folder: Path) -> None:
        """Keep the records in this folder, unless there is a ``log_dir``; before training begins."""
        options = self._account.options
        if options.log_dir is None:
            self._account.options = replace(options, log_dir=folder)

    @property
    def _ledger(self) -> Ledger:
        return self._account.ledger

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Bind to the strategy's ledger and end the program's startup."""
        ledger = getattr(trainer.strategy, "ledger", self._ledger)
        if ledger is not self._ledger:
            self._account = GoodputAccount(ledger, self._account.options)
        self._account.rank, self._account.world_size = trainer.global_rank, trainer.world_size
        self._fitting = stage == "fit"
        self._resumed = False
        self.summary = None
        self._shown_at = -math.inf
        if not GoodputCallback._startup_counted:
            GoodputCallback._startup_counted = True
            self._account.count_startup(process_age())
        self._ledger.switch(TimeClass.INITIALIZATION)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The strategy has set up model and optimizer."""
        self._ledger.switch(TimeClass.TRAINING_PREP)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember where training begins, and whether it is at a checkpoint."""
        if self._after_all not in trainer.callbacks:
            trainer.callbacks.append(self._after_all)
        self._account.begin(_frontier(trainer), resumed=self._resumed, step=trainer.global_step,
                            reached=getattr(trainer.strategy, "reached_before", 0))  # fmt: skip
        self._logged.begin(trainer)
        self._ledger.switch(TimeClass.DATA_LOADING)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """A micro-batch has arrived."""
        self._ledger.switch(TimeClass.PRODUCTIVE)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A micro-batch is done, with all that had to be run again for it."""
        self._ledger.switch(TimeClass.DATA_LOADING)
        self._account.take_in(_incidents(trainer))
        self._account.time_update(_frontier(trainer))
        if self.progress_bar_metric and trainer.progress_bar_callback is not None:
            self._show_goodput(pl_module)
        self._logged.after_updates(trainer, self._account)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The validation loop begins."""
        self._ledger.switch(TimeClass.EVALUATION)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The validation loop is over."""
        self._ledger.switch(TimeClass.TRAINING_PREP if trainer.sanity_checking else TimeClass.DATA_LOADING)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Remember the frontier of a checkpoint that training could resume from (not of weights alone)."""
        self._account.checkpoint(_frontier(trainer))

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Training will begin at the checkpoint's frontier."""
        self._resumed = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last micro-batch is done."""
        self._ledger.switch(TimeClass.OTHER)

    def _conclude_together(self, trainer: Trainer) -> None:
        """Put all ranks' records together, while the strategy can still reach them."""
        self._logged.publish(trainer, self._account)
        gather = getattr(trainer.strategy, "gather_json", None)
        record = self._account.run_record(_frontier(trainer), _incidents(trainer), ended="completed")
        self.summary = self._account.conclude((gather(record) if gather else None) or [record], completed=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Conclude with what this rank knows: its peers may be gone, and no teardown hook follows an error."""
        if self._fitting and self.summary is None:
            record = self._account.run_record(_frontier(trainer), _incidents(trainer), ended="failed")
            self.summary = self._account.conclude([record], completed=False)
        self._print(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Print the summary of a fit."""
        self._ledger.switch(TimeClass.OTHER)
        self._print(trainer)

    def _show_goodput(self, pl_module: LightningModule) -> None:
        elapsed = self._ledger.elapsed
        if elapsed >= self._shown_at + _SHOW_EVERY_S:
            self._shown_at = elapsed
            pl_module.log("goodput", self._ledger.goodput, prog_bar=True, logger=False, on_step=True, on_epoch=False)

    def _print(self, trainer: Trainer) -> None:
        """Print the summary, once, on rank 0."""
        fitted, self._fitting = self._fitting, False
        if not (fitted and self.summary and self._account.options.print_summary and trainer.is_global_zero):
            return
        bar = trainer.progress_bar_callback
        # A live bar draws itself once more when it stops, which without this would be below the summary
        if isinstance(bar, RichProgressBar) and bar.progress is not None:
            bar.progress.stop()
        Console().print(render(self.summary))


class _Logged:
    """The goodput of all ranks in the trainer's loggers, at the same updates on every rank.

    Args:
        every: After how many updates; ``"auto"`` as the trainer logs other values, 0 never.

    Raises:
        ValueError: if it is anything else.
    """

    def __init__(self, every: int | Literal["auto"]) -> None:
        if every != "auto" and (not isinstance(every, int) or isinstance(every, bool) or every < 0):
            raise ValueError(
                f"log_every_n_updates must be a whole number of at least 0, or 'auto', got {every!r};"
                " 0 keeps the goodput out of the loggers"
            )
        self._wanted = every
        self._every = 0
        self._published = 0
        self._metric = GoodputMetric()

    def begin(self, trainer: Trainer) -> None:
        """Training begins: find out how often to log, and how to reach the peers."""
        every = trainer.log_every_n_steps if self._wanted == "auto" else self._wanted
        self._every = every if trainer.loggers else 0
        self._published = _frontier(trainer)
        self._metric = GoodputMetric(dist_sync_fn=MetricSync(getattr(trainer.strategy, "operations", None)))
        if trainer.world_size > 1:  # else it is never gathered, and some devices lack its dtype
            self._metric.to(trainer.strategy.root_device)

    def after_updates(self, trainer: Trainer, account: GoodputAccount) -> None:
        """Publish if enough updates have been committed. Counted, not timed: all ranks must find the same."""
        if self._every and _frontier(trainer) // self._every > self._published // self._every:
            self.publish(trainer, account)

    def publish(self, trainer: Trainer, account: GoodputAccount) -> None:
        """Gather and log the goodput so far, unless it is not wanted."""
        if not self._every:
            return
        self._published = _frontier(trainer)
        account.take_in(_incidents(trainer))
        values = self._metric.measure(account.ledger.totals(), account.incident_count)
        step = trainer.fit_loop.epoch_loop._batches_that_stepped  # the axis of all that Lightning logs
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)


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
