"""Fault recovery without checkpoint I/O for hybrid-sharded training on Lightning.

Importing this package makes ``Trainer(strategy="accelpact_hsdp")``, ``Fabric(strategy="accelpact_hsdp")`` and
``Trainer(strategy="accelpact_hsdp_fsdp1")`` known. It imports neither torch nor Lightning: the public names below load
when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_accelpact._autoload import on_package_import

if TYPE_CHECKING:
    from lightning_accelpact.callback import GoodputCallback
    from lightning_accelpact.fabric import FabricHSDPStrategy
    from lightning_accelpact.fsdp1_strategy import ResilientFSDP1Strategy
    from lightning_accelpact.goodput.account import GoodputOptions
    from lightning_accelpact.recovery.action import Action, Phase
    from lightning_accelpact.recovery.fault import FaultPlan
    from lightning_accelpact.recovery.incident import Incident
    from lightning_accelpact.recovery.policy import FailStop
    from lightning_accelpact.strategy import ResilientHSDPStrategy

__all__ = [
    "Action",
    "FabricHSDPStrategy",
    "FailStop",
    "FaultPlan",
    "GoodputCallback",
    "GoodputOptions",
    "Incident",
    "Phase",
    "ResilientFSDP1Strategy",
    "ResilientHSDPStrategy",
]

_HOMES = {
    "Action": "recovery.action",
    "FabricHSDPStrategy": "fabric",
    "FailStop": "recovery.policy",
    "FaultPlan": "recovery.fault",
    "GoodputCallback": "callback",
    "GoodputOptions": "goodput.account",
    "Incident": "recovery.incident",
    "Phase": "recovery.action",
    "ResilientFSDP1Strategy": "fsdp1_strategy",
    "ResilientHSDPStrategy": "strategy",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


on_package_import()
