"""Automatic optimization whose update can be run again: ``_AutomaticOptimization.run`` is the one frame that sees every
micro-batch and lies outside the closure, the sync and precision contexts, but inside the progress bracket, so
counters, loader, schedulers and ``on_train_batch_*`` do not run twice. ``tests/test_loop.py`` fails loudly when an
attribute moves.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_accelpact.participants import LoggedValues, Options, modules_with_attributes, of_modules
from lightning_accelpact.recovery.action import Phase
from lightning_accelpact.recovery.contents import Marks
from lightning_accelpact.recovery.fault import FaultPoint
from lightning_accelpact.recovery.machine import RepairMachine
from lightning_accelpact.recovery.update import UpdateRunner, until_it_has_run
from lightning_accelpact.recovery.window import MicroBatch, Participant, Window

T = TypeVar("T")

CHECKED_LIGHTNING = ("2.6",)


class ResilientOptimization(_AutomaticOptimization):
    """Lightning's automatic optimization with a window that can be rewound.

    Args:
        trainer: The trainer whose loop this replaces.
        machine: Guards and repairs.
        drop_gradients: Clears every gradient, also those the wrapper accumulates.
        after_update: Called outside of the window after every micro-batch, the last one of an update among them.
        weights: Marks what nobody but the optimizer may write to.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        machine: RepairMachine,
        drop_gradients: Callable[[], None],
        after_update: Callable[[], None] = lambda: None,
        weights: Callable[[], Marks] = Marks,
    ) -> None:
        super().__init__(trainer)
        self._after_update = after_update
        self._machine = machine
        self._drop_gradients = drop_gradients
        results = trainer.fit_loop.epoch_loop._results
        self.window = Window([_Progress(self), *_participants(trainer, lambda: results)], weights)
        self._running = False
        self._spent = 0.0  # seconds that the current update's finished attempts at micro-batches took
        self._attempt_began: float | None = None

    @classmethod
    def install(
        cls,
        trainer: pl.Trainer,
        machine: RepairMachine,
        drop_gradients: Callable[[], None],
        after_update: Callable[[], None] = lambda: None,
        weights: Callable[[], Marks] = Marks,
    ) -> ResilientOptimization:
        """Put it in the place of the trainer's automatic optimization, with the progress that a checkpoint restores."""
        epoch_loop = trainer.fit_loop.epoch_loop
        replaced = epoch_loop.automatic_optimization
        loop = cls(trainer, machine, drop_gradients, after_update, weights)
        loop.optim_progress = replaced.optim_progress
        loop._skip_backward = replaced._skip_backward
        epoch_loop.automatic_optimization = loop
        machine.on_redo = loop.redo
        return loop

    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict) -> dict[str, Any]:
        """Run one micro-batch, and whatever of its update a fault has made necessary to run again."""
        self._take_in(batch_idx, kwargs)
        output = self._until_it_has_run(lambda: self._catch_up(optimizer, batch_idx, kwargs))
        self._after_update()
        return output

    def _until_it_has_run(self, attempt: Callable[[], T]) -> T:
        self._running = True
        try:
            return until_it_has_run(self._machine, attempt, self._drop_gradients)
        finally:
            self._running = False

    def _take_in(self, batch_idx: int, kwargs: OrderedDict) -> None:
        self._machine.poll()
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self.window.open()
            self._spent = 0.0
        self.window.add(kwargs)

    def _catch_up(self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict) -> dict[str, Any]:
        """Run the window's pending micro-batches; the last one is the current one and may step."""
        self._attempt_began = time.time()
        try:
            while len(self.window.pending) > 1:
                self._replay(optimizer)
            self._enter()
            output = super().run(optimizer, batch_idx, kwargs)
            self.window.finish()
            return output
        finally:
            self._end_attempt(time.time())

    def _end_attempt(self, now: float) -> None:
        if self._attempt_began is not None:
            self._spent += max(0.0, now - self._attempt_began)
        self._attempt_began = None

    def _enter(self) -> MicroBatch:
        self._machine.progress.micro_batch = self.window.position
        self._machine.enter(Phase.FORWARD)
        micro_batch = self.window.begin()
        results = self.trainer._results
        if results is not None:  # what on_batch_start had set for this batch
            results.batch, results.batch_size = micro_batch.payload.get("batch"), None
        if self.window.position == 0:
            self._machine.faults.fire(FaultPoint.START)
        return micro_batch

    def _replay(self, optimizer: Optimizer) -> None:
        """The next pending micro-batch is not the update's last: it accumulates and does not step."""
        micro_batch = self._enter()
        closure = self._make_closure(micro_batch.payload, optimizer, self.window.position)
        with _block_parallel_sync_behavior(self.trainer.strategy, block=True):
            closure()
        self.window.finish()

    def redo(self) -> None:
        """Rewind the window. Inside a micro-batch it unwinds and runs again. Between two, what is under way there, a hook
        or a validation, goes on afterwards; but the finished ones run again at once, since a peer may be inside one."""
        self._rewind()
        if not self._running:
            with _as_if_training(self.trainer):
                now = self.window.snapshot()
                self._until_it_has_run(self._replay_all)
                now.restore()

    def _replay_all(self) -> None:
        self._attempt_began = time.time()
        try:
            while self.window.pending:
                self._replay(self.trainer.optimizers[0])
        finally:
            self._end_attempt(time.time())

    def _rewind(self) -> None:
        """Drop the update's gradients and begin its micro-batches anew."""
        incident = self._machine.incidents[-1]
        incident.redone_micro_batches += min(self.window.position + 1, len(self.window))
        self._end_attempt(incident.time)  # the guard repairs inside the attempt
        incident.redo_s += self._spent
        self._spent = 0.0
        self._drop_gradients()
        self.window.rewind()


@contextmanager
def _as_if_training(trainer: pl.Trainer) -> Iterator[None]:
    """Lets a training step run from a hook or a validation, in whatever mode that has switched on, and forgets it."""
    connector, results = trainer._logger_connector, trainer.fit_loop.epoch_loop._results
    stage = trainer.state.stage
    logging = connector._first_loop_iter, connector._current_fx
    batch = results.batch, results.batch_size
    trainer.training = True  # self.log goes to the running loop's results
    connector._first_loop_iter = False  # else the first value that is logged would clear those of its hook
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        trainer.state.stage = stage
        connector._first_loop_iter, connector._current_fx = logging
        results.batch, results.batch_size = batch


class _Progress:
    """Lightning's optimizer counters; their state is a copy."""

    def __init__(self, loop: ResilientOptimization) -> None:
        self._loop = loop

    def capture(self) -> dict[str, Any]:
        return self._loop.optim_progress.state_dict()

    def restore(self, state: dict[str, Any]) -> None:
        self._loop.optim_progress.load_state_dict(state)


def _participants(trainer: pl.Trainer, results: Callable[[], dict[str, Metric]]) -> list[Participant]:
    module = trainer.lightning_module
    callbacks = [callback for callback in trainer.callbacks if _acts_inside_an_update(callback)]
    schedulers = [config.scheduler for config in trainer.strategy.lr_scheduler_configs]
    owners = [*modules_with_attributes(module), *callbacks, *schedulers]
    return [LoggedValues(results), Options(lambda: trainer.strategy.optimizers), *of_modules(module, owners)]


_INNER_HOOKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")


def _acts_inside_an_update(callback: pl.Callback) -> bool:
    return any(getattr(type(callback), hook) is not getattr(pl.Callback, hook) for hook in _INNER_HOOKS)


def metrics(module: torch.nn.Module) -> list[Metric]:
    """The torchmetrics that belong to a module."""
    return [part for part in module.modules() if isinstance(part, Metric)]


def evaluation_window(trainer: pl.Trainer) -> Window:
    """What a validation, test or predict step may change, to be set back before the step runs again."""
    return Window(_participants(trainer, lambda: trainer._results or {}))


def guard_steps(precision: pl.plugins.Precision, guard: RepairMachine | UpdateRunner) -> None:
    """Vote right after clipping and before the optimizer writes: the end of the precision plugin's closure handling."""
    after_closure = type(precision)._after_closure

    def guarded(model: pl.LightningModule, optimizer: Any) -> None:
        after_closure(precision, model, optimizer)
        guard.vote()

    precision._after_closure = guarded


def agree_on_sigterm(trainer: pl.Trainer, machine: RepairMachine) -> None:
    """End the run on SIGTERM at the same place on every rank, agreed in the votes on updates and operations.

    Lightning broadcasts it before every micro-batch and swallows errors: a fault that the broadcast meets is lost, and
    the peers wait for ever. Its handler broadcasts as well, at a moment when no peer does. And each rank looks whether
    it got the signal itself at places to which its peers do not come.
    """
    connector = trainer._signal_connector
    told: list[int] = []

    def note(signum: int, frame: Any) -> None:
        if not told and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signum)
        told.append(signum)

    def leave() -> None:
        connector.received_sigterm = True  # Lightning's loops end where they look at it next

    def leave_if_agreed() -> None:
        if connector.received_sigterm:
            raise SIGTERMException

    connector._sigterm_notifier_fn = note
    machine.leave.wanted = lambda: bool(told)
    machine.on_leave = leave
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = leave_if_agreed


def reset_scaler(precision: pl.plugins.Precision) -> None:
    """Forget that the aborted update's gradients were unscaled; the scale itself belongs to the committed frontier."""
    scaler = getattr(precision, "scaler", None)
    if scaler is not None:
        scaler._per_optimizer_states.clear()


@contextmanager
def configured_by_strategy(module: pl.LightningModule) -> Iterator[None]:
    """Lightning's FSDP2 strategy insists on an overridden ``configure_model``; here the strategy has done that work."""
    if "configure_model" in vars(module):
        yield
        return
    vars(module)["configure_model"] = lambda: None
    try:
        yield
    finally:
        del vars(module)["configure_model"]


class _ManualProgress:
    """Lightning's step counters of manual optimization; their state is a copy."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress

    def capture(self) -> dict[str, Any]:
        return self._progress.state_dict()

    def restore(self, state: dict[str, Any]) -> None:
        self._progress.load_state_dict(state)


def manual_window(trainer: pl.Trainer, weights: Callable[[], Marks]) -> Window:
    """What an update of manual optimization changes besides gradients."""
    results = trainer.fit_loop.epoch_loop._results
    participants = [_ManualProgress(trainer), *_participants(trainer, lambda: results)]
    return Window(participants, weights)


def require_manual_choice(module: pl.LightningModule, choice: str) -> None:
    """Refuse manual optimization unless the user has chosen how its faults are handled.

    Raises:
        MisconfigurationException: says what can be chosen.
    """
    if choice == "refuse":
        raise MisconfigurationException(
            f"{type(module).__name__} sets automatic_optimization=False, and accelpact_hsdp cannot run an update again"
            ' that it does not see. Either return the loss from training_step, or pass manual_optimization="update"'
            " and put each update into self.trainer.strategy.run_update(function), or pass"
            ' manual_optimization="fail_stop" to train it as it is and stop on a fault'
        )


def outside_run_update() -> MisconfigurationException:
    """The error for a manual step that could not be run again."""
    return MisconfigurationException(
        'with manual_optimization="update" every optimizer.step() must be called inside'
        " self.trainer.strategy.run_update(function); this one is not. Move the update into the function, or pass"
        ' manual_optimization="fail_stop"'
    )


def no_manual_update() -> MisconfigurationException:
    """The error for an update given as a function where Lightning's own loop runs the updates."""
    return MisconfigurationException(
        "self.trainer.strategy.run_update(function) is for a module with automatic_optimization=False, during fit, under"
        ' a strategy with manual_optimization="update"'
    )


def require_one_closure_call(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose step is many.

    Raises:
        MisconfigurationException: says what to use instead.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise MisconfigurationException(
            "accelpact_hsdp votes once before each step, but LBFGS evaluates its closure several times in a step:"
            " use an optimizer that calls it once, such as AdamW"
        )


def require_shards_to_be_averaged(trainer: pl.Trainer) -> None:
    """Refuse Lightning's averages of weights: they copy the model before it is sharded, and fail at their first update.

    Raises:
        MisconfigurationException: names the callback and what to use instead.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            raise MisconfigurationException(
                f"{type(callback).__name__} averages into a whole copy of the model, which no sharded model fits, under"
                " any FSDP2 strategy: remove it, and average this rank's shards, parameter.to_local(), in a callback of"
                " your own after every update"
            )


def require_one_closure_per_step(trainer: pl.Trainer) -> None:
    """Refuse what cannot be voted on once per step, or run again from a batch in memory.

    Raises:
        MisconfigurationException: names what was found and what to use instead.
    """
    for optimizer in trainer.strategy.optimizers:
        require_one_closure_call(optimizer)
    if is_param_in_hook_signature(trainer.lightning_module.training_step, "dataloader_iter", explicit=True):
        raise MisconfigurationException(
            "accelpact_hsdp runs an update again from the batches it was given, but training_step(dataloader_iter)"
            " fetches them itself: take (batch, batch_idx) instead"
        )
