"""Ranks as threads that run the user's loop over a stand-in for the repair machine, with faults and ranks that lag."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from accelerate_plugin.batches import Feed
from accelerate_plugin.loop import Iterations
from lightning_accelpact.recovery.action import Action, Phase, decide
from lightning_accelpact.recovery.machine import UpdateAborted
from lightning_accelpact.recovery.progress import Progress

PATIENCE_S = 20


class Broken(RuntimeError):
    """A communication fault."""


class Coordinator:
    """What the ranks agree on: votes and repairs.

    Args:
        world_size: Number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.changed = threading.Condition()
        self.called = 0  # the newest repair that was called
        self.reports: dict[int, dict[int, Any]] = {}
        self.ballots: dict[tuple[int, int], set[int]] = {}
        self.vetoed: set[tuple[int, int]] = set()

    def wait(self, condition: Callable[[], bool]) -> None:
        if not self.changed.wait_for(condition, PATIENCE_S):
            raise AssertionError("a rank waits for ever")


class Machine:
    """One rank's stand-in: the machine's rules without communicators."""

    def __init__(self, rank: int, coordinator: Coordinator, lag: Callable[[], bool]) -> None:
        self.progress = Progress(rank=rank)
        self.coordinator = coordinator
        self.generation = 0
        self.inside_update = False
        self.incidents: list[Any] = []
        self.faults = SimpleNamespace(fire=lambda *_, **__: None)
        self.on_redo: Callable[[], None] = lambda: None
        self.on_agreed_redo: Callable[[Any], None] = lambda decision: None
        self.obstacle: Callable[[], str] = lambda: ""
        self.lag = lag

    def poll(self) -> None:
        with self.coordinator.changed:
            pending = self.coordinator.called > self.generation
        if pending and not self.lag():
            self._join(unwound=False)

    def enter(self, phase: Phase) -> None:
        self.progress.phase = phase

    def collective(self) -> None:
        """Where a rank inside an update learns of a repair."""
        with self.coordinator.changed:
            pending = self.coordinator.called > self.generation
        if pending and not self.lag():
            self._join(unwound=False)
            if self.verb is Action.REDO:
                raise UpdateAborted

    def recovers(self, error: BaseException) -> bool:
        return isinstance(error, Broken)

    def recover(self, error: BaseException, *, unwound: bool = False) -> None:
        with self.coordinator.changed:
            if self.coordinator.called == self.generation:
                self.coordinator.called += 1
                self.coordinator.changed.notify_all()
        self._join(unwound=unwound)

    def _join(self, *, unwound: bool) -> None:
        coordinator = self.coordinator
        with coordinator.changed:
            self.generation += 1
            reports = coordinator.reports.setdefault(self.generation, {})
            self.progress.obstacle = self.obstacle()
            reports[self.progress.rank] = self.progress.report(self.generation, in_place=not unwound)
            coordinator.changed.notify_all()
            coordinator.wait(lambda: len(reports) == coordinator.world_size)
        allowed = [action for action in Action if action is not Action.RETRY]
        decision = decide([reports[rank] for rank in sorted(reports)], allowed=allowed)
        assert decision.action is not Action.RESTART, decision.reason
        self.incidents.append(SimpleNamespace(time=0.0, redone_micro_batches=0, redo_s=0.0))
        if decision.action is Action.REDO:
            self.on_agreed_redo(decision)
        self.verb = decision.verbs[self.progress.rank]
        if self.verb is Action.REDO and self.progress.phase is not Phase.COMMITTED:
            self.progress.phase = Phase.COMMITTED
            self.progress.micro_batch = 0
            self.on_redo()

    def unwound(self) -> None:
        pass

    @contextmanager
    def inside(self) -> Iterator[None]:
        yield

    def vote(self) -> None:
        coordinator = self.coordinator
        self.progress.phase = Phase.PREPARED
        with coordinator.changed:
            name = (self.generation, self.progress.frontier)
            ballot = coordinator.ballots.setdefault(name, set())
            if coordinator.called == self.generation:
                ballot.add(self.progress.rank)
            coordinator.changed.notify_all()
            coordinator.wait(lambda: len(ballot) == coordinator.world_size or coordinator.called > self.generation)
            passed = len(ballot) == coordinator.world_size
        if not passed:
            self._join(unwound=False)
            if self.verb is Action.REDO:
                raise UpdateAborted
        self.progress.phase = Phase.STEPPING

    def stepped(self) -> None:
        self.progress.commit()
        self.poll()

    @property
    def stop(self) -> SimpleNamespace:
        return SimpleNamespace(everywhere=self._fail)

    def _fail(self, reason: str) -> None:
        raise AssertionError(reason)


class Counters:
    """Accelerate's count of micro-batches, and its rule for when an update is complete."""

    def __init__(self, every: int) -> None:
        self.step = 0
        self.every = every
        self.sync = True

    def count(self) -> None:
        self.step += 1
        self.sync = self.step % self.every == 0

    def hold_back(self) -> None:
        self.sync = False


class Loader:
    """Batches 0, 1, 2, ..."""

    end_of_dataloader = False


@dataclass
class Trace:
    """What one rank's loop has done.

    Args:
        updates: For each update the batches that its gradients came from.
        commits: The iterations of the loop in which updates were applied.
        iterations: How many iterations the loop has run.
        begun: Whether each iteration was computed to its end, by its number.
    """

    updates: list[list[int]] = field(default_factory=list)
    commits: list[int] = field(default_factory=list)
    iterations: int = 0
    error: BaseException | None = None


def run_loop(machine: Machine, trace: Trace, *, updates: int, every: int, breaks: Callable[[int, int], bool]) -> None:
    """The user's loop on one rank.

    Args:
        machine: Its machine.
        trace: Takes in what it does.
        updates: How many updates to apply.
        every: Micro-batches of each.
        breaks: Whether a fault strikes in this micro-batch of this update.
    """
    gradients: list[int] = []
    counters = Counters(every)
    loop = Iterations(machine, counters, [], drop_gradients=gradients.clear, on_commit=lambda: None)
    machine.on_redo = loop.redo
    machine.obstacle = lambda: loop.obstacle
    feed = Feed(loop.hand_out, Loader(), iter(range(10**6)), lambda: 1)
    for batch in feed:
        with loop.iteration() as idle:
            if not idle:
                counters.count()
            loop.enter(Phase.FORWARD)
            machine.collective()
            if breaks(machine.progress.frontier, machine.progress.micro_batch):
                raise Broken
            loop.enter(Phase.BACKWARD)
            gradients.append(batch)
            machine.collective()
            if counters.sync:
                loop.vote()
                trace.updates.append(list(gradients))
                trace.commits.append(trace.iterations)
                gradients.clear()
                loop.commit()
        trace.iterations += 1
        if counters.sync and len(trace.updates) == updates:
            return


def run_ranks(seed: int, *, world_size: int = 4, updates: int = 4, every: int = 3, faults: int = 2) -> list[Trace]:
    """Run all ranks with random faults and lags."""
    choose = random.Random(seed)
    coordinator = Coordinator(world_size)
    pending = {
        (choose.randrange(world_size), choose.randrange(updates), choose.randrange(every)) for _ in range(faults)
    }
    traces = [Trace() for _ in range(world_size)]

    def rank_main(rank: int) -> None:
        lags = random.Random(f"{seed}/{rank}")

        def breaks(update: int, micro_batch: int) -> bool:
            fault = (rank, update, micro_batch)
            struck = fault in pending
            pending.discard(fault)
            return struck

        machine = Machine(rank, coordinator, lag=lambda: lags.random() < 0.6)
        try:
            run_loop(machine, traces[rank], updates=updates, every=every, breaks=breaks)
            with coordinator.changed:  # nobody leaves while a peer may need it
                coordinator.ballots.setdefault((-1, -1), set()).add(rank)
                coordinator.changed.notify_all()
        except BaseException as error:  # shown by the test
            traces[rank].error = error
            raise

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S * 2)
    return traces
