"""The qualification of a stack: which probes, how often, and what follows from what they came to."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from statistics import median
from typing import Any

import torch

from lightning_accelpact.qualification import probes
from lightning_accelpact.qualification.outcome import Outcome
from lightning_accelpact.qualification.probes import Target
from lightning_accelpact.qualification.world import World
from lightning_accelpact.recovery.action import Action, Phase
from lightning_accelpact.recovery.envelope import Entry, ProbeResult
from lightning_accelpact.recovery.stack import Stack

LOOPS = {
    ("lightning.pytorch", "fsdp2"): "lightning_accelpact.qualification.under_trainer:train",
    ("lightning.pytorch", "fsdp1"): "lightning_accelpact.qualification.under_trainer:train_fsdp1",
    ("lightning.fabric", "fsdp2"): "lightning_accelpact.qualification.under_fabric:train",
    ("accelerate", "fsdp2"): "accelerate_plugin.qualification:train",
}
"""Framework and generation of FSDP -> the training that its probes run; see :class:`~.model.Trained`."""

RANKS = 4  # that train in a probe, where there are devices for them
DEADLINE = 40.0  # seconds for one trial, of which most take one or two
SHORT = "the short form, at the start of a run"
_MODEL = ("preserve", "retry", "redo")


@dataclass(frozen=True, kw_only=True)
class Form:
    """How much is probed.

    Args:
        trials: Probe -> how often, in this order; the first one decides whether the others are worth running.
        deadline: Seconds for one trial.
        name: For the entry's source.
    """

    trials: dict[str, int]
    deadline: float = DEADLINE
    name: str = "accelpact qualify"

    @classmethod
    def full(cls, trials: int, deadline: float = DEADLINE) -> Form:
        """Every probe, most of them several times."""
        counts = {"rebuild": trials, "again": trials, "watchdog": 1, **dict.fromkeys(_MODEL, trials)}
        return cls(trials=counts, deadline=deadline, name=f"accelpact qualify --trials {trials}")

    @classmethod
    def short(cls, backend: str) -> Form:
        """What a run does by itself on a new stack. Gloo has no watchdog that could kill a process."""
        watchdog = {} if backend == "gloo" else {"watchdog": 1}
        counts = {"rebuild": 1, "again": 1, **watchdog, **dict.fromkeys(_MODEL, 1)}
        return cls(trials=counts, name=SHORT)


@dataclass(kw_only=True)
class _Record:
    """What the trials of one probe have come to."""

    successes: int = 0
    trials: int = 0
    seconds: list[float] = field(default_factory=list)
    seen: str = ""
    failure: str = ""
    repairs: list[dict[str, Any]] = field(default_factory=list)

    def take(self, outcomes: Sequence[Outcome]) -> None:
        self.trials += 1
        failures = [f"rank {rank}: {one.failure}" for rank, one in enumerate(outcomes) if one.failure]
        values = [one.value for one in outcomes if not one.failure]
        # A rank that only followed another one's end says less than one that hung or was killed
        failures.sort(key=lambda text: "FailStop" in text)
        if not all(value.get("exact", True) for value in values):
            failures.append("the end differs from that of an undisturbed run")
        self.repairs += [repair for value in values for repair in value.get("repairs", ())]
        if failures:
            self.failure = self.failure or failures[0]
            return
        self.successes += 1
        self.seconds.append(max(value["seconds"] for value in values))
        self.seen = values[0]["seen"]

    def result(self, name: str) -> ProbeResult:
        spent = round(median(self.seconds), 4) if self.seconds else 0.0
        return ProbeResult(
            name=name, trials=self.trials, successes=self.successes, seconds=spent, detail=self.failure or self.seen
        )


class StacksDiffer(Exception):
    """The processes of a launcher do not stand on one stack; the message says where they differ."""


def devices_here(device_type: str) -> int:
    """How many ranks this machine can have; a device is not touched."""
    return torch.cuda.device_count() if device_type == "cuda" else RANKS


def stack_of(world: World, **of: str) -> Stack:
    """The stack that all ranks of a world stand on, found out in processes of their own: that may touch a device.

    Args:
        world: Whose.
        of: ``backend``, ``device_type``, ``framework`` and ``fsdp``.

    Raises:
        StacksDiffer: if they do not stand on one, or one cannot be told.
    """
    outcomes = world.run(_stack_here, of, deadline=DEADLINE)
    for rank, outcome in enumerate(outcomes):
        if outcome.failure:
            raise StacksDiffer(f"the stack of rank {rank} cannot be told: {outcome.failure}")
        if outcome.value != outcomes[0].value:
            raise StacksDiffer(f"rank 0 stands on {outcomes[0].value}, but rank {rank} on {outcome.value}")
    return Stack.from_dict(outcomes[0].value)


def _stack_here(of: dict[str, str]) -> dict[str, str]:
    if of["device_type"] == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return Stack.here(**of).to_dict()


def qualify(stack: Stack, device_type: str, **options: Any) -> Entry:
    """Qualify in forks of this process, which has no threads yet and has not touched a device.

    Args:
        stack: What is qualified.
        device_type: Type of its devices.
        options: Those of :class:`Qualification` after the first two.
    """
    framework = stack.framework.split()[0]
    loop = LOOPS.get((framework, stack.fsdp))
    if loop is None:
        return failed(stack, options["form"].name, f"there are no probes for {stack.fsdp} under {framework}")
    import_module(loop.partition(":")[0])  # once, and not in every fork
    return Qualification(stack, Target(backend=stack.backend, device_type=device_type, loop=loop), **options).entry()


def failed(stack: Stack, source: str, detail: str) -> Entry:
    """The entry of a stack whose probes could not even begin."""
    probe = ProbeResult(name="rebuild", trials=1, successes=0, detail=detail)
    return Entry(stack=stack, date=_now(), source=source, probes=(probe,))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class Qualification:
    """Runs probes and makes an entry of what they come to.

    Args:
        stack: What is qualified.
        target: The same, as the probes need it.
        make_world: Gives a world of a size.
        devices: How many ranks this machine can have.
        form: How much is probed.
        on_trial: Called before each trial with the probe's name.
        run_probe: The job of a rank.
    """

    def __init__(
        self,
        stack: Stack,
        target: Target,
        *,
        make_world: Callable[[int], World],
        devices: int,
        form: Form,
        on_trial: Callable[[str], None] = lambda name: None,
        run_probe: Callable[..., Any] = probes.run,
    ) -> None:
        self._stack = stack
        self._target = target
        self._make_world = make_world
        self._devices = devices
        self._form = form
        self._on_trial = on_trial
        self._run_probe = run_probe

    def entry(self) -> Entry:
        """Run all probes; a stack that fails them gets an entry that says so."""
        records = {name: _Record() for name in self._form.trials}
        for name, trials in self._form.trials.items():
            if obstacle := self._obstacle(records):
                records[name].failure = records[name].failure or obstacle
                continue
            for _ in range(trials):
                self._on_trial(name)
                records[name].take(self._trial(name))
                if records[name].failure:  # more of the same would cost a deadline each
                    break
        results = [record.result(name) for name, record in records.items()]
        results.append(_census(records))
        return Entry(
            stack=self._stack,
            actions=_actions(results, records),
            date=_now(),
            source=self._form.name,
            probes=tuple(results),
        )

    def _obstacle(self, records: dict[str, _Record]) -> str:
        """Why there is no sense in another probe; empty if there is."""
        if self._devices < 2:
            return f"not run: a probe needs 2 devices, and this process sees {self._devices}"
        first = next(iter(records))
        return f"not run, since {first} has failed" if records[first].failure else ""

    def _trial(self, name: str) -> list[Outcome]:
        size = min(RANKS, self._devices // 2 * 2) if name in _MODEL else 2
        world = self._make_world(size)
        return world.run(self._run_probe, name, self._target, deadline=self._form.deadline)


def _census(records: dict[str, _Record]) -> ProbeResult:
    """The references that the repairs of the model have redirected; none may be left (paper, rebinding invariant)."""
    repairs = [repair for name in _MODEL if name in records for repair in records[name].repairs]
    counts = [repair["references"] for repair in repairs]
    clean = sum(repair["references"] > 0 and repair["stale_references"] == 0 for repair in repairs)
    left = max((repair["stale_references"] for repair in repairs), default=0)
    seen = f"{min(counts)} to {max(counts)} references redirected, {left} left" if counts else "no repair to count in"
    return ProbeResult(name="rebind", trials=len(repairs), successes=clean, detail=seen)


def _actions(results: Sequence[ProbeResult], records: dict[str, _Record]) -> dict[Phase, tuple[Action, ...]]:
    """Phase -> what the probes have shown there, best first.

    What a rank does that stands ``PREPARED`` it does in any backward as well, only later; so that follows from it.
    """
    passed = {result.name: result.passed for result in results}
    if not all(passed.get(name, True) for name in ("rebuild", "watchdog", "rebind")):
        return {}
    seen = {
        (Phase(repair["phase"]), Action(repair["verb"]))
        for name in _MODEL
        if passed.get(name)
        for repair in records[name].repairs
    }
    seen |= {(Phase.COMMITTED, Action.RETRY)} if passed["again"] else set()
    seen |= {(Phase.PREPARED, action) for phase, action in seen if phase is Phase.BACKWARD}
    usable = {
        Phase.COMMITTED: (Action.PRESERVE, Action.RETRY),
        Phase.FORWARD: (Action.RETRY, Action.REDO),
        Phase.BACKWARD: (Action.RETRY, Action.REDO),
        Phase.PREPARED: (Action.ROLL_FORWARD, Action.RETRY, Action.REDO),
    }
    return {phase: tuple(one for one in actions if (phase, one) in seen) for phase, actions in usable.items()}
