"""One training run under Accelerate: what is protected, its updates, its account."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from accelerate_plugin.batches import Feed
from accelerate_plugin.loop import Counters, Iterations
from accelerate_plugin.plugin import AccelPactPlugin
from lightning_accelpact.goodput import Ledger, TimeClass
from lightning_accelpact.qualification.short import short_form
from lightning_accelpact.recovery import fsdp2
from lightning_accelpact.recovery.action import Phase
from lightning_accelpact.recovery.fault import Fault
from lightning_accelpact.recovery.replica import Divergence
from lightning_accelpact.recovery.runtime import HsdpRuntime, Place
from lightning_accelpact.recovery.update import UpdateMisuse, UpdateRunner
from lightning_accelpact.recovery.window import Participant, Window
from lightning_accelpact.user_run import UserRun

T = TypeVar("T")


class AccelPact(UserRun):
    """What ``accelerator.accelpact`` is.

    Args:
        plugin: The options.
        replicate: Size of a replication group, or ``"auto"``.
        shard: Size of a sharding group, or ``"auto"``.
    """

    _unprotected = "outside of accumulate(), run_update() and run()"

    def __init__(self, plugin: AccelPactPlugin, replicate: int | str, shard: int | str) -> None:
        self.ledger = Ledger()
        self.runtime = HsdpRuntime(
            options=plugin.recovery,
            replicate=replicate,
            shard=shard,
            faults=plugin.faults,
            span=lambda name: self.ledger.span(TimeClass(name)),
            resume_with="accelerator.load_state",
            framework="accelerate",
            qualify=short_form,
        )
        self._prepare_run(plugin.goodput)
        self._optimizers: list[Optimizer] = []
        self._models: list[torch.nn.Module] = []
        self._written: set[int] = set()  # the optimizers that have stepped in the current update
        self._scaler: Any = None
        self.device = torch.device("cpu")

    # -- what others read

    @property
    def pending_faults(self) -> list[Fault]:
        """This rank's injected faults that have not struck."""
        return self.runtime.pending_faults

    @property
    def divergences(self) -> list[Divergence]:
        """What this run's replicas hold different bits of, as far as they have compared it."""
        return self.runtime.divergences

    @property
    def is_open(self) -> bool:
        """Whether the run has begun and :meth:`finish` has not been called."""
        return self._open

    # -- set-up

    def begin(self, place: Place) -> None:
        """Make control plane and communicators."""
        self.runtime.begin(place)
        self._keep_account(place.rank, place.world_size)

    def attach(
        self, mesh: Any, device: torch.device, counters: Counters, scaler: Any, extra: Iterable[Participant]
    ) -> None:
        """Accelerate is set up.

        Args:
            mesh: Its device mesh.
            device: Where the model goes.
            counters: Accelerate's count of micro-batches.
            scaler: Its gradient scaler, or ``None``.
            extra: Capture what of Accelerate's own a micro-batch changes.
        """
        self.device = device
        self._scaler = scaler
        self.runtime.mesh = mesh
        self.runtime.protect(self._protected)
        self.runtime.optimizers = lambda: self._optimizers
        machine, participants = self.runtime.machine, [*extra, *self._participants()]
        self._window = Window(participants, self._weights)
        self._update: UpdateRunner = self.runtime.update_runner(self._window, self._drop_gradients)
        redo_function = machine.on_redo
        self.iterations = Iterations(
            machine,
            counters,
            participants,
            drop_gradients=self._drop_gradients,
            on_commit=self._committed,
            weights=self._weights,
        )
        machine.on_redo = lambda: (redo_function if self._update_runs else self.iterations.redo)()
        self._update_runs = False
        self._open_run(Window(participants))

    def protect(self, model: torch.nn.Module) -> None:
        """Reset and rebind this model in a repair; it has been sharded."""
        if any(model is known for known in self._models):
            return
        self._models.append(model)
        self.track(model)
        model.register_forward_pre_hook(self._before_forward, prepend=True)  # before FSDP gathers anything

    @property
    def protects(self) -> bool:
        """Whether there is a model."""
        return bool(self._models)

    def take_in(self, optimizer: Optimizer) -> None:
        """Vote on this optimizer's steps."""
        self._optimizers.append(optimizer)

    def release(self) -> None:
        """Forget models, optimizers, and what :meth:`track` was given."""
        self._models.clear()
        self._optimizers.clear()
        self._owners.clear()
        self._protected._modules.clear()
        self._marked = fsdp2.Weights(self._protected)

    # -- updates

    @property
    def obstacle(self) -> str:
        """Why the current update cannot be run again; empty if it can."""
        if self._update_runs:
            return self._window.obstacle
        if self.iterations.begun:
            return self.iterations.obstacle
        return "" if self.runtime.machine.progress.phase is Phase.COMMITTED else _NO_IDIOM

    def feed(self, loader: Any, iterator: Iterator[Any], ahead: Callable[[], int]) -> Feed:
        """A pass over a prepared data loader."""
        return Feed(self._hand_out, loader, iterator, lambda: ahead() if self._trains else 1)

    def _hand_out(self, feed: Feed) -> Any:
        if not self._trains or self._update_runs or not self._open:
            batch, last = feed.fetch()
            feed.say_whether_last(last)
            return batch
        self.ledger.switch(TimeClass.DATA_LOADING)
        with self._ending_together():
            return self.iterations.hand_out(feed)

    @property
    def _trains(self) -> bool:
        return any(model.training for model in self._models)

    @property
    def plain(self) -> bool:
        """Whether ``accumulate()`` does only what Accelerate's own does."""
        return not self._open or self._update_runs or self.iterations.inside

    @contextmanager
    def iteration(self) -> Iterator[bool]:
        """One micro-batch of the user's loop; see :meth:`~accelerate_plugin.loop.Iterations.iteration`."""
        self._begin_training()
        with self.ledger.span(TimeClass.PRODUCTIVE), self._ending_together(), self.iterations.iteration() as idle:
            yield idle

    def run_update(self, update: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run one update that is given as a function, so that it can be run again from memory.

        For loops that do not use ``accelerator.accumulate``. An update begins without gradients.

        Args:
            update: Does it: the forward and backward passes of all micro-batches, clipping, and at its end ``step`` of
                one or more optimizers. May be called several times; batches come from outside.
            args: What it is called with, such as the batches. Not run again if it has written to their tensors in
                place.
            kwargs: Likewise.

        Returns:
            What ``update`` returned.

        Raises:
            FailStop: if a fault in it could not be repaired.
            UpdateMisuse: if it goes on computing after a step, leaves gradients for a later update, or is called inside
                of another update, also of one that ``accumulate`` has begun.
        """
        if self.iterations.begun or self._update_runs:
            raise UpdateMisuse("run_update() was called inside of an update that accumulate() or another call has begun")
        self._begin_training()
        self._update_runs = True
        try:
            with self.ledger.span(TimeClass.PRODUCTIVE), self._ending_together():
                result = self._update.run(update, *args, **kwargs)
        finally:
            self._update_runs = False
        self._committed()
        return result

    def resilient_update(self, update: Callable[..., T]) -> Callable[..., T]:
        """:meth:`run_update` as a decorator."""

        def run(*args: Any, **kwargs: Any) -> T:
            return self.run_update(update, *args, **kwargs)

        return run

    def _begin_training(self) -> None:
        if not self._training:
            self._training = True
            self.runtime.guard_updates(self)
            self._account.begin(self.committed_updates)
            self.ledger.switch(TimeClass.DATA_LOADING)

    def _committed(self) -> None:
        self._written.clear()
        self._account_for_update()
        self.runtime.replicas.check()

    def _drop_gradients(self) -> None:
        self.runtime.drop_gradients(self._optimizers)
        self._protected.zero_grad(set_to_none=True)
        if self._scaler is not None:
            self._scaler._per_optimizer_states.clear()  # else they would count as unscaled already

    def _before_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self.enter(Phase.FORWARD)

    def enter(self, phase: Phase) -> None:
        """A forward or backward pass begins."""
        if self._update_runs:
            self._update.enter(phase)
        elif self.iterations.inside:
            self.iterations.enter(phase)
        elif self._open:
            self._begin_training()
            if phase is Phase.FORWARD:
                self._commit_if_written()
            self.ledger.switch(TimeClass.PRODUCTIVE)  # nothing tells where an update ends, but its step
            self.runtime.machine.enter(phase)

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """A backward pass. A fault that unwinds it ends the run on every rank, if nothing says what the update is."""
        self.enter(Phase.BACKWARD)
        try:
            yield
            self.runtime.machine.leave_pass()
        except RuntimeError as error:
            if not (self._update_runs or self.iterations.inside):
                self.runtime.stop_on_fault(error, f"inside an update, and {_NO_IDIOM}")
            raise

    def step(self, optimizer: Optimizer, step: Callable[[Callable[[], None]], T]) -> T | None:
        """Vote on the update and let an optimizer write.

        Args:
            optimizer: Which one.
            step: Does it; is given the vote, to be called right before the optimizer writes.
        """
        if self._update_runs:
            return step(self._update.vote)
        machine = self.runtime.machine
        if self.iterations.inside:
            output = step(self.iterations.vote)
        elif self.iterations.begun:
            if not self.iterations.vote_outside():
                return None
            output = step(lambda: None)
        else:
            output = step(machine.vote if machine.progress.phase is not Phase.STEPPING else lambda: None)
        self._written.add(id(optimizer))
        if len(self._written) == len(self._optimizers):
            self._commit_if_written()
        return output

    def _commit_if_written(self) -> None:
        if self.runtime.machine.progress.phase is Phase.STEPPING:
            with self._ending_together():
                self.iterations.commit()
            self.ledger.switch(TimeClass.DATA_LOADING)

    # -- outside an update

    def operation(self, operation: Callable[[], T], rewind: Callable[[], None] = lambda: None) -> T:
        """Run what all ranks do together outside an update, again if a fault strikes in it."""
        if not self._open or self._update_runs:
            return operation()
        return self.runtime.operations.run(operation, rewind=rewind)

    def save(self, path: Any, save: Callable[[], T], rewind: Callable[[], None]) -> T:
        """Write a checkpoint and remember it for a restart."""
        with self.ledger.span(TimeClass.CHECKPOINT_SAVE):
            result = self.operation(save, rewind)
        self.runtime.checkpoint_written(path if path is not None else result)
        self._account.checkpoint(self.committed_updates)
        return result

    def load(self, load: Callable[[], T]) -> T:
        """Read a checkpoint."""
        with self.ledger.span(TimeClass.CHECKPOINT_RESTORE):
            result = self.operation(load)
        self._account.checkpoint(self.committed_updates)
        return result

    def goodput_metrics(self) -> dict[str, float]:
        """The goodput of all ranks so far, for ``accelerator.log``; a collective call, between two updates.

        Returns:
            As of :meth:`~lightning_accelpact.goodput.metric.GoodputMetric.measure`.
        """
        return self._measure_goodput(self.device)

    # -- the end

    def finish(self) -> None:
        """The run is over: leave together, since a peer may need this rank to repair its last update.

        Prints the goodput summary. ``accelerator.end_training()`` calls it, or else the interpreter's exit.
        """
        if not self._open:
            return
        if self.iterations.interrupted and not self.runtime.stopped:
            self.runtime.machine.stop.everywhere(_ENDED_EARLY)
        super().finish()
        self.runtime.detach()


_ENDED_EARLY = (
    "the loop has ended before the update that a fault interrupted has run again: a repeated update costs further"
    " iterations, so let it end after a number of updates, counted where accelerator.sync_gradients is true"
)
_NO_IDIOM = (
    "the update is neither in `with accelerator.accumulate(model):` nor in a function given to"
    " accelerator.accelpact.run_update()"
)
