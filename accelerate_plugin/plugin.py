"""What a user passes to ``Accelerator(kwargs_handlers=[...])``, or sets in the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal

from accelerate.utils import KwargsHandler

from lightning_accelpact.goodput.account import GoodputOptions
from lightning_accelpact.recovery.fault import FaultPlan
from lightning_accelpact.recovery.options import RecoveryOptions

SWITCH = "ACCELERATE_USE_ACCELPACT"
PREFIX = "ACCELPACT_"
# Variables that bear the prefix and are no option of the plugin
_OTHERS = frozenset({"ACCELPACT_AUTOLOAD", "ACCELPACT_SECRET", "ACCELPACT_SECRET_FILE"})

_RECOVERY = tuple(field.name for field in fields(RecoveryOptions))


@dataclass(kw_only=True)
class AccelPactPlugin(KwargsHandler):
    """Makes a training loop survive failed collectives, as one of ``Accelerator(kwargs_handlers=[AccelPactPlugin()])``.

    The model is sharded by Accelerate's own FSDP2, as hybrid sharding by its ``ParallelismConfig``.

    Args:
        replicate: Size of a replication group. ``"auto"``: ``dp_replicate_size`` of the ``ParallelismConfig``; without
            one the number of nodes, on one node 2 if that divides.
        shard: Size of a sharding group. ``"auto"``: ``dp_shard_size`` of the ``ParallelismConfig``; without one the
            rest.
        repair_budget: See :class:`~lightning_accelpact.recovery.options.RecoveryOptions`; seconds.
        max_repairs_per_update: See there.
        collective_timeout: See there; seconds.
        rebuild_timeout: See there; seconds.
        heartbeat_deadline: See there; seconds.
        control_interface: See there.
        uncommitted: See there.
        digest_every: See there.
        on_divergence: See there.
        envelope: See there.
        goodput: Whether to keep account, or what to do with it; see
            :class:`~lightning_accelpact.goodput.account.GoodputOptions`.
        faults: Faults to inject, for drills and tests.

    Raises:
        ValueError: if an option is out of range; nothing has been started then.
    """

    replicate: int | Literal["auto"] = "auto"
    shard: int | Literal["auto"] = "auto"
    repair_budget: float = RecoveryOptions.repair_budget
    max_repairs_per_update: int = RecoveryOptions.max_repairs_per_update
    collective_timeout: float = RecoveryOptions.collective_timeout
    rebuild_timeout: float = RecoveryOptions.rebuild_timeout
    heartbeat_deadline: float = RecoveryOptions.heartbeat_deadline
    control_interface: str | None = None
    uncommitted: Literal["retry", "redo", "restart"] = "retry"
    digest_every: int = RecoveryOptions.digest_every
    on_divergence: Literal["warn", "stop"] = RecoveryOptions.on_divergence
    envelope: Literal["auto", "off"] | str | os.PathLike[str] = RecoveryOptions.envelope
    goodput: bool | GoodputOptions = True
    faults: FaultPlan | None = None

    def __post_init__(self) -> None:
        for name in ("replicate", "shard"):
            size = getattr(self, name)
            if size != "auto" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise ValueError(f'{name}={size!r} must be "auto" or a whole number of at least 1')
        if not isinstance(self.goodput, (bool, GoodputOptions)):
            raise ValueError(f"goodput={self.goodput!r} must be True, False or GoodputOptions(...)")
        if self.faults is not None and not isinstance(self.faults, FaultPlan):
            raise ValueError(f"faults={self.faults!r} must be a FaultPlan, such as FaultPlan.parse(['backward@3:3'])")
        _ = self.recovery  # which checks the rest

    @property
    def recovery(self) -> RecoveryOptions:
        """What may be repaired, and how long it may take."""
        return RecoveryOptions(**{name: getattr(self, name) for name in _RECOVERY})

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> AccelPactPlugin | None:
        """The plugin that ``ACCELERATE_USE_ACCELPACT`` turns on, or ``None``; options are ``ACCELPACT_<OPTION>``.

        Raises:
            ValueError: if the switch is neither true nor false, or a variable names no option or has a bad value.
        """
        if not switched_on(environment.get(SWITCH, "false"), SWITCH):
            return None
        given = {
            name.removeprefix(PREFIX).lower(): value
            for name, value in environment.items()
            if name.startswith(PREFIX) and name not in _OTHERS
        }
        return cls(**parsed(given, lambda option: f"{PREFIX}{option.upper()}"))


def switched_on(text: Any, name: str) -> bool:
    """Whether a switch is on.

    Raises:
        ValueError: if it is neither on nor off.
    """
    states = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False, "": False}
    if (state := states.get(str(text).lower())) is None:
        raise ValueError(f"{name}={text!r} must be true or false")
    return state


def parsed(texts: Mapping[str, Any], label: Callable[[str], str]) -> dict[str, Any]:
    """Options from texts, as the environment or a configuration file gives them.

    Args:
        texts: Option -> text.
        label: How the user has written an option, for messages.

    Raises:
        ValueError: if a name is no option, or a text has no such value.
    """
    options: dict[str, Any] = {}
    for name, text in texts.items():
        if name not in PARSERS:
            close = get_close_matches(name, PARSERS, 1) or sorted(PARSERS)
            raise ValueError(f"{label(name)} is no option of AccelPact; did you mean {' or '.join(map(label, close))}?")
        try:
            options[name] = PARSERS[name](str(text))
        except ValueError as error:
            raise ValueError(f"{label(name)}={text!r}: {error}") from error
    return options


def _size(text: str) -> int | str:
    return text if text == "auto" else int(text)


PARSERS: dict[str, Callable[[str], Any]] = {
    "replicate": _size,
    "shard": _size,
    "repair_budget": float,
    "max_repairs_per_update": int,
    "collective_timeout": float,
    "rebuild_timeout": float,
    "heartbeat_deadline": float,
    "control_interface": str,
    "uncommitted": str,
    "digest_every": int,
    "on_divergence": str,
    "envelope": str,
    "goodput": lambda text: switched_on(text, "goodput"),
    "faults": lambda text: FaultPlan.parse(part.strip() for part in text.split(",") if part.strip()),
}
"""How each option is read from a text."""
