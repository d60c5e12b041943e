"""``accelpact qualify``: probes this machine, or those of the launcher that started it, and writes what it finds."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from lightning_accelpact.commands import CommandError

if TYPE_CHECKING:
    from lightning_accelpact.qualification.qualify import Form
    from lightning_accelpact.recovery.envelope import Entry

FRAMEWORKS = ("lightning.pytorch", "lightning.fabric", "accelerate")
GENERATIONS = {"fsdp2": list(FRAMEWORKS), "fsdp1": ["lightning.pytorch"]}
"""Generation of FSDP -> the frameworks that have a strategy for it."""


def add_qualify(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "qualify",
        help="find out what can be repaired on this machine's stack",
        description="Break collectives, replace their communicators, run updates again, each time in processes of their"
        " own under a deadline, and write down what this stack can do. Under torchrun all its"
        " processes take part. The exit status is 0 also if nothing is qualified; that is a result.",
    )
    parser.add_argument("--framework", nargs="+", choices=FRAMEWORKS, help="whose loops (default: all)")
    parser.add_argument("--fsdp", choices=tuple(GENERATIONS), default="fsdp2", help="generation of FSDP (default: fsdp2)")
    parser.add_argument("--trials", type=int, default=5, metavar="N", help="of each probe, in fresh processes (default: 5)")
    parser.add_argument("--deadline", type=float, metavar="S", help="seconds for one trial (default: 40)")
    parser.add_argument("--backend", help="of the training groups (default: the device's own)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--output", type=Path, metavar="FILE", help="envelope to write to (default: the user's own)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.set_defaults(command=run_qualify)


def run_qualify(options: argparse.Namespace) -> int:
    """Probe, show and write.

    Raises:
        CommandError: if an option makes no sense, or the envelope cannot be read.
        OSError: if it cannot be written.
    """
    # Not at the top: this imports torch, which takes longer than all other commands
    from lightning_accelpact.qualification.qualify import DEADLINE, Form
    from lightning_accelpact.recovery.envelope import Envelope, EnvelopeError

    options.framework = options.framework or GENERATIONS[options.fsdp]
    if options.trials < 1:
        raise CommandError(f"--trials {options.trials} must be at least 1")
    deadline = DEADLINE if options.deadline is None else options.deadline
    if not 0 < deadline < float("inf"):
        raise CommandError(f"--deadline {deadline} must be a finite number of seconds above 0")
    file = options.output or _default_file()
    try:
        envelope = Envelope.load(file) if file.exists() else Envelope()
    except EnvelopeError as error:
        raise CommandError(str(error)) from error
    leads, entries = _qualified(options, Form.full(options.trials, deadline))
    if leads:
        for entry in entries:
            envelope = envelope.with_entry(entry)
        envelope.save(file)
        _show(entries, file, options.json)
    return 0


def _default_file() -> Path:
    from lightning_accelpact.recovery.agreement import AUTO, OFF
    from lightning_accelpact.recovery.envelope import VARIABLE, user_file

    named = os.environ.get(VARIABLE, AUTO)
    return user_file() if named in ("", AUTO, OFF) else Path(named)


def _qualified(options: argparse.Namespace, form: Form) -> tuple[bool, list[Entry]]:
    """The entry of each framework; and whether this process is to show and write them.

    Raises:
        CommandError: if the processes of a launcher do not stand on one stack.
    """
    from lightning_accelpact.qualification.qualify import StacksDiffer, devices_here
    from lightning_accelpact.qualification.world import LaunchedWorld, LocalWorld

    device = options.device or ("cuda" if devices_here("cuda") else "cpu")
    launched = LaunchedWorld() if {"RANK", "WORLD_SIZE"} <= set(os.environ) else None
    leads = launched is None or launched.leads
    make_world = LocalWorld if launched is None else lambda size: launched
    devices = devices_here(device) if launched is None else launched.size
    with _progress(shown=leads and not options.json) as progress:
        task = progress.add_task("", total=len(options.framework) * sum(form.trials.values()))
        try:
            entries = [
                _entry(options, framework, device, progress, task, make_world=make_world, devices=devices, form=form)
                for framework in options.framework
            ]
        except StacksDiffer as error:
            raise CommandError(str(error)) from error
        progress.update(task, completed=progress.tasks[0].total, description="done")
        progress.refresh()
    if launched is not None:
        launched.close()
    return leads, entries


def _entry(
    options: argparse.Namespace, framework: str, device: str, progress: Progress, task: TaskID, **how: Any
) -> Entry:
    from lightning_accelpact.qualification.qualify import qualify, stack_of

    backend = options.backend or ("nccl" if device == "cuda" else "gloo")

    def on_trial(name: str) -> None:
        progress.update(task, advance=1, description=f"{framework}: {name}")
        progress.refresh()

    stack = stack_of(how["make_world"](1), backend=backend, device_type=device, framework=framework, fsdp=options.fsdp)
    return qualify(stack, device, on_trial=on_trial, **how)


def _progress(*, shown: bool) -> Progress:
    """Without a thread of its own, which a fork would copy the locks of."""
    columns = (TextColumn("{task.description:32}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    return Progress(*columns, console=Console(stderr=True), auto_refresh=False, disable=not shown)


def _show(entries: Sequence[Entry], file: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"file": str(file), "entries": [entry.to_dict() for entry in entries]}))
        return
    console = Console()
    for entry in entries:
        console.print(_probes(entry))
        console.print(_actions(entry))
    print(f"accelpact: wrote {file}", file=sys.stderr)


def _probes(entry: Entry) -> Table:
    table = Table("probe", title=str(entry.stack), title_justify="left")
    for name in ("trials", "successes", "median"):
        table.add_column(name, justify="right")
    table.add_column("what was seen")
    for probe in entry.probes:
        spent = f"{probe.seconds * 1e3:.1f} ms" if probe.seconds else ""
        table.add_row(probe.name, str(probe.trials), str(probe.successes), spent, probe.detail)
    return table


def _actions(entry: Entry) -> Table:
    table = Table("a rank stands in", "qualified, best first")
    for phase, actions in entry.actions.items():
        table.add_row(phase.value, ", ".join(action.value for action in actions))
    if not any(entry.actions.values()):
        table.add_row("any phase", f"nothing: {entry.failure}; faults end the run (exit status 86)")
    return table
