"""``accelpact plan``: its options, and what it prints."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_accelpact.commands import CommandError
from lightning_accelpact.goodput.failures import Failures
from lightning_accelpact.goodput.observed import observed_failures
from lightning_accelpact.goodput.plan import PlanRow, plan
from lightning_accelpact.goodput.plan_inputs import PlanInputs
from lightning_accelpact.goodput.plan_view import render_plan
from lightning_accelpact.goodput.plots import PlotsUnavailable, write_plots
from lightning_accelpact.goodput.presets import FAILURES, WORKLOADS
from lightning_accelpact.goodput.ranges import Range, over
from lightning_accelpact.goodput.run import RunError, read_runs
from lightning_accelpact.goodput.simulation import Arrivals

# Field of PlanInputs, which the option is named after -> help
_CLUSTER = {
    "gpus": "number of GPUs",
    "update_s": "seconds per update",
    "state_gb": "size of a checkpoint of the whole state, GB",
    "checkpoint_gb_s": "what all ranks together write, GB/s",
    "replica_gpus": "GPUs that hold one replica of the state (default: 8)",
}
_ASSUMPTIONS = {
    "relaunch_s": "to launch the job again, without the checkpoint (default: 300)",
    "hang_s": "until a job without recovery notices a hang (default: 600)",
    "notice_s": "until a launcher notices a lost process (default: 5)",
    "repair_s": "a repair in memory (default: the paper's 0.672..0.77..0.93)",
    "guard_s": "the boundary guard, per update (default: 0..0.0042..0.009)",
    "boundary_share": "of the network failures, between two updates (default: 0.02..0.06..0.1)",
    "paper_guard": "overhead of the paper's guard (default: -0.00412..0.002..0.002)",
    "replace_s": "until a lost process is replaced (default: 30)",
    "staging_gb_s": "copying to the host, GB/s per GPU (default: 10)",
    "transfer_gb_s": "state from a replica peer, GB/s per GPU (default: 5)",
}
_WHOLE = ("gpus", "replica_gpus")
_PLAIN = ("state_gb", "hang_s", "notice_s", "staging_gb_s", "transfer_gb_s")
_NEEDED = ("gpus", "update_s", "state_gb", "checkpoint_gb_s")


def add_plan(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "plan",
        help="what each way to survive failures would come to on a cluster",
        description="Compare ways to survive failures on a cluster, each at its own best checkpoint interval: goodput,"
        " time lost, and from how many failures on it pays. Where an option takes a range, write LOW..HIGH or"
        " LOW..LIKELY..HIGH, and the answers come with one.",
    )
    cluster = parser.add_argument_group("the cluster and the job (a --workload fills in what is not given)")
    cluster.add_argument("--workload", choices=sorted(WORKLOADS), help="a published job")
    _add_options(cluster, _CLUSTER)
    failures = parser.add_argument_group("its failures")
    failures.add_argument("--failures", choices=sorted(FAILURES), default="llama3", help="published (default: llama3)")
    failures.add_argument("--log", nargs="+", type=Path, metavar="RUN", help="those of own runs, instead (log_dir)")
    failures.add_argument("--failures-per-day", type=_amount, metavar="N", help="of the whole cluster, instead")
    failures.add_argument(
        "--variation", type=float, metavar="N", help="of the times between: 1 is Poisson, more bursts"
    )
    failures.add_argument("--cascade-share", type=float, default=0.0, metavar="N", help="that follow upon another")
    failures.add_argument(
        "--domain-share", type=float, default=0.0, metavar="N", help="of lost nodes: with all replicas"
    )
    _add_options(parser.add_argument_group("what the methods need"), _ASSUMPTIONS)
    output = parser.add_argument_group("what to do")
    output.add_argument(
        "--days", type=float, help="to simulate each method (default: 100000, or a million failures; 0: none)"
    )
    output.add_argument("--seed", type=int, default=0, help="of the simulation (default: 0)")
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument(
        "--plots", type=Path, metavar="DIR", help="draw the goodput by cluster size and by interval, SVG"
    )
    parser.set_defaults(command=run_plan)


def _add_options(group: Any, options: Mapping[str, str]) -> None:
    for name, text in options.items():
        kind = int if name in _WHOLE else float if name in _PLAIN else _amount
        group.add_argument(_option(name), type=kind, metavar="N", help=text)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _amount(text: str) -> float | Range:
    try:
        return Range.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run_plan(options: argparse.Namespace) -> int:
    """Print the plan, and draw it.

    Raises:
        CommandError: if something is missing or makes no sense.
        OSError: if a picture cannot be written.
    """
    try:
        inputs = _inputs(options)
        arrivals = Arrivals(
            variation=inputs.failures.variation,
            cascade_share=options.cascade_share,
            domain_share=options.domain_share,
        )
        if options.days is not None and not (math.isfinite(options.days) and options.days >= 0):
            raise ValueError(f"days must be finite and at least 0, got {options.days!r}; 0 leaves the simulation out")
        rows = plan(inputs, simulated_days=options.days, seed=options.seed, arrivals=arrivals)
        files = write_plots(inputs, options.plots) if options.plots else []
    except (ValueError, RunError, PlotsUnavailable) as error:
        raise CommandError(_with_options(str(error))) from error
    if options.json:
        print(json.dumps(_to_dict(inputs, rows), allow_nan=False))
    else:
        Console().print(render_plan(inputs, rows))
    for file in files:
        print(f"accelpact: wrote {file}", file=sys.stderr)
    return 0


def _inputs(options: argparse.Namespace) -> PlanInputs:
    """The inputs given, and for the rest those of the workload."""
    published = vars(WORKLOADS[options.workload]) if options.workload else {}
    given = {name: getattr(options, name) for name in (*_CLUSTER, *_ASSUMPTIONS)}
    values = {name: value for name, value in given.items() if value is not None}
    values = {**{name: published[name] for name in _CLUSTER if published}, **values}
    missing = [_option(name) for name in _NEEDED if name not in values]
    if missing:
        raise ValueError(
            f"a plan needs {', '.join(missing)}; give them, or take a published job:"
            f" --workload {' or '.join(sorted(WORKLOADS))}"
        )
    return PlanInputs(**values, failures=_failures(options, values["gpus"]))


def _failures(options: argparse.Namespace, gpus: int) -> Failures:
    failures = FAILURES[options.failures]
    if options.log:
        failures = observed_failures([run.summary() for run in read_runs(options.log)])
    if options.failures_per_day is not None:
        per_gpu_day = over(lambda per_day: per_day / max(gpus, 1), per_day=options.failures_per_day)
        source = f"as given; their classes as of {failures.name}"
        failures = replace(failures, name="failures_per_day", source=source, per_gpu_day=per_gpu_day)
    return failures if options.variation is None else replace(failures, variation=options.variation)


def _with_options(message: str) -> str:
    """The message, with options in the place of the names that they set."""
    others = ("failures_per_day", "days", "variation", "cascade_share", "domain_share")
    names = "|".join((*_CLUSTER, *_ASSUMPTIONS, *others))
    return re.sub(rf"\b({names})\b(?= must|=)", lambda match: _option(match[0]), message)


def _to_dict(inputs: PlanInputs, rows: Sequence[PlanRow]) -> dict[str, Any]:
    """The inputs and the rows as plain JSON values."""
    values = {name: _plain(getattr(inputs, name)) for name in (*_CLUSTER, *_ASSUMPTIONS)}
    failures = {
        "name": inputs.failures.name,
        "source": inputs.failures.source,
        "per_day": _plain(inputs.failures.per_day(inputs.gpus)),
        "shares": {cls.value: share for cls, share in inputs.failures.shares.items()},
        "variation": inputs.failures.variation,
    }
    return {"inputs": values, "failures": failures, "methods": [row.to_dict() for row in rows]}


def _plain(value: Any) -> Any:
    return vars(value) if isinstance(value, Range) else value
