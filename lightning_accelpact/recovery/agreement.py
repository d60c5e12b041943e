"""The envelope in force: rank 0 says what is qualified, and all ranks act on that one ruling."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_accelpact.recovery.action import UNRESTRICTED, Action, Phase, Ruling
from lightning_accelpact.recovery.control import ControlPlane, Superseded
from lightning_accelpact.recovery.envelope import (
    HOW_TO_QUALIFY,
    PUBLISHED,
    VARIABLE,
    Entry,
    Envelope,
    EnvelopeError,
    cache_file,
    user_file,
)
from lightning_accelpact.recovery.stack import Stack

log = logging.getLogger("accelpact")

AUTO, OFF = "auto", "off"
_AGREEMENT = timedelta(seconds=180)  # longer than a short qualification may take
_FAILURE_KEPT = timedelta(days=1)  # a probe may have failed since the machine was busy


class EnvelopeSource:
    """Finds what is qualified on this process's stack.

    Args:
        option: ``"auto"``, ``"off"`` or the path of an envelope, as the user has given it.
        qualify: Runs the short form of the qualification on a stack.
        environment: Where ``ACCELPACT_ENVELOPE`` stands in for ``"auto"``.
    """

    def __init__(
        self,
        option: str | os.PathLike[str],
        qualify: Callable[[Stack], Entry],
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        given = os.fspath(option)
        self.option = environment.get(VARIABLE) or AUTO if given == AUTO else given
        self._qualify = qualify
        self._environment = environment

    def ruling(self, stack: Stack) -> Ruling:
        """What may be done on this stack.

        Raises:
            EnvelopeError: if a file of the user's cannot be read.
        """
        if self.option == OFF:
            return UNRESTRICTED
        if self.option != AUTO:
            return Envelope.load(PUBLISHED, Path(self.option).expanduser()).ruling(stack)
        own = user_file(self._environment)
        envelope = Envelope.load(PUBLISHED, *([own] if own.exists() else []))
        entry = envelope.find(stack) or self._cached(stack) or self._measured(stack)
        return entry.ruling()

    def _cached(self, stack: Stack) -> Entry | None:
        file = cache_file(stack, self._environment)
        try:
            entry = Envelope.load(file).find(stack) if file.exists() else None
        except EnvelopeError as error:  # nobody's work is lost with a cache
            log.warning("%s: measured again", error)
            return None
        outdated = entry is not None and entry.failure and entry.age > _FAILURE_KEPT
        return None if outdated else entry

    def _measured(self, stack: Stack) -> Entry:
        log.warning("this stack is new here: finding out what can be repaired on it, which takes some seconds, once")
        entry = self._qualify(stack)
        file = cache_file(stack, self._environment)
        try:
            Envelope([entry]).save(file)
        except OSError as error:
            log.warning("the result cannot be kept for the next run in %s: %s", file, error)
        return entry


def agree(control: ControlPlane, source: EnvelopeSource, stack: Stack, *, run: int) -> Ruling:
    """Put one ruling in force on all ranks: rank 0's, if all ranks stand on its stack.

    Args:
        control: The control plane, while no repair can be under way.
        source: Where rank 0 finds it.
        stack: This rank's.
        run: Number of the run.

    Returns:
        The same on every rank. On different stacks nothing is qualified.

    Raises:
        EnvelopeError: on every rank, if rank 0's envelope cannot be read, or the option differs between ranks.
        RuntimeError: if a rank has not answered in time.
    """
    own: dict[str, Any] = {"option": _kind(source.option), "stack": stack.to_dict()}
    if control.rank == 0:
        own.update(_found(source, stack))
    try:
        answers = control.exchange(f"envelope/{run}", own, deadline=_AGREEMENT)
    except Superseded as error:
        raise RuntimeError(f"the ranks have not agreed on an envelope: {error}") from error
    ruling = _settled(answers)
    if control.rank == 0:
        _announce(source, ruling)
    return ruling


def _found(source: EnvelopeSource, stack: Stack) -> dict[str, Any]:
    try:
        ruling = source.ruling(stack)
    except EnvelopeError as error:
        return {"error": str(error)}
    actions = {phase.value: [action.value for action in names] for phase, names in ruling.actions.items()}
    return {"actions": actions, "reason": ruling.reason}


def _settled(answers: list[dict[str, Any]]) -> Ruling:
    """What follows from all answers; rank 0's carries the ruling."""
    options = {rank: answer["option"] for rank, answer in enumerate(answers)}
    if len(set(options.values())) > 1:
        raise EnvelopeError(f"envelope= must be the same on all ranks, but it is {options}")
    if error := answers[0].get("error"):
        raise EnvelopeError(f'{error} (envelope= is "{AUTO}", "{OFF}" or the path of an envelope)')
    first = Stack.from_dict(answers[0]["stack"])
    for rank, answer in enumerate(answers):
        if options[0] != OFF and (differing := first.differences(Stack.from_dict(answer["stack"]))):
            there = ", ".join(f"{name} {mine} on rank 0 but {theirs} there" for name, (mine, theirs) in differing.items())
            return Ruling(actions={}, reason=f"rank {rank} stands on another stack: {there}; {HOW_TO_QUALIFY}")
    actions = {Phase(phase): tuple(map(Action, names)) for phase, names in answers[0]["actions"].items()}
    return Ruling(actions=actions, reason=answers[0]["reason"])


def _announce(source: EnvelopeSource, ruling: Ruling) -> None:
    if not any(ruling.actions.values()):
        log.warning("no fault will be repaired in this run, each ends it: %s", ruling.reason)
    elif source.option == OFF:
        log.warning('envelope="off": faults are repaired whether or not that has been qualified on this stack')


def _kind(option: str) -> str:
    """What must be the same on all ranks: paths may differ from node to node, only rank 0's is read."""
    return option if option in (AUTO, OFF) else "a file"
