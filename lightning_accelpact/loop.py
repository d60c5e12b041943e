"""The one file that touches private attributes of Lightning (checked against lightning 2.6).

Automatic optimization whose update can be run again: ``_AutomaticOptimization.run`` is the one frame that sees every
micro-batch and lies outside the closure, the sync and precision contexts, but inside the progress bracket, so
counters, loader, schedulers and ``on_train_batch_*`` do not run twice. ``tests/test_loop.py`` fails loudly when an
attribute moves.
"""

from __future__ import annotations

import copy
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_accelpact.recovery.action import Phase
from lightning_accelpact.recovery.fault import FaultPoint
from lightning_accelpact.recovery.machine import RepairMachine, UpdateAborted
from lightning_accelpact.recovery.window import Buffers, MicroBatch, Window

CHECKED_LIGHTNING = ("2.6",)


class ResilientOptimization(_AutomaticOptimization):
    """Lightning's automatic optimization with a window that can be rewound.

    Args:
        trainer: The trainer whose loop this replaces.
        machine: Guards and repairs.
        drop_gradients: Clears every gradient, also those the wrapper accumulates.
    """

    def __init__(self, trainer: pl.Trainer, machine: RepairMachine, drop_gradients: Callable[[], None]) -> None:
        super().__init__(trainer)
        self._machine = machine
        self._drop_gradients = drop_gradients
        module = trainer.lightning_module
        self.window = Window([_Progress(self), _Results(trainer), _Metrics(module), Buffers(module)])
        self._spent = 0.0  # seconds that the current update's finished attempts at micro-batches took
        self._attempt_began: float | None = None

    @classmethod
    def install(
        cls, trainer: pl.Trainer, machine: RepairMachine, drop_gradients: Callable[[], None]
    ) -> ResilientOptimization:
        """Put it in the place of the trainer's automatic optimization, with the progress that a checkpoint restores."""
        epoch_loop = trainer.fit_loop.epoch_loop
        replaced = epoch_loop.automatic_optimization
        loop = cls(trainer, machine, drop_gradients)
        loop.optim_progress = replaced.optim_progress
        loop._skip_backward = replaced._skip_backward
        epoch_loop.automatic_optimization = loop
        machine.on_redo = loop.rewind
        return loop

    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict) -> dict[str, Any]:
        """Run one micro-batch, and whatever of its update a fault has made necessary to run again."""
        machine = self._machine
        self._take_in(batch_idx, kwargs)
        while True:
            try:
                with machine.inside():
                    return self._catch_up(optimizer, batch_idx, kwargs)
            except UpdateAborted:
                continue  # repaired inside the guard; the window is rewound
            except RuntimeError as error:
                if not machine.recovers(error):
                    raise
                failure = error
            machine.recover(failure)

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
                self._enter(self.window.pending[0])
                self._replay(optimizer, self.window.pending[0])
                self.window.position += 1
            self._enter(self.window.pending[0])
            output = super().run(optimizer, batch_idx, kwargs)
            self.window.position += 1
            return output
        finally:
            self._end_attempt(time.time())

    def _end_attempt(self, now: float) -> None:
        if self._attempt_began is not None:
            self._spent += max(0.0, now - self._attempt_began)
        self._attempt_began = None

    def _enter(self, micro_batch: MicroBatch) -> None:
        self._machine.progress.micro_batch = self.window.position
        self._machine.enter(Phase.FORWARD)
        micro_batch.rng.restore()
        results = self.trainer._results
        if results is not None:  # what on_batch_start had set for this batch
            results.batch, results.batch_size = micro_batch.payload.get("batch"), None
        if self.window.position == 0:
            self._machine.faults.fire(FaultPoint.START)

    def _replay(self, optimizer: Optimizer, micro_batch: MicroBatch) -> None:
        """A micro-batch before the current one: it accumulates and does not step."""
        closure = self._make_closure(micro_batch.payload, optimizer, self.window.position)
        with _block_parallel_sync_behavior(self.trainer.strategy, block=True):
            closure()

    def rewind(self) -> None:
        """Drop the update's gradients and set everything it has touched back to the window's start."""
        incident = self._machine.incidents[-1]
        incident.redone_micro_batches += min(self.window.position + 1, len(self.window))
        self._end_attempt(incident.time)  # the guard repairs inside the attempt
        incident.redo_s += self._spent
        self._spent = 0.0
        self._drop_gradients()
        self.window.rewind()


class _Progress:
    """Lightning's optimizer counters."""

    def __init__(self, loop: ResilientOptimization) -> None:
        self._loop = loop

    def capture(self) -> dict[str, Any]:
        return copy.deepcopy(self._loop.optim_progress.state_dict())

    def restore(self, state: dict[str, Any]) -> None:
        self._loop.optim_progress.load_state_dict(copy.deepcopy(state))


class _Results:
    """What ``self.log`` has accumulated."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    def capture(self) -> dict[str, dict[str, Any]]:
        return {key: _metric_state(metric) for key, metric in (self._trainer._results or {}).items()}

    def restore(self, state: dict[str, dict[str, Any]]) -> None:
        results = self._trainer._results
        for key in [key for key in results or {} if key not in state]:
            dict.pop(results, key)
        for key, values in state.items():
            _set_metric_state(results[key], values)


class _Metrics:
    """torchmetrics that belong to the module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def capture(self) -> list[tuple[Metric, dict[str, Any]]]:
        return [(metric, _metric_state(metric)) for metric in self._module.modules() if isinstance(metric, Metric)]

    def restore(self, state: list[tuple[Metric, dict[str, Any]]]) -> None:
        for metric, values in state:
            _set_metric_state(metric, values)


_METRIC_ATTRIBUTES = ("_update_count", "_computed", "_forward_cache", "has_reset", "_is_synced", "_cache")


def _metric_state(metric: Metric) -> dict[str, Any]:
    names = (*metric._defaults, *_METRIC_ATTRIBUTES)
    return {name: _copied(getattr(metric, name)) for name in names if hasattr(metric, name)}


def _set_metric_state(metric: Metric, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(metric, name, _copied(value))


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


def guard_steps(precision: pl.plugins.Precision, machine: RepairMachine) -> None:
    """Vote right after clipping and before the optimizer writes: the end of the precision plugin's closure handling."""
    after_closure = type(precision)._after_closure

    def guarded(model: pl.LightningModule, optimizer: Any) -> None:
        after_closure(precision, model, optimizer)
        machine.vote()

    precision._after_closure = guarded


def forget_sigterm_broadcast(trainer: pl.Trainer) -> None:
    """Silence the fit loop's broadcast of SIGTERM: it runs before every micro-batch and swallows errors, so a fault
    that it meets is lost and its peers wait for ever."""
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


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


def require_automatic_optimization(trainer: pl.Trainer) -> None:
    """Refuse what cannot be run again.

    Raises:
        MisconfigurationException: names what the module does and what to use instead.
    """
    module = trainer.lightning_module
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"accelpact_hsdp needs automatic optimization to run an update again, but {type(module).__name__} sets"
            " automatic_optimization=False: return the loss from training_step, or use strategy='fsdp'"
        )
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.strategy.optimizers):
        raise MisconfigurationException(
            "accelpact_hsdp votes once before each step, but LBFGS evaluates its closure several times in a step:"
            " use an optimizer that calls it once, such as AdamW"
        )
