"""A run whose loop is the user's own: what is protected besides the model, its account, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from rich.console import Console
from torchmetrics import Metric

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
from lightning_accelpact.participants import Options, modules_with_attributes, of_modules, owner_of
from lightning_accelpact.recovery import ending, fsdp2
from lightning_accelpact.recovery.contents import Marks
from lightning_accelpact.recovery.incident import Incident
from lightning_accelpact.recovery.runtime import HsdpRuntime
from lightning_accelpact.recovery.window import Participant, Window

T = TypeVar("T")


class UserRun:
    """To be inherited by what the user calls. It is ready after :meth:`_keep_account` and :meth:`_open_run`."""

    # Whether the time before the launch has been counted: once per process, not once per run
    _startup_counted = False
    # Where a fault ends the run
    _unprotected = "outside of run_update() and run()"

    ledger: Ledger
    runtime: HsdpRuntime

    def _prepare_run(self, goodput: bool | GoodputOptions) -> None:
        """Take the options in; starts nothing.

        Args:
            goodput: Whether to keep account, or what to do with it.
        """
        self._account = GoodputAccount(self.ledger, GoodputOptions() if isinstance(goodput, bool) else goodput)
        self._reports = bool(goodput)
        self._protected = torch.nn.ModuleList()
        self._marked = fsdp2.Weights(self._protected)
        self._owners: list[Any] = []
        self._training = False
        self._open = False

    def _keep_account(self, rank: int, world_size: int) -> None:
        self._account.rank, self._account.world_size = rank, world_size
        if not UserRun._startup_counted:
            UserRun._startup_counted = True
            self._account.count_startup(process_age())
        self.ledger.switch(TimeClass.INITIALIZATION)

    def _open_run(self, evaluation: Window) -> None:
        """From here on the run has an end.

        Args:
            evaluation: Captures what a step outside of an update changes.
        """
        self._evaluation = evaluation
        self._open = True
        ending.watch(self)

    def _participants(self) -> list[Participant]:
        """Capture what a step changes besides gradients, in all that is protected by then."""
        return [Options(lambda: self.runtime.optimizers()), *of_modules(self._protected, self._owners)]

    def _weights(self) -> Marks:
        """Marks on what the optimizers alone may write to, in all that is protected by then."""
        return self._marked()

    # -- what others read

    @property
    def incidents(self) -> list[Incident]:
        """This rank's incidents of the current or last run."""
        return self.runtime.incidents

    @property
    def committed_updates(self) -> int:
        """The committed frontier: updates applied in this run."""
        return self.runtime.committed_updates

    def gather_json(self, message: Any) -> list[Any]:
        """Collect one JSON value per rank on every rank, over the control plane; a collective call."""
        return self.runtime.gather_json(message)

    @property
    def summary(self) -> GoodputSummary | None:
        """What the time went to and what the faults cost; ``None`` before :meth:`finish`."""
        return self._account.summary

    # -- what the user calls

    def track(self, *objects: Any) -> None:
        """Set these back, too, when an update or an evaluation step runs again; modules that were set up are anyway.

        Args:
            objects: torchmetrics, modules (their metrics, buffers and plain attributes; an update that writes to their
                parameters, as to those of the model, cannot run again), or objects of other classes (their attributes:
                numbers, texts, tensors, generators, and lists, sets and dictionaries of them), or random generators.
        """
        for one in objects:
            if not isinstance(one, torch.nn.Module):
                self._owners.append(owner_of(one))
                continue
            self._protected.append(one)
            self._marked = fsdp2.Weights(self._protected)
            self._owners += modules_with_attributes(one)
            for metric in (part for part in one.modules() if isinstance(part, Metric)):
                metric.dist_sync_fn = metric.dist_sync_fn or MetricSync(self.runtime.operations)

    def run(self, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a step outside an update that communicates, such as the forward pass of an evaluation.

        If a fault strikes in it, it runs again on all ranks, from the same state of generators, buffers, metrics and
        attributes. Needless for the framework's own collectives.

        Args:
            step: Does it. May be called several times; batches come from outside.
            args: What it is called with.
            kwargs: Likewise.

        Returns:
            What ``step`` returned.
        """
        with self.ledger.span(TimeClass.EVALUATION), self._ending_together():
            return self.runtime.run_step(lambda: step(*args, **kwargs), self._evaluation)

    def _measure_goodput(self, device: torch.device) -> dict[str, float]:
        """The goodput of all ranks so far; a collective call, between two updates."""
        self._account.take_in(self.incidents)
        metric = GoodputMetric(dist_sync_fn=MetricSync(self.runtime.operations)).to(device)
        with self._ending_together():
            return metric.measure(self.ledger.totals(), self._account.incident_count)

    def _account_for_update(self) -> None:
        self._account.take_in(self.incidents)
        self._account.time_update(self.committed_updates)

    @contextmanager
    def _ending_together(self) -> Iterator[None]:
        """An error ends the run on every rank, instead of leaving the peers waiting for this one."""
        try:
            yield
        except (StopIteration, GeneratorExit):  # the end of a loader is no error
            raise
        except BaseException as error:
            self.runtime.stop_peers(error)
            raise

    # -- the end

    def finish(self) -> None:
        """The run is over: leave together, since a peer may need this rank to repair its last update.

        Prints the goodput summary. If the script does not call it, it is called when the interpreter exits.
        """
        if not self._open:
            return
        self.ledger.switch(TimeClass.OTHER)
        self.runtime.finish()
        self._conclude(self.gather_json(self._record()))

    def _record(self) -> dict[str, Any]:
        return self._account.record(self.committed_updates, self.incidents)

    def _conclude(self, records: list[dict[str, Any]]) -> None:
        self._open = False
        if not (self._reports and self._training):
            return
        summary = self._account.conclude(records)
        if self._account.options.print_summary and self._account.rank == 0:
            Console().print(render(summary))

    def on_exception(self, error: BaseException) -> None:
        """The script ends with an error: the peers must not wait for this rank."""
        if self._open:
            self.runtime.stop_on_fault(error, self._unprotected)
            self.runtime.stop_peers(error)

    def on_exit(self) -> None:
        """The script ends; without an error this rank takes its leave, with one it says what it knows."""
        if self._open and self.runtime.stopped:
            self._conclude([self._record()])
        self.finish()
