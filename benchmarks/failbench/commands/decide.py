"""``decide``: which mechanism to take."""

from __future__ import annotations

import argparse
import json
import math
import re
from typing import Any

from benchmarks.failbench.commands import add_output, console, subparser
from benchmarks.failbench.commands.report import add_records, records_of
from benchmarks.failbench.decision import Question, decide
from benchmarks.failbench.decision_view import render

_DESCRIPTION = """\
Compare the mechanisms that were measured on an architecture by the expected completion time of a job
(the paper's section IX): T0 (1 + overhead) + T0 / MTBF (detect + restore + re-form + lost work), under limits.

Each input says what it rests on: given (by you), measured (in the records), extrapolated (from the records, in
proportion to state, step or interval) or analytic. Give --step-seconds, --detect-seconds and --reform-seconds of your
own cluster where you know them: those of the records are those of the machine that they were made on.
"""
# Option -> field of the question, help
_OPTIONS = {
    "--state-bytes": ("state_bytes", "state of a rank (default: as measured)"),
    "--mtbf": ("between_failures_s", "mean seconds between failures of the job"),
    "--step-seconds": ("step_s", "a step without a mechanism (default: as measured)"),
    "--interval-steps": ("interval_steps", "steps between two saves of periodic mechanisms (default: as measured)"),
    "--detect-seconds": ("detect_s", "until a failure is noticed (default: as measured)"),
    "--reform-seconds": ("reform_s", "for new process groups and processes (default: as measured)"),
    "--warning-seconds": ("warning_s", "warning before a failure (default: none)"),
    "--replace-seconds": (
        "replace_s",
        "until a lost rank is made up for, where training goes on without (default: 3600)",
    ),
    "--restore-cap": ("restore_cap_s", "longest effective restore, seconds"),
    "--overhead-cap": ("overhead_cap", "largest steady-state overhead, a share such as 0.02"),
    "--host-memory-bytes": ("host_memory_bytes", "to spare for copies of states, for each rank"),
    "--storage-bytes": ("storage_bytes", "to spare for checkpoints, for each rank"),
}


def add_decide(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = subparser(commands, "decide", "which mechanism to take", _DESCRIPTION)
    parser.add_argument("--arch", required=True, metavar="NAME", help="architecture, such as A2")
    for option, (field, text) in _OPTIONS.items():
        parser.add_argument(option, dest=field, type=float, metavar="N", required=option == "--mtbf", help=text)
    parser.add_argument("--work-hours", type=float, default=720.0, help="the job without failures (default: 720)")
    by_steps = "overhead from the steps of different runs, not from the time that saves took (for quiet machines)"
    parser.add_argument("--by-steps", action="store_true", help=by_steps)
    add_records(parser)
    parser.add_argument("--preset", metavar="NAME", help="leave out records of other presets")
    add_output(parser, "print one line of JSON")
    parser.set_defaults(command=run_decide)


def run_decide(options: argparse.Namespace) -> int:
    """Print the comparison.

    Returns:
        0, or 1 if no mechanism meets the limits.

    Raises:
        CommandError: without records.
        OSError: if a file cannot be read.
        ValueError: if a number makes no sense, or nothing was measured on this architecture.
    """
    given = {field: getattr(options, field) for field, _ in _OPTIONS.values()}
    values = {field: value for field, value in given.items() if value is not None}
    try:
        values |= {"work_s": 3600 * options.work_hours, "by_steps": options.by_steps}
        question = Question(architecture=options.arch, **values)
        decision = decide(records_of(options.records, options.preset), question)
    except ValueError as error:
        raise ValueError(_with_options(str(error))) from error
    if options.json:
        print(json.dumps(_finite(decision.to_dict())))
    else:
        console().print(render(decision))
    return 0 if decision.best else 1


def _with_options(message: str) -> str:
    """The message, with options in the place of the fields that they set."""
    fields = {
        **{field: option for option, (field, _) in _OPTIONS.items()},
        "architecture": "--arch",
        "work_s": "--work-hours",
    }
    return re.sub(rf"\b({'|'.join(fields)})(?==)", lambda match: fields[match[0]], message)


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
