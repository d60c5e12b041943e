"""Where training stands besides weights, optimizer and schedulers, so that a new process goes on as if nothing had been.

Lightning's checkpoint holds the loops' counters, but neither generators nor the place in the data, and one rank's buffers
for all. What is missing is one small file of each rank beside it. Like ``loop.py`` this touches private attributes of
Lightning (checked against lightning 2.6); ``tests/test_position.py`` fails loudly when one moves.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from enum import Enum
from importlib import import_module
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_accelpact import logged
from lightning_accelpact.participants import metric_state, set_metric_state
from lightning_accelpact.recovery.window import RngState

_CACHES = ("_computed", "_forward_cache", "_cache")


class Moment(str, Enum):
    """When a checkpoint was written, as the counters in it tell."""

    # In on_train_batch_end: the validation that may be due after that batch is not done
    BATCH_END = "batch_end"
    # At the end of a validation in the middle or at the end of an epoch
    VALIDATION_END = "validation_end"
    # In on_train_epoch_end, or later
    EPOCH_END = "epoch_end"
    # Anywhere else, as in the middle of a validation
    ELSEWHERE = "elsewhere"

    @classmethod
    def of(cls, loops: dict[str, Any]) -> Moment:
        """The moment of a checkpoint's ``loops``."""
        fit = loops["fit_loop"]
        epoch, batch = fit["epoch_progress"]["total"], fit["epoch_loop.batch_progress"]["total"]
        validation = fit["epoch_loop.val_loop.batch_progress"]["current"]
        if not (batch["ready"] == batch["started"] == batch["processed"] and epoch["ready"] == epoch["started"]):
            return cls.ELSEWHERE
        if epoch["processed"] == epoch["started"]:
            return cls.EPOCH_END
        if batch["completed"] == batch["processed"] - 1:
            return cls.BATCH_END
        ended = 0 < validation["ready"] == validation["completed"]
        return cls.VALIDATION_END if ended else cls.ELSEWHERE


def obstacle(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> str:
    """Why training could not go on bit for bit from what is about to be written; empty if it could."""
    if "optimizer_states" not in checkpoint:
        return "it holds weights alone (save_weights_only=True)"
    moment = Moment.of(checkpoint["loops"])
    if moment is Moment.ELSEWHERE:
        return "it was written neither at the end of a batch, nor of a validation, nor of an epoch"
    if moment is not Moment.EPOCH_END and trainer.fit_loop.epoch_loop._should_accumulate():
        return "it was written in the middle of an update, whose gradients it does not hold"
    plateau = any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs)
    if plateau and moment is not Moment.BATCH_END:
        return "ReduceLROnPlateau steps after it was written, by a metric that it does not hold"
    if moment is not Moment.EPOCH_END and len(set(_with_state(trainer))) > 1:
        return "it was written within an epoch, and only some of the loaders have a state"
    return ""


def _with_state(trainer: pl.Trainer) -> list[bool]:
    """Of each train loader, whether Lightning puts it back to where it was."""
    return [isinstance(loader, _Stateful) for loader in trainer.fit_loop._combined_loader.flattened]


def choose_checkpoint(trainer: pl.Trainer, choose: Callable[[Any], Any]) -> None:
    """Let somebody choose the checkpoint that the fit which begins now restores.

    Args:
        trainer: Its fit.
        choose: Is given the one that the user has named, or ``None``; called once, when the model has been set up.
    """
    connector = trainer._checkpoint_connector
    restore = type(connector)._restore_modules_and_callbacks.__get__(connector)

    def chosen(path: Any = None, weights_only: bool | None = None) -> None:
        del connector._restore_modules_and_callbacks
        slurm = SLURMEnvironment.detect() and path == connector._hpc_resume_path  # found by Lightning, named by nobody
        restore(choose(None if slurm else path) or path, weights_only)

    connector._restore_modules_and_callbacks = chosen


class Position:
    """Generators, place in the data, buffers and metrics of one rank.

    Args:
        trainer: Whose loops are about to run; they are adapted for this run.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._iterated_with: RngState | None = None  # the generators when the epoch's iterator was made
        self._resumed: dict[str, Any] | None = None
        self._moment: Moment | None = None
        self._adapt(trainer.fit_loop, "_load_combined_loader_states", self._data_are_set_up)
        self._adapt(trainer.fit_loop, "reset", self._reset)
        self._adapt(trainer.fit_loop, "on_run_start", self._run_starts)
        self._adapt(trainer.fit_loop.epoch_loop, "reset", self._reset_epoch)
        self._adapt(trainer.fit_loop.epoch_loop, "on_run_start", self._epoch_starts)
        self._adapt(trainer.fit_loop.epoch_loop, "advance", self._advance)

    @staticmethod
    def _adapt(loop: Any, name: str, hook: Callable[..., None]) -> None:
        """Let the loop call ``hook(original, ...)`` instead of a method, in place of an earlier run's."""
        original = getattr(type(loop), name).__get__(loop)
        setattr(loop, name, lambda *args: hook(original, *args))

    # -- to and from a checkpoint

    def capture(self) -> dict[str, Any]:
        """This rank's position, as values that ``torch.load(weights_only=True)`` accepts."""
        module = self._trainer.lightning_module
        return {
            "generators": _plain(RngState.capture()),
            "iterated_with": _plain(self._iterated_with) if self._iterated_with else None,
            "buffers": {name: buffer.detach().clone() for name, buffer in _buffers(module)},
            "metrics": {name: _without_caches(metric) for name, metric in _metrics(module)},
            "logged": logged.capture(self._trainer),
        }

    def resume(self, state: dict[str, Any], loops: dict[str, Any]) -> None:
        """Set buffers and metrics back now, and the rest when the loops come to it.

        Args:
            state: As captured.
            loops: The checkpoint's; what Lightning counts when the batch or epoch has ended is counted here.
        """
        module = self._trainer.lightning_module
        with torch.no_grad():
            for name, buffer in _buffers(module):
                buffer.copy_(state["buffers"].get(name, buffer))  # whether it may be missing, Lightning has decided
        for name, metric in _metrics(module):
            kept = state["metrics"].get(name, {})
            set_metric_state(metric, {key: _moved(value, metric.device) for key, value in kept.items()})
        self._resumed, self._moment = state, Moment.of(loops)
        if self._moment is Moment.EPOCH_END:
            logged.end_epoch(module, state["logged"])
        _finish(loops["fit_loop"], self._moment)

    # -- what the loops call

    def _data_are_set_up(self, original: Callable[..., None]) -> None:
        original()
        self._iterated_with = RngState.capture()  # the iterator of the first epoch is made next

    def _reset(self, original: Callable[..., None]) -> None:
        if self._moment is Moment.EPOCH_END:
            # A new epoch begins; the fit loop's own setter would not have it so where max_steps alone ends the run
            _Loop.restarting.fset(self._trainer.fit_loop, False)
        original()

    def _reset_epoch(self, original: Callable[..., None]) -> None:
        with warnings.catch_warnings():
            if self._resumed is not None:  # the loader need not resume: it is read up to its place
                warnings.filterwarnings("ignore", message="You're resuming from a checkpoint")
            original()

    def _run_starts(self, original: Callable[..., None]) -> None:
        original()
        if self._resumed is not None:
            logged.restore_shown(self._trainer, self._resumed["logged"])
            self._remember_what_was_saved()
            _generators(self._resumed["generators"]).restore()

    def _remember_what_was_saved(self) -> None:
        """What has been written at this update is not written again, at the next micro-batch and without its gradients."""
        step = self._trainer.global_step
        for callback in self._trainer.checkpoint_callbacks:
            every = getattr(callback, "_every_n_train_steps", 0)
            if self._moment is not Moment.BATCH_END or (every and step % every == 0):
                callback._last_global_step_saved = step

    def _epoch_starts(self, original: Callable[..., None], fetcher: _DataFetcher) -> None:
        state, self._resumed = self._resumed, None
        if state is not None and self._moment is not Moment.EPOCH_END:
            logged.restore_accumulated(self._trainer, state["logged"])
        if state is not None and (self._moment is Moment.EPOCH_END or not all(_with_state(self._trainer))):
            return self._fast_forward(fetcher, state)
        fit_loop = self._trainer.fit_loop
        if self._trainer.current_epoch > 0 and not (fit_loop.is_resuming or fit_loop.epoch_loop.restarting):
            self._iterated_with = RngState.capture()  # it makes the epoch's iterator
        original(fetcher)
        if state is not None:
            _generators(state["generators"]).restore()

    def _fast_forward(self, fetcher: _DataFetcher, state: dict[str, Any]) -> None:
        """Make the epoch's iterator as it was made, and read over the batches that are in the checkpoint.

        Raises:
            MisconfigurationException: if there are not as many.
        """
        epoch_loop = self._trainer.fit_loop.epoch_loop
        done = epoch_loop.batch_progress.current.ready
        if done and state["iterated_with"] is not None:
            _generators(state["iterated_with"]).restore()
        self._iterated_with = RngState.capture()
        iter(fetcher)
        for number in range(done):
            if next(fetcher, None) is None:
                raise MisconfigurationException(
                    f"the checkpoint was written after batch {done} of an epoch, but the train loader ends after {number}:"
                    " go on with the loader that it was written with"
                )
        fetcher._start_profiler, fetcher._stop_profiler = epoch_loop._on_before_fetch, epoch_loop._on_after_fetch
        if done:
            _generators(state["generators"]).restore()

    def _advance(self, original: Callable[..., None], fetcher: _DataFetcher) -> None:
        moment, self._moment = self._moment, None
        if moment is Moment.BATCH_END:  # what comes after the batch is still to do: perhaps a validation
            self._trainer.fit_loop.epoch_loop.val_loop.restarting = False
            return
        original(fetcher)


def _finish(fit: dict[str, Any], moment: Moment) -> None:
    """Count the batch or epoch whose end the checkpoint was written in."""
    progress = {Moment.BATCH_END: fit["epoch_loop.batch_progress"], Moment.EPOCH_END: fit["epoch_progress"]}.get(moment)
    for counts in (progress["total"], progress["current"]) if progress else ():
        counts["completed"] = counts["processed"]


def _buffers(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """What each rank has of its own; shards are in the checkpoint, and metrics are taken as a whole."""
    states = {id(value) for _, metric in _metrics(module) for value in metric._buffers.values()}
    return [
        (name, buffer)
        for name, buffer in module.named_buffers()
        if not isinstance(buffer, DTensor) and id(buffer) not in states
    ]


def _without_caches(metric: Metric) -> dict[str, Any]:
    """What it has accumulated; a computed value may be of any type, and is computed again."""
    return {name: value for name, value in metric_state(metric).items() if name not in _CACHES}


def _metrics(module: torch.nn.Module) -> list[tuple[str, Metric]]:
    return [(name, part) for name, part in module.named_modules() if isinstance(part, Metric)]


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return [_moved(one, device) for one in value] if isinstance(value, list) else value


def _plain(generators: RngState) -> dict[str, Any]:
    kept = {"torch_cpu": generators.torch_cpu, "python": generators.python, "device": generators.device, "numpy": None}
    if generators.numpy is not None:
        name, words, *rest = generators.numpy
        kept["numpy"] = (name, torch.tensor(words.tolist()), *rest)
    return kept


def _generators(kept: dict[str, Any]) -> RngState:
    numpy = kept["numpy"]
    if numpy is not None:
        import_module("numpy")  # it was loaded when the checkpoint was written
        name, words, *rest = numpy
        numpy = (name, words.tolist(), *rest)
    version, words, gauss = kept["python"]
    return RngState(
        torch_cpu=kept["torch_cpu"], python=(version, tuple(words), gauss), numpy=numpy, device=kept["device"]
    )
