"""``accelerate launch`` with AccelPact's switch: ``--use_accelpact`` and ``accelpact_config:`` in a configuration file.

Accelerate's launcher has no plug-in point, so this touches its private functions (checked against accelerate 1.15),
from the entry point that torch loads. Without it the switch is ``ACCELERATE_USE_ACCELPACT=true`` in the environment, or
``accelerate launch -m accelerate_plugin script.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Mapping
from typing import Any

from accelerate_plugin.plugin import PARSERS, PREFIX, SWITCH, AccelPactPlugin, parsed, switched_on

_USE = "use_accelpact"
_SECTION = "accelpact_config"
_FLAG = "accelpact_"


def extend() -> None:
    """Teach Accelerate's launcher, which has just been imported, the switch and its options."""
    launch = sys.modules["accelerate.commands.launch"]
    if hasattr(launch, "_accelpact"):
        return
    launch._accelpact = True
    _add_section()
    parser, validate = launch.launch_command_parser, launch._validate_launch_command

    def launch_command_parser(*args: Any, **kwargs: Any) -> argparse.ArgumentParser:
        return _with_flags(parser(*args, **kwargs))

    def validate_launch_command(args: argparse.Namespace) -> Any:
        flags = dict(vars(args))  # before the file's keys are written over them
        result = validate(args)
        os.environ.update(variables(flags, getattr(result[1], _SECTION, None) or {}, os.environ))
        return result

    launch.launch_command_parser = launch_command_parser
    launch._validate_launch_command = validate_launch_command


def _add_section() -> None:
    """Let a configuration file have the section."""
    from accelerate.commands.config import config_args

    plain = config_args.ClusterConfig
    config_args.ClusterConfig = dataclasses.make_dataclass(
        plain.__name__, [(_SECTION, dict | None, None)], bases=(plain,), namespace={"__module__": plain.__module__}
    )


def _with_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("AccelPact Arguments", "Training that survives failed collectives.")
    group.add_argument(f"--{_USE}", action="store_true", default=None, help="Whether to use AccelPact.")
    for name in PARSERS:
        group.add_argument(f"--{_FLAG}{name}", default=None, metavar="VALUE", help=f"AccelPactPlugin({name}=VALUE)")
    return parser


def variables(
    flags: Mapping[str, Any], section: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """What to set in the workers' environment.

    Args:
        flags: The launcher's arguments; those of AccelPact are ``None`` where they were not given.
        section: ``accelpact_config`` of the configuration file.
        environment: What is set already; it comes before the section, and flags come before both.

    Raises:
        ValueError: if the section has a key that there is not, or lacks the switch, or if a value is not allowed.
    """
    if section and _USE not in section:
        raise ValueError(f"{_SECTION} has no {_USE}: add {_USE}: true, or leave the section out")
    in_file = {name: _text(value) for name, value in section.items() if name != _USE}
    on_line = {name: flags[_FLAG + name] for name in PARSERS if flags.get(_FLAG + name) is not None}
    options = parsed(in_file, lambda name: f"{_SECTION}.{name}") | parsed(on_line, lambda name: f"--{_FLAG}{name}")
    AccelPactPlugin(**options)  # which checks them
    from_file = _named(in_file, section.get(_USE))
    environment = environment or {}
    given = {name: text for name, text in from_file.items() if name not in environment}
    given |= _named(on_line, flags.get(_USE))
    if options and SWITCH not in given | dict(environment):
        raise ValueError(f"--{_FLAG}{next(iter(options))} was given without --{_USE}")
    return given


def _named(options: Mapping[str, str], use: Any) -> dict[str, str]:
    switch = {} if use is None else {SWITCH: str(switched_on(use, _USE)).lower()}
    return switch | {f"{PREFIX}{name.upper()}": text for name, text in options.items()}


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
