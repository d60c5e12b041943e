"""The FSDP1 strategy in one process: what it touches of Lightning, its options, and its way to a training step."""

from __future__ import annotations

from typing import Any

import adapters
import jobs
import lightning
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from torch import nn

from lightning_accelpact import ResilientFSDP1Strategy, fsdp1_strategy, loop
from lightning_accelpact.recovery.action import Action
from lightning_accelpact.recovery.subject import Fsdp1Subject

_LIGHTNING = f"lightning {lightning.__version__}"
OVERRIDDEN = [
    "_setup_model", "setup_environment", "setup", "setup_precision_plugin", "mixed_precision_config",
    "model_sharded_context", "lightning_module_state_dict", "optimizer_state", "save_checkpoint", "load_checkpoint",
    "barrier", "broadcast", "reduce", "all_gather", "backward", "optimizer_step", "block_backward_sync",
    "set_world_ranks", "_get_process_group_backend", "distributed_sampler_kwargs", "on_exception", "on_train_end", "teardown",
]  # fmt: skip
SET = ["kwargs", "sharding_strategy", "mixed_precision", "_state_dict_type", "_forward_redirection"]


def test_lightning_is_a_version_that_was_checked() -> None:
    adapters.require_checked(fsdp1_strategy, "lightning", lightning.__version__, loop.CHECKED_LIGHTNING)


def test_what_the_strategy_overrides_or_calls_is_there() -> None:
    adapters.require(fsdp1_strategy, _LIGHTNING, "FSDPStrategy", FSDPStrategy, *OVERRIDDEN)
    adapters.require(fsdp1_strategy, _LIGHTNING, "FSDPStrategy()", list(vars(FSDPStrategy())), *SET)
    adapters.require(fsdp1_strategy, _LIGHTNING, "FSDPPrecision", FSDPPrecision, "clip_grad_by_norm", "_after_closure")
    assert adapters.private_names(fsdp1_strategy) <= {*OVERRIDDEN, *SET, _ForwardRedirection.__name__, *OF_OURS}


OF_OURS = {"_device_mesh"}


def test_the_trainer_takes_it_on_a_cpu() -> None:
    """Lightning refuses the name of its own strategy there, and exactly its class."""
    strategy = ResilientFSDP1Strategy()
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=4, logger=False)
    assert trainer.strategy is strategy
    assert isinstance(trainer.precision_plugin, FSDPPrecision)


@pytest.mark.parametrize(("precision", "unit"), [("32-true", None), ("bf16-mixed", torch.bfloat16)])
def test_units_have_mixed_precision_only_if_there_is_any(precision: Any, unit: torch.dtype | None) -> None:
    strategy = ResilientFSDP1Strategy()
    Trainer(strategy=strategy, accelerator="cpu", devices=4, logger=False, precision=precision)
    config = strategy.mixed_precision_config
    assert (config and config.param_dtype) == unit


def test_all_its_actions_are_qualified() -> None:
    """In one place, which the repairs look at; the fault matrix and the adapter's tests are the proof."""
    strategy = ResilientFSDP1Strategy(uncommitted="retry")
    assert Fsdp1Subject.qualified == tuple(Action)
    assert set(strategy.runtime._allowed(redo=True)) == set(Action)


def test_what_is_not_qualified_is_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = ResilientFSDP1Strategy()
    monkeypatch.setattr(Fsdp1Subject, "qualified", (Action.PRESERVE, Action.ROLL_FORWARD))
    assert strategy.runtime._allowed(redo=True) == [Action.PRESERVE, Action.ROLL_FORWARD]


def test_a_state_dict_type_that_there_is_not() -> None:
    with pytest.raises(ValueError, match=r"state_dict_type='half' must be one of \['full', 'sharded'\]"):
        ResilientFSDP1Strategy(state_dict_type="half")


def test_the_device_mesh_is_not_there_before_the_run() -> None:
    with pytest.raises(RuntimeError, match="made when the Trainer's run begins"):
        _ = ResilientFSDP1Strategy().device_mesh


class Wrapper(nn.Module):
    """Fails before it calls the module, as FSDP1 does when its all-gather fails; then works."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.failures = 1

    def forward(self, *args: Any) -> Any:
        self.failures -= 1
        if self.failures >= 0:
            raise RuntimeError("gathered in vain")
        return self.module(*args)


@pytest.mark.parametrize("redirection", [fsdp1_strategy._Redirection, _ForwardRedirection])
def test_a_step_that_was_not_reached_leaves_the_modules_forward_alone(redirection: type) -> None:
    """Lightning's own leaves its replacement there, and the step that runs again would call itself."""
    module = jobs.Regressor()
    module.log = lambda *args, **kwargs: None
    batch = (torch.ones(4, 16), torch.ones(4, 4))
    wrapper = Wrapper(module)
    with pytest.raises(RuntimeError, match="gathered in vain"):
        redirection()(wrapper, module, "training_step", batch, 0)
    if redirection is _ForwardRedirection:
        with pytest.raises(TypeError):
            redirection()(wrapper, module, "training_step", batch, 0)
    else:
        assert redirection()(wrapper, module, "training_step", batch, 0).ndim == 0
