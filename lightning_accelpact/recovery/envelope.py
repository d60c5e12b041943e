"""The envelope: which recovery actions have been qualified on which stack (paper, observation key and envelope).

An entry belongs to a platform stack, a resource profile and an objective, and gives for each phase of an update the
actions that were qualified, best first. Only what was *measured* on exactly this stack is enough to act; everything
else is ``RESTART``.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from lightning_accelpact.recovery.action import Action, Phase, Ruling
from lightning_accelpact.recovery.stack import Stack

FORMAT = "accelpact-envelope/1"
VARIABLE = "ACCELPACT_ENVELOPE"
PUBLISHED = Path(__file__).with_name("published.json")
EAGER = "eager"
"""Profile of a run whose kernels are issued one by one; the other one is ``graphs``, where a device repeats them."""
BIT_EXACT = "bit_exact"
"""Objective: go on so that the final weights are bit for bit those of a run without the fault."""
HOW_TO_QUALIFY = "`accelpact qualify` finds out what this stack can do"


class EnvelopeError(ValueError):
    """An envelope cannot be read; the message names the file and what is wrong."""


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """What a probe has come to.

    Args:
        name: Of the probe.
        trials: How often it was run, each time in processes of its own.
        successes: How often it went as it must.
        seconds: Median over the trials.
        detail: Why the first trial that failed did; if none has, what was seen.
    """

    name: str
    trials: int
    successes: int
    seconds: float = 0.0
    detail: str = ""

    @property
    def passed(self) -> bool:
        """Whether every trial went as it must, and there was one."""
        return 0 < self.trials == self.successes


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What is qualified for one stack, profile and objective.

    Args:
        stack: The platform stack. Of a published one some fields are unknown.
        profile: The resource profile.
        objective: What counts as success.
        actions: Phase -> qualified actions, best first.
        how: ``measured`` on this very stack, or ``published``, which is never enough to act.
        date: Day, or moment, of the measurement or publication (ISO 8601).
        source: What has measured it, or where it is published.
        probes: What the probes came to.
        note: For a person.
    """

    stack: Stack
    profile: str = EAGER
    objective: str = BIT_EXACT
    actions: Mapping[Phase, Sequence[Action]] = field(default_factory=dict)
    how: Literal["measured", "published"] = "measured"
    date: str
    source: str
    probes: Sequence[ProbeResult] = ()
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        actions = {phase.value: [action.value for action in names] for phase, names in self.actions.items()}
        return {**asdict(self), "actions": actions}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Entry:
        """The inverse of :meth:`to_dict`.

        Raises:
            TypeError: if a field is missing, unknown or of another type.
            ValueError: if a phase, an action or ``how`` is unknown, or the day of a measurement is none.
        """
        entry = cls(**values)
        if entry.how not in ("measured", "published"):
            raise ValueError(f"how={entry.how!r} must be 'measured' or 'published'")
        if entry.how == "measured":
            datetime.fromisoformat(entry.date)
        actions = {Phase(phase): tuple(map(Action, names)) for phase, names in entry.actions.items()}
        probes = tuple(ProbeResult(**probe) for probe in entry.probes)
        changed = {"stack": Stack.from_dict(values["stack"]), "actions": actions, "probes": probes}
        return cls(**{**values, **changed})

    @property
    def age(self) -> timedelta:
        """How long ago it was measured."""
        return datetime.now(UTC) - datetime.fromisoformat(self.date).astimezone(UTC)

    @property
    def failure(self) -> str:
        """Why the first probe that has failed did; empty if none has."""
        failed = (probe for probe in self.probes if not probe.passed)
        return next((f"{probe.name}: {probe.successes} of {probe.trials}, {probe.detail}" for probe in failed), "")

    def ruling(self) -> Ruling:
        """What this entry allows on its stack."""
        origin = f"{self.how} {self.date[:10]}: {self.failure or 'no probe has shown it'}"
        return Ruling(actions=self.actions, reason=f"{origin}; {HOW_TO_QUALIFY}")


class Envelope:
    """Entries of one or more files.

    Args:
        entries: In any order; of several for one key the newest counts.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.entries = tuple(entries)

    @classmethod
    def load(cls, *files: Path) -> Envelope:
        """The entries of all files.

        Raises:
            EnvelopeError: if one cannot be read or holds no envelope.
        """
        return cls(entry for file in files for entry in _read(file))

    def save(self, file: Path) -> None:
        """Write all entries to a file at once, with the folders above it."""
        file.parent.mkdir(parents=True, exist_ok=True)
        content = {"format": FORMAT, "entries": [entry.to_dict() for entry in self.entries]}
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}.", delete=False) as whole:
            json.dump(content, whole, indent=2)
            whole.write("\n")
        os.replace(whole.name, file)

    def with_entry(self, entry: Entry) -> Envelope:
        """With this entry in the place of an older measurement for the same key."""
        kept = [other for other in self.entries if other.how != "measured" or _key(other) != _key(entry)]
        return Envelope([*kept, entry])

    def find(self, stack: Stack, *, profile: str = EAGER, objective: str = BIT_EXACT) -> Entry | None:
        """The newest measurement on exactly this stack; what is published is never enough."""
        key = (stack, profile, objective)
        found = [entry for entry in self.entries if entry.how == "measured" and _key(entry) == key]
        return max(found, key=lambda entry: entry.date, default=None)

    def ruling(self, stack: Stack, *, profile: str = EAGER, objective: str = BIT_EXACT) -> Ruling:
        """What may be done on a stack; on one that is unknown, or has changed since, nothing but ``RESTART``."""
        entry = self.find(stack, profile=profile, objective=objective)
        if entry is not None:
            return entry.ruling()
        return Ruling(actions={}, reason=f"{self._why_not(stack, profile, objective)}; {HOW_TO_QUALIFY}")

    def _why_not(self, stack: Stack, profile: str, objective: str) -> str:
        """What the nearest measurement was made on, in the fields that differ."""
        measured = [entry for entry in self.entries if entry.how == "measured"]
        if not measured:
            return f"nothing has been measured on this stack ({stack})"
        nearest = min(measured, key=lambda entry: len(_differences(entry, stack, profile, objective)))
        differing = _differences(nearest, stack, profile, objective)
        changes = ", ".join(f"{name} {there}, and this is {here}" for name, (here, there) in differing.items())
        return f"the nearest measurement, of {nearest.date[:10]}, was made on {changes}"


def _key(entry: Entry) -> tuple[Stack, str, str]:
    return entry.stack, entry.profile, entry.objective


def _differences(entry: Entry, stack: Stack, profile: str, objective: str) -> dict[str, tuple[str, str]]:
    named = {"profile": (profile, entry.profile), "objective": (objective, entry.objective)}
    return stack.differences(entry.stack) | {name: pair for name, pair in named.items() if pair[0] != pair[1]}


def _read(file: Path) -> list[Entry]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise EnvelopeError(f"the envelope {file} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise EnvelopeError(f'{file} is no envelope: it has no "format": "{FORMAT}"')
    try:
        return [Entry.from_dict(values) for values in content["entries"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise EnvelopeError(f"the envelope {file} has an entry that makes no sense: {error}") from error


def user_file(environment: Mapping[str, str] = os.environ) -> Path:
    """The user's own envelope, which ``accelpact qualify`` writes to."""
    return _folder(environment, "XDG_CONFIG_HOME", ".config") / "envelope.json"


def cache_file(stack: Stack, environment: Mapping[str, str] = os.environ) -> Path:
    """Where the result of the short form is kept for a stack."""
    name = sha256(str(stack).encode()).hexdigest()[:16]
    return _folder(environment, "XDG_CACHE_HOME", ".cache") / f"envelope-{name}.json"


def _folder(environment: Mapping[str, str], variable: str, otherwise: str) -> Path:
    base = environment.get(variable) or os.path.join(environment.get("HOME") or os.path.expanduser("~"), otherwise)
    return Path(base) / "accelpact"
