"""Runs Lightning's tests of ``ModelParallelStrategy`` on CPU processes with ``accelpact_hsdp`` in its place.

``python -m tests.upstream PATH_TO_LIGHTNING_CHECKOUT``; what is replaced and what is left out is in
``docs/compatibility.md``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import lightning

from tests.upstream.checkout import Checkout, NoCheckout
from tests.upstream.exclusions import reason_against, unknown
from tests.upstream.execution import NotCollected, Outcome, Suite

_INAPPLICABLE = "not applicable"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests and print a line for each.

    Returns:
        The exit status: 0 if all that apply have passed, 1 if not, 2 if they could not be run.
    """
    options = _parser().parse_args(arguments)
    try:
        checkout = Checkout(options.checkout)
        with tempfile.TemporaryDirectory() as folder:
            return _run(checkout, Path(folder) / "tests", options)
    except (NoCheckout, NotCollected) as error:
        print(f"tests.upstream: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.upstream",
        description="Run Lightning's own tests of ModelParallelStrategy with accelpact_hsdp in its place, on CPU"
        " processes. For each test: passed, failed, or not applicable because of what.",
    )
    parser.add_argument("checkout", type=Path, metavar="PATH_TO_LIGHTNING_CHECKOUT", help="Lightning's sources")
    parser.add_argument("-k", dest="word", default="", metavar="WORD", help="only tests whose name contains it")
    parser.add_argument("--baseline", action="store_true", help="run all of them with Lightning's own strategy")
    parser.add_argument(
        "--inapplicable", action="store_true", help="run only those that do not apply, to see what becomes of them"
    )
    parser.add_argument("--limit", type=_seconds, default=300.0, help="seconds that a test may take (default: 300)")
    parser.add_argument("--output", action="store_true", help="print also what the processes of a failed test printed")
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be a number of seconds above 0")
    return seconds


def _run(checkout: Checkout, folder: Path, options: argparse.Namespace) -> int:
    print(f"tests of lightning {checkout.version}, run with lightning {lightning.__version__}")
    checkout.copy_tests(folder, substituted=not options.baseline)
    suite = Suite(folder, options.limit)
    collected = suite.collect(checkout.modules)
    counts: Counter[str] = Counter()
    for test, outcome in _outcomes(suite, [test for test in collected if options.word in test], options):
        verdict = _INAPPLICABLE if outcome.verdict == "skipped" else outcome.verdict
        counts[verdict] += 1
        print(_line(test, verdict, outcome), flush=True)
        if options.output:
            print(outcome.output, end="")
    print(", ".join(f"{counts[verdict]} {verdict}" for verdict in ("passed", "failed", _INAPPLICABLE)))
    stale = unknown(collected)
    for test in stale:
        print(f"tests/upstream/exclusions.py names a test that this checkout does not have: {test}")
    return 1 if counts["failed"] or stale else 0


def _outcomes(suite: Suite, tests: list[str], options: argparse.Namespace) -> Iterator[tuple[str, Outcome]]:
    """Tests that start processes run alone; those of another module, which do not, share one process."""
    everything = options.baseline
    for test in tests:
        if not everything and not options.inapplicable and (reason := reason_against(test)):
            yield test, Outcome("skipped", f"because {reason}")
    chosen = [test for test in tests if everything or options.inapplicable == bool(reason_against(test))]
    for module, of_module in groupby(chosen, key=lambda test: test.partition("::")[0]):
        group = list(of_module)
        for together in [[test] for test in group] if "_integration" in module else [group]:
            yield from suite.run(together).items()


def _line(test: str, verdict: str, outcome: Outcome) -> str:
    line = f"{verdict}: {test}" if outcome.world_size == 1 else f"{verdict} on {outcome.world_size} ranks: {test}"
    return f"{line}: {outcome.reason}" if outcome.reason else line


if __name__ == "__main__":
    sys.exit(main())
