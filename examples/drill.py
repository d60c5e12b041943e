"""The command line of the examples: train with faults, and show that they made no difference."""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
from decoder import HEAD_WIDTH

from lightning_accelpact import FaultPlan
from lightning_accelpact.recovery import sockets
from lightning_accelpact.recovery.fault import FaultInjector, FaultPoint
from lightning_accelpact.recovery.progress import Progress
from lightning_accelpact.recovery.subject import Fsdp2Subject

# Lightning 2.6 uses a class that torch 2.13 deprecates, and every rank would say so
warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated", category=FutureWarning)

PROCESSES = 4


class Outcome(Protocol):
    """How a training ended.

    Args:
        digests: Each rank's fingerprint of its weights and optimizer state.
        faults_left: For each rank, whether one of its faults has never struck.
        speaks: Whether this rank does the talking.
    """

    digests: tuple[str, ...]
    faults_left: tuple[bool, ...]
    speaks: bool


def main(fit: Callable[[argparse.Namespace, FaultPlan | None], Outcome], description: str) -> None:
    """Train, and if asked to, once more without the faults."""
    args = parse_arguments(description)
    outcome = fit(args, args.faults)
    if any(outcome.faults_left):
        sys.exit("a fault has never struck, so nothing was shown" if outcome.speaks else 0)
    if args.verify:
        exact = fit(args, None).digests == outcome.digests
        if outcome.speaks:
            print(f"bit-exact: {'yes' if exact else 'no'}")
            sys.exit(not exact)


def parse_arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="PHASE@UPDATE[:RANK]",
        help="cut this rank's connections there; may be given more than once. PHASE is one of "
        + ", ".join(point.value for point in FaultPoint),
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="train again without the faults and compare every bit of weights and optimizer state on every rank",
    )
    for option, default, meaning in (
        ("--updates", 10, "optimizer steps"),
        ("--accumulate", 2, "micro-batches per update"),
        ("--layers", 4, "blocks of the decoder"),
        ("--width", 64, f"features per character, a multiple of {HEAD_WIDTH}"),
        ("--context", 64, "characters per piece of text"),
        ("--batch-size", 8, "pieces of text per process and micro-batch"),
    ):
        meaning += f" (default: {default})"
        parser.add_argument(option, type=positive, metavar="N", default=default, help=meaning)
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="of weights and dropout (default: 0)")
    args = parser.parse_args()
    if args.width % HEAD_WIDTH:
        parser.error(f"--width must be a multiple of {HEAD_WIDTH}, got {args.width}")
    try:
        args.faults = faults_of(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def faults_of(args: argparse.Namespace) -> FaultPlan:
    """The faults that were asked for, each of which must be able to strike."""
    plan = FaultPlan.parse(args.fault)
    for text, fault in zip(args.fault, plan.faults, strict=True):
        if fault.update >= args.updates or (fault.micro_batch or 0) >= args.accumulate or fault.rank >= PROCESSES:
            raise ValueError(
                f"{text} never strikes: there are updates 0 to {args.updates - 1} with micro-batches 0 to"
                f" {args.accumulate - 1} on ranks 0 to {PROCESSES - 1}"
            )
    return plan


def faults_left(
    accelerator: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, faults: FaultPlan | None
) -> Callable[[], bool]:
    """Tells whether a fault of this rank has not struck; sees to it that they do if AccelPact is switched off."""
    run = getattr(accelerator, "accelpact", None)
    if run is not None:
        return lambda: bool(run.pending_faults)
    progress = Progress(rank=accelerator.process_index)
    injector = FaultInjector(faults or FaultPlan(), progress=progress, cut=lambda _: cut_all(), clock=time.time)
    subject = Fsdp2Subject()
    subject.attach(model, [])
    subject.inject(injector)

    def stepped(*_: Any) -> None:
        progress.commit()
        injector.fire(FaultPoint.BOUNDARY)

    optimizer.optimizer.register_step_post_hook(stepped)
    return lambda: bool(injector.pending)


def cut_all() -> int:
    """Shut down every connection of this process but those of its launcher's store."""
    store = int(os.environ["MASTER_PORT"])
    links = {fd: inode for fd, inode in sockets.open_sockets().items() if 0 not in sockets.ports(fd)}
    return sum(sockets.shut(fd, inode) for fd, inode in links.items() if store not in sockets.ports(fd))
