"""The command line of the examples: train with faults, and show that they made no difference."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from typing import Protocol

from decoder import HEAD_WIDTH

from lightning_accelpact import FaultPlan
from lightning_accelpact.recovery.fault import FaultPoint

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
