"""``list``: what there is to run, and what goes together."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from benchmarks.failbench import compatibility, registry
from benchmarks.failbench.cell import TRACES
from benchmarks.failbench.commands import add_output, console, subparser
from benchmarks.failbench.compatibility import Compatibility
from benchmarks.failbench.tables import compatibility_table, name_table

_DESCRIPTION = "Show the architectures, mechanisms and traces, and which mechanism works on which architecture."


def add_list(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = subparser(commands, "list", "what there is to run, and what goes together", _DESCRIPTION)
    add_output(parser, "print one line of JSON")
    parser.set_defaults(command=run_list)


def run_list(options: argparse.Namespace) -> int:
    """Print the names and the compatibility matrix.

    Raises:
        ValueError: if two entry points have the same name.
    """
    architectures, mechanisms = registry.names(registry.ARCHITECTURES), registry.names(registry.MECHANISMS)
    if options.json:
        print(json.dumps(_to_dict(architectures, mechanisms)))
        return 0
    out = console()
    out.print(name_table("Architectures", {name: _title(name, registry.architecture(name)) for name in architectures}))
    out.print(name_table("Mechanisms", {name: _title(name, registry.mechanism(name)) for name in mechanisms}))
    out.print(name_table("Traces", TRACES), compatibility_table(architectures, mechanisms))
    return 0


def _title(name: str, described: type) -> str:
    """The first line of the documentation: the module's if that begins with the name, else the class's."""
    module, own = (
        (one.__doc__ or "").strip().partition("\n")[0] for one in (sys.modules[described.__module__], described)
    )
    return (module if module.startswith(f"{name}:") else own).removeprefix(f"{name}: ")


def _to_dict(architectures: tuple[str, ...], mechanisms: tuple[str, ...]) -> dict[str, Any]:
    return {
        "architectures": list(architectures),
        "mechanisms": list(mechanisms),
        "traces": list(TRACES),
        "compatibility": {
            f"{architecture}/{mechanism}": {
                "paper": _plain(compatibility.in_paper(architecture, mechanism)),
                "here": _plain(compatibility.here(architecture, mechanism)),
            }
            for architecture in architectures
            for mechanism in mechanisms
        },
    }


def _plain(found: Compatibility | None) -> dict[str, Any] | None:
    return {"kind": found.kind.value, "reason": found.reason, "inferred": found.inferred} if found else None
