"""The adapter to Lightning: what it touches is there, and an update that failed runs again exactly, in one process."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import adapters
import jobs
import lightning
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_accelpact import loop, participants, strategy
from lightning_accelpact.loop import ResilientOptimization
from lightning_accelpact.recovery.action import Phase
from lightning_accelpact.recovery.communicator import CommunicatorLost
from lightning_accelpact.recovery.digest import state_digest
from lightning_accelpact.recovery.fault import FaultInjector, FaultPlan
from lightning_accelpact.recovery.incident import Incident
from lightning_accelpact.recovery.leave import Leave
from lightning_accelpact.recovery.machine import UpdateAborted
from lightning_accelpact.recovery.progress import Progress

_LIGHTNING = f"lightning {lightning.__version__}"
_METRICS = f"torchmetrics {torchmetrics.__version__}"

TOUCHED: dict[str, tuple[Any, list[str]]] = {
    "_AutomaticOptimization": (_AutomaticOptimization, ["run", "_make_closure", "_optimizer_step"]),
    "loops.optimization.automatic": (inspect.getmodule(_AutomaticOptimization), ["_AutomaticOptimization"]),
    "loops.utilities": (pl.loops.utilities, ["_block_parallel_sync_behavior"]),
    "_TrainingEpochLoop": (_TrainingEpochLoop, ["_broadcast_sigterm_tensor"]),
    "Precision": (Precision, ["_after_closure"]),
    "Trainer": (pl.Trainer, ["_results"]),
    "_LoggerConnector()": (_LoggerConnector(pl.Trainer(barebones=True)), ["_first_loop_iter", "_current_fx"]),
    "_SignalConnector": (_SignalConnector, ["_sigterm_notifier_fn"]),
}
ON_INSTANCES = {"_skip_backward", "_per_optimizer_states", "_signal_connector", "_logger_connector"}
OVERRIDDEN = [
    "_setup_distributed", "_get_process_group_backend", "setup_environment", "setup", "barrier", "broadcast", "reduce",
    "all_gather", "backward", "optimizer_step", "on_exception", "on_train_end", "teardown", "save_checkpoint",
    "load_checkpoint", "distributed_sampler_kwargs", "set_world_ranks",
]  # fmt: skip
SET = ["_device_mesh", "_data_parallel_size", "_tensor_parallel_size"]


# -- what is touched


def test_lightning_is_a_version_that_was_checked() -> None:
    adapters.require_checked(loop, "lightning", lightning.__version__, loop.CHECKED_LIGHTNING)


@pytest.mark.parametrize("owner", TOUCHED)
def test_what_the_adapter_touches_is_there(owner: str) -> None:
    present, names = TOUCHED[owner]
    adapters.require(loop, _LIGHTNING, owner, present, *names)


def test_this_list_is_complete() -> None:
    listed = {name for _, names in TOUCHED.values() for name in names}
    assert adapters.private_names(loop) - listed == ON_INSTANCES


def test_what_the_adapter_touches_on_instances_is_there() -> None:
    epoch_loop = pl.Trainer(logger=False, barebones=True).fit_loop.epoch_loop
    adapters.require(loop, _LIGHTNING, "_TrainingEpochLoop", epoch_loop, "automatic_optimization")
    automatic = epoch_loop.automatic_optimization
    adapters.require(loop, _LIGHTNING, "_AutomaticOptimization", automatic, "optim_progress", "_skip_backward")
    scaler = torch.amp.GradScaler("cpu")
    adapters.require(loop, f"torch {torch.__version__}", "GradScaler", scaler, "_per_optimizer_states")
    metric = torchmetrics.MeanMetric()
    metric(1.0)
    of_lightning = {"has_reset"}
    of_metrics = {"_defaults", *participants._METRIC_ATTRIBUTES} - of_lightning
    adapters.require(participants, _METRICS, "Metric", metric, *of_metrics)
    logged = _ResultMetric(_Metadata("training_step", "loss"), is_tensor=True)
    adapters.require(participants, _LIGHTNING, "_ResultMetric", logged, *of_lightning)


def test_a_metric_has_no_other_private_state() -> None:
    """What changes in an update, beside the declared states, is all in the list that is captured."""
    metric = torchmetrics.MeanMetric()
    before = {name: value for name, value in vars(metric).items() if not isinstance(value, torch.Tensor)}
    metric(1.0)
    metric.compute()
    after = vars(metric)
    changed = {name for name, value in before.items() if after[name] is not value and after[name] != value}
    assert changed <= {*participants._METRIC_ATTRIBUTES}
    assert "_update_count" in changed


def test_the_loop_runs_a_micro_batch_with_these_arguments() -> None:
    run, after_closure = inspect.signature(_AutomaticOptimization.run), inspect.signature(Precision._after_closure)
    assert list(run.parameters) == ["self", "optimizer", "batch_idx", "kwargs"]
    assert list(after_closure.parameters) == ["self", "model", "optimizer"]


def test_what_the_strategy_overrides_or_calls_is_there() -> None:
    adapters.require(strategy, _LIGHTNING, "ModelParallelStrategy", ModelParallelStrategy, *OVERRIDDEN)
    adapters.require(strategy, _LIGHTNING, "ModelParallelStrategy()", list(vars(ModelParallelStrategy())), *SET)


# -- an update that runs again


class Machine:
    """Stands for the repair machine: no peers, and every fault is repaired at once by running the update again."""

    def __init__(self, *, votes_to_abort: tuple[int, ...] = ()) -> None:
        self.progress = Progress(rank=0)
        self.faults = FaultInjector(FaultPlan(), progress=self.progress, cut=lambda groups: 0, clock=lambda: 0.0)
        self.incidents: list[Incident] = []
        self.phases: list[Phase] = []
        self.polls = 0
        self.votes = 0
        self.votes_to_abort = votes_to_abort
        self.leave = Leave(None, 1)
        self.on_leave: Callable[[], None] = lambda: None
        self.on_redo: Callable[[], None] = lambda: None

    @contextmanager
    def inside(self) -> Iterator[None]:
        yield

    def poll(self) -> None:
        self.polls += 1

    def enter(self, phase: Phase) -> None:
        self.phases.append(phase)

    def vote(self) -> None:
        self.votes += 1
        if self.votes in self.votes_to_abort:
            self.recover(CommunicatorLost("the vote was vetoed"))
            raise UpdateAborted

    def recovers(self, error: BaseException) -> bool:
        return isinstance(error, CommunicatorLost)

    def unwound(self) -> None:
        pass

    def recover(self, error: BaseException, *, unwound: bool = False) -> None:
        self.incidents.append(
            Incident(rank=0, number=len(self.incidents) + 1, generation=1, time=0.0, source="exception", reason="",
                     phase="", frontier=0)
        )  # fmt: skip
        self.on_redo()


class Script:
    """When training steps fail; no attribute of the module's own, or running again would begin with setting it back."""

    def __init__(self, failing: tuple[int, ...], late: bool) -> None:
        self.failing = failing
        self.late = late
        self.calls = 0
        self.batches: list[int] = []


class Model(jobs.Regressor):
    """The regressor with everything that a micro-batch may change, failing in the calls of its step that are named."""

    def __init__(self, failing: tuple[int, ...] = (), *, late: bool = False) -> None:
        super().__init__(layers=2, width=8)
        self.accuracy = torchmetrics.MeanMetric()
        self.seen = torchmetrics.CatMetric()
        self.register_buffer("average", torch.zeros(1))
        self.losses: list[float] = []
        self.script = Script(failing, late)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        script = self.script
        script.calls += 1
        failing = script.calls in script.failing
        if failing and not script.late:
            raise CommunicatorLost("in the step")
        script.batches.append(batch_idx)
        loss = super().training_step(batch, batch_idx) + 0.01 * np.random.rand()
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        self.accuracy(loss.detach())
        self.seen.update(loss.detach())
        self.losses.append(loss.item())
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        if batch_idx > 2:
            self.log("appears_later", loss, on_epoch=True)
        if failing:
            raise CommunicatorLost("after the step")
        return loss


def fit(
    model: Model, machine: Machine | None = None, *, accumulate: int = 2, steps: int = 5, **options: Any
) -> dict[str, Any]:
    """Train in this process; without a machine with Lightning's own loop."""
    pl.seed_everything(3, verbose=False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    trainer = pl.Trainer(
        **{"accelerator": "cpu", "max_steps": steps, "accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5,
           "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
           "callbacks": [Install(machine)] if machine else [], **options}
    )  # fmt: skip
    trainer.fit(model)
    progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.state_dict()
    return {
        "digest": state_digest(model, trainer.optimizers),
        "step": trainer.global_step,
        "logged": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "seen": model.seen.compute().tolist(),
        "losses": model.losses,
        "progress": progress,
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
    }


class Install(pl.Callback):
    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        def drop() -> None:
            for optimizer in trainer.optimizers:
                optimizer.zero_grad(set_to_none=True)

        self.loop = ResilientOptimization.install(trainer, self.machine, drop)
        loop.guard_steps(trainer.precision_plugin, self.machine)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    """What Lightning's own loop makes of it."""
    return fit(Model())


def test_the_loop_in_place_changes_nothing(undisturbed: dict[str, Any]) -> None:
    machine = Machine()
    assert fit(Model(), machine) == undisturbed
    assert (machine.polls, machine.votes, machine.incidents) == (10, 5, [])


@pytest.mark.parametrize("late", [False, True], ids=["begin", "end"])
@pytest.mark.parametrize("failing", [(1,), (2,), (5,), (6,), (10,), (5, 6), (6, 7, 8), (3, 6, 9)], ids=str)
def test_a_failed_update_runs_again_exactly(
    failing: tuple[int, ...], late: bool, undisturbed: dict[str, Any]
) -> None:
    machine = Machine()
    assert fit(Model(failing, late=late), machine) == undisturbed
    assert len(machine.incidents) == len(failing)


def test_an_update_aborted_by_the_guard_runs_again_exactly(undisturbed: dict[str, Any]) -> None:
    machine = Machine(votes_to_abort=(1, 3, 4))
    model = Model()
    assert fit(model, machine) == undisturbed
    assert machine.votes == 5 + 3
    assert model.script.batches == [0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 4, 5, 6, 7, 8, 9]


def test_what_was_redone_is_in_the_incident() -> None:
    machine = Machine()
    fit(Model((2,)), machine, steps=1)
    (incident,) = machine.incidents
    assert incident.redone_micro_batches == 2  # the one that had finished and the one that failed
    assert incident.redo_s >= 0


def test_a_partial_window_at_the_end_of_an_epoch() -> None:
    """Lightning steps at an epoch's last batch although the window is not full."""
    options = {"accumulate": 3, "steps": -1, "max_epochs": 2, "limit_train_batches": 4}
    expected = fit(Model(), **options)
    # 4 micro-batches an epoch: windows of 3 and 1. Call 4 is the short one, call 6 (5 with the repetition) in the next
    for failing in [(4,), (6,), (8,)]:
        assert fit(Model(failing), Machine(), **options) == expected


def test_an_error_that_is_no_fault_ends_the_fit() -> None:
    class Broken(Model):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise RuntimeError("shapes cannot be multiplied")

    machine = Machine()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fit(Broken(), machine)
    assert machine.incidents == []


def test_the_loop_takes_over_the_progress_that_a_checkpoint_restores() -> None:
    trainer = pl.Trainer(logger=False, barebones=True, accelerator="cpu")
    trainer.strategy.connect(Model())
    replaced = trainer.fit_loop.epoch_loop.automatic_optimization
    replaced._skip_backward = True
    machine = Machine()
    installed = ResilientOptimization.install(trainer, machine, lambda: None)
    assert trainer.fit_loop.epoch_loop.automatic_optimization is installed
    assert installed.optim_progress is replaced.optim_progress
    assert installed._skip_backward
    assert machine.on_redo == installed.redo


def test_what_follows_an_update_is_called_outside_of_its_window() -> None:
    machine, seen = Machine(), []

    class Following(pl.Callback):
        def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            loop = trainer.fit_loop.epoch_loop.automatic_optimization
            loop._after_update = lambda: seen.append((trainer.global_step, loop._running))

    fit(Model((2,)), steps=2, callbacks=[Install(machine), Following()])
    assert seen == [(0, False), (1, False), (1, False), (2, False)]


def test_the_phase_is_entered_for_each_micro_batch() -> None:
    machine = Machine()
    fit(Model(), machine, steps=2)
    assert machine.phases == [Phase.FORWARD] * 4


# -- what it sets aside


def test_the_vote_comes_after_clipping_and_before_the_step() -> None:
    seen = []

    class Watching(Model):
        def configure_gradient_clipping(self, optimizer: Any, **options: Any) -> None:
            super().configure_gradient_clipping(optimizer, **options)
            seen.append(("clipped", self.head.weight.clone()))

    class Voting(Machine):
        def vote(self) -> None:
            seen.append(("vote", model.head.weight.clone()))

    model = Watching()
    fit(model, Voting(), steps=1)
    assert [name for name, _ in seen] == ["clipped", "vote"]
    assert torch.equal(seen[0][1], seen[1][1])
    assert not torch.equal(seen[1][1], model.head.weight)


def test_sigterm_ends_the_run_at_a_boundary_that_is_agreed_on() -> None:
    """Instead of the broadcast before every micro-batch, which swallows the errors that it meets."""
    trainer = pl.Trainer(logger=False, barebones=True, accelerator="cpu")
    machine = Machine()
    loop.agree_on_sigterm(trainer, machine)
    look = trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor
    assert machine.leave.wanted() is False
    trainer._signal_connector._sigterm_notifier_fn(signal.SIGTERM, None)
    assert machine.leave.wanted() is True
    assert not trainer.received_sigterm
    look()  # this rank alone wants to: it goes on until a vote has told all
    machine.on_leave()
    assert trainer.received_sigterm  # for the loops that look at it
    with pytest.raises(SIGTERMException):
        look()


def test_the_scaler_forgets_that_gradients_were_unscaled() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    precision = MixedPrecision("16-mixed", "cpu", scaler)

    def unscaled() -> float:
        optimizer.zero_grad()
        scaler.scale(layer(torch.ones(1)).sum()).backward()
        scaler.unscale_(optimizer)
        return layer.bias.grad.item()

    assert unscaled() == 1.0
    with pytest.raises(RuntimeError, match="already been called"):
        unscaled()
    loop.reset_scaler(precision)
    assert unscaled() == 1.0
    assert scaler.get_scale() == 8.0
    loop.reset_scaler(Precision())  # has none


def test_lightning_takes_the_module_as_configured_by_the_strategy() -> None:
    module = Model()
    with loop.configured_by_strategy(module):
        assert is_overridden("configure_model", module)
        module.configure_model()
    assert not is_overridden("configure_model", module)
    assert "configure_model" not in vars(module)


def test_a_configure_model_of_the_instance_is_left_alone() -> None:
    module = Model()
    module.configure_model = own = lambda: None
    with loop.configured_by_strategy(module):
        assert module.configure_model is own
    assert module.configure_model is own


# -- refusals


def test_manual_optimization_is_refused_unless_chosen() -> None:
    module = Model()
    module.automatic_optimization = False
    with pytest.raises(MisconfigurationException) as caught:
        loop.require_manual_choice(module, "refuse")
    message = str(caught.value)
    assert "Model sets automatic_optimization=False" in message
    assert "return the loss from training_step" in message
    assert 'manual_optimization="update"' in message and 'manual_optimization="fail_stop"' in message
    loop.require_manual_choice(module, "update")


def test_an_optimizer_that_evaluates_its_closure_often_is_refused() -> None:
    module = Model()
    trainer = pl.Trainer(logger=False, barebones=True, accelerator="cpu")
    trainer.strategy.connect(module)
    trainer.strategy.optimizers = [torch.optim.LBFGS(module.parameters())]
    with pytest.raises(MisconfigurationException) as caught:
        loop.require_one_closure_per_step(trainer)
    assert "LBFGS evaluates its closure several times" in str(caught.value)
    assert "such as AdamW" in str(caught.value)
