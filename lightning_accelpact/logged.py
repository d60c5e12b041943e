"""What ``self.log`` has accumulated since the epoch began, in and out of a checkpoint.

Like ``loop.py`` this touches private attributes of Lightning (checked against lightning 2.6).
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync

from lightning_accelpact.participants import metric_state, set_metric_state

_PLAIN = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx",
    "metric_attribute",
)  # fmt: skip
_REDUCTIONS = {
    "torch.mean": torch.mean, "torch.sum": torch.sum, "torch.max": torch.max, "torch.min": torch.min,
    "sum": sum, "max": max, "min": min,
}  # fmt: skip
_SHOWN = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


def capture(trainer: pl.Trainer) -> dict[str, Any]:
    """The accumulated values, and those that were shown last, as ``torch.load(weights_only=True)`` accepts them."""
    results = trainer.fit_loop.epoch_loop._results
    return {
        "accumulated": {key: _described(value) for key, value in results.items() if not value.has_reset},
        "shown": {name: dict(getattr(trainer._logger_connector, name)) for name in _SHOWN},
    }


def _described(value: _ResultMetric) -> dict[str, Any]:
    meta = value.meta
    return {
        "meta": {name: getattr(meta, name) for name in _PLAIN},
        "reduction": next(name for name, function in _REDUCTIONS.items() if function is meta.reduce_fx),
        "sync": {"_should": meta.sync._should, "rank_zero_only": meta.sync.rank_zero_only},
        # A metric of the module's keeps its state itself
        "state": metric_state(value) if value.is_tensor else None,
    }


def restore_shown(trainer: pl.Trainer, state: dict[str, Any]) -> None:
    """What callbacks, loggers and the progress bar see until it is renewed."""
    for name, values in state["shown"].items():
        getattr(trainer._logger_connector, name).update(values)


def restore_accumulated(trainer: pl.Trainer, state: dict[str, Any]) -> None:
    """Go on accumulating within the epoch."""
    results = trainer.fit_loop.epoch_loop._results
    for key, kept in state["accumulated"].items():
        results[key] = _made(trainer, kept)
    trainer._logger_connector._first_loop_iter = True  # else the next batch would count as the first and reset them


def end_epoch(module: pl.LightningModule, state: dict[str, Any]) -> None:
    """The epoch has ended, and with it the module's metrics that were logged begin anew."""
    for kept in state["accumulated"].values():
        if kept["state"] is None:
            attrgetter(kept["meta"]["metric_attribute"])(module).reset()


def _made(trainer: pl.Trainer, kept: dict[str, Any]) -> _ResultMetric:
    meta = _Metadata(**kept["meta"], reduce_fx=_REDUCTIONS[kept["reduction"]])
    meta.sync = _Sync(fn=trainer.strategy.reduce, **kept["sync"])
    value = _ResultMetric(meta, kept["state"] is not None).to(trainer.strategy.root_device)
    if kept["state"] is None:
        value.value = attrgetter(meta.metric_attribute)(trainer.lightning_module)
        value._update_count = 1
    else:
        device = trainer.strategy.root_device
        moved = {name: one.to(device) if isinstance(one, torch.Tensor) else one for name, one in kept["state"].items()}
        set_metric_state(value, moved)
    value.has_reset = False
    return value
