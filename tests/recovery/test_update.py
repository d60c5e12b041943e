"""An update given as a function: what runs again, what is voted on when, and what is refused. In one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_accelpact.recovery.action import Action, Phase
from lightning_accelpact.recovery.communicator import CommunicatorLost
from lightning_accelpact.recovery.fault import FaultInjector, FaultPlan
from lightning_accelpact.recovery.incident import Incident
from lightning_accelpact.recovery.machine import UpdateAborted
from lightning_accelpact.recovery.policy import FailStop
from lightning_accelpact.recovery.progress import Progress
from lightning_accelpact.recovery.update import UpdateMisuse, UpdateRunner
from lightning_accelpact.recovery.window import Buffers, Modes, Window


class Machine:
    """Stands for the repair machine: no peers, every fault is repaired at once, and its votes are written down.

    Args:
        votes: What becomes of each vote: passed, or the action after a repair.
    """

    def __init__(self, *votes: Action | None) -> None:
        self.votes = list(votes)
        self.log: list[str] = []
        self.progress = Progress(rank=0)
        self.faults = FaultInjector(FaultPlan(), progress=self.progress, cut=lambda groups: 0, clock=lambda: 0.0)
        self.incidents: list[Incident] = []
        self.inside_update = False
        self.on_redo: Callable[[], None] = lambda: None

    @contextmanager
    def inside(self) -> Iterator[None]:
        self.inside_update = True
        try:
            yield
        finally:
            self.inside_update = False

    def poll(self) -> None:
        self.log.append("poll")

    def enter(self, phase: Phase) -> None:
        self.progress.phase = phase

    def vote(self) -> None:
        assert self.inside_update
        self.log.append("vote")
        outcome = self.votes.pop(0) if self.votes else None
        if outcome is Action.REDO:
            self.recover(CommunicatorLost("vetoed"))
            raise UpdateAborted
        self.progress.phase = Phase.STEPPING

    def stepped(self) -> None:
        assert not self.inside_update  # a repair from here on has nothing to run again
        self.log.append("stepped")
        self.progress.commit()

    def recovers(self, error: BaseException) -> bool:
        return isinstance(error, CommunicatorLost)

    def unwound(self) -> None:
        pass

    def recover(self, error: BaseException, *, unwound: bool = False) -> None:
        self.incidents.append(
            Incident(rank=0, number=len(self.incidents) + 1, generation=1, time=1e12, source="exception", reason="",
                     phase="", frontier=0)
        )  # fmt: skip
        self.progress.phase = Phase.COMMITTED
        self.on_redo()

    @property
    def stop(self) -> SimpleNamespace:
        return SimpleNamespace(everywhere=self._fail)

    def _fail(self, reason: str) -> None:
        raise FailStop(reason)


class Loop:
    """A model with dropout and BatchNorm, two optimizers, and a runner."""

    def __init__(self, *votes: Action | None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.optimizers = [torch.optim.AdamW(self.model[i].parameters(), lr=0.1) for i in (0, 3)]
        self.machine = Machine(*votes)
        self.runner = UpdateRunner(
            self.machine,
            Window([Buffers(self.model), Modes(self.model)]),
            drop_gradients=self.drop_gradients,
            holds_gradients=lambda: any(parameter.grad is not None for parameter in self.model.parameters()),
        )

    def drop_gradients(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def compute(self, inputs: torch.Tensor) -> float:
        """A forward and a backward pass."""
        self.runner.enter(Phase.FORWARD)
        loss = self.model(inputs).sum()
        self.runner.enter(Phase.BACKWARD)
        loss.backward()
        return loss.item()

    def step(self) -> None:
        for optimizer in self.optimizers:
            self.runner.vote()
            optimizer.step()

    def state(self) -> dict[str, Any]:
        return {name: value.tolist() for name, value in self.model.state_dict().items()}


def train(*votes: Action | None, failing: tuple[int, ...] = (), updates: int = 3) -> tuple[Loop, list[float], int]:
    """Run updates of two micro-batches of which some calls fail; the loop, the losses and the number of calls."""
    loop, calls = Loop(*votes), 0

    def update(first: torch.Tensor, *, second: torch.Tensor) -> float:
        nonlocal calls
        calls += 1
        loss = loop.compute(first)
        loop.model.eval()
        if calls in failing:
            raise CommunicatorLost("between two micro-batches")
        loop.model.train()
        loss += loop.compute(second)
        loop.step()
        return loss

    batches = torch.arange(float(updates * 16)).view(updates, 2, 2, 4)
    losses = [loop.runner.run(update, first, second=second) for first, second in batches]
    return loop, losses, calls


def test_what_follows_an_update_comes_between_two_of_them() -> None:
    loop, seen = Loop(), []
    loop.runner = UpdateRunner(
        loop.machine,
        Window([]),
        drop_gradients=loop.drop_gradients,
        holds_gradients=lambda: False,
        after_update=lambda: seen.append((loop.machine.progress.frontier, loop.runner.active)),
    )

    attempts = iter(range(3))

    def update() -> None:
        loop.compute(torch.ones(2, 4))
        if next(attempts) == 0:
            raise CommunicatorLost("once")
        loop.step()

    loop.runner.run(update)
    loop.runner.run(update)
    assert seen == [(1, False), (2, False)]


@pytest.mark.parametrize("failing", [(1,), (2,), (1, 2, 4)], ids=str)
def test_a_failed_update_runs_again_exactly(failing: tuple[int, ...]) -> None:
    expected, losses, calls = train()
    loop, found, more_calls = train(failing=failing)
    assert found == losses
    assert loop.state() == expected.state()
    assert more_calls == calls + len(failing)


def test_an_update_aborted_by_its_vote_runs_again_exactly() -> None:
    expected, losses, calls = train()
    loop, found, more_calls = train(Action.REDO, None, Action.REDO)
    assert (found, more_calls) == (losses, calls + 2)
    assert loop.state() == expected.state()


def test_there_is_one_vote_before_the_first_step_and_the_frontier_moves_at_the_end() -> None:
    loop, _, _ = train(updates=2)
    assert loop.machine.log == ["poll", "vote", "stepped"] * 2
    assert loop.machine.progress.frontier == 2


def test_the_incident_says_what_was_redone() -> None:
    loop, _, _ = train(Action.REDO, failing=(2,), updates=1)
    assert [incident.redone_micro_batches for incident in loop.machine.incidents] == [2, 1]
    assert all(incident.redo_s > 0 for incident in loop.machine.incidents)


def test_the_micro_batch_is_counted() -> None:
    loop, seen = Loop(), []

    def update() -> None:
        for _ in range(3):
            loop.compute(torch.ones(2, 4))
            seen.append(loop.machine.progress.micro_batch)
        loop.step()

    loop.runner.run(update)
    assert seen == [0, 1, 2]


def test_an_update_begins_without_gradients() -> None:
    loop = Loop()
    loop.model(torch.ones(2, 4)).sum().backward()

    def update() -> bool:
        held = any(parameter.grad is not None for parameter in loop.model.parameters())
        loop.compute(torch.ones(2, 4))
        loop.step()
        return held

    assert not loop.runner.run(update)


def test_an_error_that_is_no_fault_comes_out() -> None:
    loop = Loop()

    def update() -> None:
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        loop.runner.run(update)
    assert (loop.machine.log, loop.machine.inside_update) == (["poll"], False)


# -- an update without a step


def test_a_skipped_update_is_voted_on() -> None:
    loop = Loop()
    before = loop.state()
    assert loop.runner.run(lambda: "skipped") == "skipped"
    assert loop.state() == before
    assert (loop.machine.log, loop.machine.progress.frontier) == (["poll", "vote", "stepped"], 1)


def test_a_skipped_update_runs_again_if_a_peer_has_to() -> None:
    loop, calls = Loop(Action.REDO), []
    loop.runner.run(lambda: calls.append(1))
    assert len(calls) == 2


def test_gradients_for_a_later_update_are_refused() -> None:
    loop = Loop()
    with pytest.raises(UpdateMisuse, match="returned without an optimizer step, but left gradients: one function must"):
        loop.runner.run(lambda: loop.compute(torch.ones(2, 4)))
    assert "vote" not in loop.machine.log


# -- after a step


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_a_pass_after_a_step_is_refused(phase: Phase) -> None:
    loop = Loop()

    def update() -> None:
        loop.compute(torch.ones(2, 4))
        loop.step()
        loop.runner.enter(phase)

    with pytest.raises(UpdateMisuse, match=f"a {phase.value} pass after an optimizer step .* Steps come last"):
        loop.runner.run(update)


def test_a_fault_after_a_step_stops() -> None:
    loop = Loop()

    def update() -> None:
        loop.compute(torch.ones(2, 4))
        loop.step()
        raise CommunicatorLost("in a collective of the user's own")

    with pytest.raises(FailStop) as caught:
        loop.runner.run(update)
    assert "a fault after the first step" in caught.value.message
    assert "stepped" not in loop.machine.log


def test_a_batch_changed_in_place_is_an_obstacle() -> None:
    window = Window([])
    machine = Machine()
    runner = UpdateRunner(machine, window, drop_gradients=lambda: None, holds_gradients=lambda: False)
    obstacles = []

    def update(batch: dict[str, torch.Tensor]) -> None:
        obstacles.append(window.obstacle)
        batch["inputs"].mul_(2)
        obstacles.append(window.obstacle)

    runner.run(update, {"inputs": torch.ones(2)})
    assert obstacles[0] == ""
    assert "wrote to a tensor of its batch in place" in obstacles[1]
