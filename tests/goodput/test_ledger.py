"""The ledger's one promise, every second in exactly one class, and the files that keep its records."""

from __future__ import annotations

import ast
import json
import logging
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_accelpact.goodput import ledger as ledger_module
from lightning_accelpact.goodput.ledger import Ledger, TimeClass, append_jsonl, process_age, read_jsonl


class FakeClock:
    """A clock that stands still until told otherwise."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def nonzero(ledger: Ledger) -> dict[TimeClass, float]:
    return {cls: seconds for cls, seconds in ledger.totals().items() if seconds}


def test_time_goes_to_the_base_class_until_it_is_switched(clock: FakeClock) -> None:
    ledger = Ledger(clock)
    clock.wait(2)
    ledger.switch(TimeClass.PRODUCTIVE)
    clock.wait(6)
    assert nonzero(ledger) == {TimeClass.PROGRAM_STARTUP: 2, TimeClass.PRODUCTIVE: 6}
    assert (ledger.elapsed, ledger.goodput) == (8, 0.75)


def test_spans_nest_and_are_exclusive(clock: FakeClock) -> None:
    ledger = Ledger(clock, base=TimeClass.PRODUCTIVE)
    with ledger.span(TimeClass.GUARD):
        clock.wait(1)
        with ledger.span(TimeClass.GROUP_REPAIR):
            clock.wait(10)
        clock.wait(2)
    clock.wait(100)
    assert nonzero(ledger) == {TimeClass.PRODUCTIVE: 100, TimeClass.GUARD: 3, TimeClass.GROUP_REPAIR: 10}


def test_totals_include_the_open_span(clock: FakeClock) -> None:
    ledger = Ledger(clock)
    with ledger.span(TimeClass.CHECKPOINT_SAVE):
        clock.wait(3)
        assert nonzero(ledger) == {TimeClass.CHECKPOINT_SAVE: 3}
        clock.wait(4)
    assert nonzero(ledger) == {TimeClass.CHECKPOINT_SAVE: 7}


def test_a_switch_within_a_span_holds_once_the_span_is_left(clock: FakeClock) -> None:
    ledger = Ledger(clock)
    with ledger.span(TimeClass.GROUP_REPAIR):
        ledger.switch(TimeClass.EVALUATION)
        clock.wait(1)
    clock.wait(2)
    assert nonzero(ledger) == {TimeClass.GROUP_REPAIR: 1, TimeClass.EVALUATION: 2}


def test_an_exception_closes_every_span_it_passes(clock: FakeClock) -> None:
    ledger = Ledger(clock, base=TimeClass.PRODUCTIVE)
    with pytest.raises(RuntimeError, match="connection reset"):
        with ledger.span(TimeClass.GUARD), ledger.span(TimeClass.GROUP_REPAIR):
            clock.wait(1)
            raise RuntimeError("connection reset")
    clock.wait(5)
    assert nonzero(ledger) == {TimeClass.GROUP_REPAIR: 1, TimeClass.PRODUCTIVE: 5}


def test_move_takes_no_more_than_there_is(clock: FakeClock) -> None:
    ledger = Ledger(clock, base=TimeClass.PRODUCTIVE)
    clock.wait(5)
    assert ledger.move(TimeClass.PRODUCTIVE, TimeClass.REDONE_WORK, 2) == 2
    assert ledger.move(TimeClass.PRODUCTIVE, TimeClass.REDONE_WORK, 50) == 3
    assert nonzero(ledger) == {TimeClass.REDONE_WORK: 5}


@pytest.mark.parametrize("seconds", [-1e-9, math.nan, math.inf])
def test_impossible_seconds_are_refused(clock: FakeClock, seconds: float) -> None:
    ledger = Ledger(clock)
    with pytest.raises(ValueError, match=r"at least 0, got"):
        ledger.move(TimeClass.PRODUCTIVE, TimeClass.OTHER, seconds)
    with pytest.raises(ValueError, match=r"at least 0, got"):
        ledger.backdate(TimeClass.OTHER, seconds)


def test_backdate_extends_the_elapsed_time(clock: FakeClock) -> None:
    ledger = Ledger(clock, base=TimeClass.PRODUCTIVE)
    clock.wait(1)
    ledger.backdate(TimeClass.PROGRAM_STARTUP, 3)
    assert (ledger.elapsed, ledger.goodput) == (4, 0.25)


def test_goodput_is_zero_before_any_time_has_passed(clock: FakeClock) -> None:
    assert Ledger(clock).goodput == 0


classes = st.sampled_from(TimeClass)
amounts = st.floats(min_value=0, max_value=1e6)
steps = st.recursive(
    st.one_of(
        st.tuples(st.just("wait"), amounts),
        st.tuples(st.just("switch"), classes),
        st.tuples(st.just("move"), classes, classes, amounts),
        st.tuples(st.just("backdate"), classes, amounts),
    ),
    lambda inner: st.tuples(st.just("span"), classes, st.lists(inner, max_size=5), st.booleans()),
)


def play(ledger: Ledger, clock: FakeClock, step: tuple) -> None:
    match step:
        case ("wait", seconds):
            clock.wait(seconds)
        case ("switch", cls):
            ledger.switch(cls)
        case ("move", source, target, seconds):
            ledger.move(source, target, seconds)
        case ("backdate", cls, seconds):
            ledger.backdate(cls, seconds)
        case ("span", cls, inner, fails):
            try:
                with ledger.span(cls):
                    for one in inner:
                        play(ledger, clock, one)
                    if fails:
                        raise InterruptedError
            except InterruptedError:
                assert fails


@given(st.lists(steps, max_size=20))
def test_totals_always_add_up_to_the_elapsed_time(script: list[tuple]) -> None:
    clock = FakeClock()
    ledger = Ledger(clock)
    for step in script:
        play(ledger, clock, step)
        totals = ledger.totals()
        assert all(seconds >= 0 for seconds in totals.values())
        assert math.isclose(sum(totals.values()), ledger.elapsed, rel_tol=1e-9, abs_tol=1e-6)
    # Every span was left, whatever it was left by: time goes to the base class again
    ledger.switch(TimeClass.CUSTOM)
    before = ledger.totals()[TimeClass.CUSTOM]
    clock.wait(1.0)
    assert math.isclose(ledger.totals()[TimeClass.CUSTOM], before + 1.0, abs_tol=1e-6)


def test_process_age_is_the_age_of_the_process() -> None:
    program = (
        "import time; time.sleep(0.5)\n"
        "from lightning_accelpact.goodput.ledger import process_age\n"
        "print(process_age(), time.monotonic())"
    )
    spawned = time.monotonic()
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    age, printed = map(float, output.stdout.split())
    # At least the sleep, at most the time since it was spawned; 0.02 s for the clock tick of /proc
    assert 0.5 <= age <= printed - spawned + 0.02


@pytest.mark.parametrize(
    "shell",
    [
        pytest.param(("sh", "-c", 'sleep 1; exec "$0" -c "$1"'), id="exec"),
        pytest.param(("bash", "-c", 'sleep 1 && "$0" -c "$1"'), id="bash's last command"),
    ],
)
def test_process_age_leaves_out_what_a_shell_did_before_its_exec(shell: tuple[str, ...]) -> None:
    program = (
        "import logging, time; time.sleep(0.5)\n"
        "from lightning_accelpact.goodput.ledger import process_age\n"
        "print(process_age(), time.monotonic())"
    )
    spawned = time.monotonic()
    command = (*shell, sys.executable, program)
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    age, printed = map(float, output.stdout.split())
    assert 0.5 <= age <= printed - spawned - 1.0


def test_process_age_without_proc_counts_from_the_loading_of_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoProc:
        def __init__(self, path: str) -> None:
            raise FileNotFoundError(path)

    monkeypatch.setattr(ledger_module, "Path", NoProc)
    before = logging.makeLogRecord({}).relativeCreated / 1e3
    age = process_age()
    assert before <= age <= logging.makeLogRecord({}).relativeCreated / 1e3


def test_records_are_appended_one_to_a_line(tmp_path) -> None:
    path = tmp_path / "new" / "log.jsonl"
    append_jsonl(path, [{"a": 1}, {"text": "two\nlines"}])
    append_jsonl(path, [{"b": 2}])
    assert path.read_text().count("\n") == 3
    assert read_jsonl(path) == ([{"a": 1}, {"text": "two\nlines"}, {"b": 2}], 0)


@pytest.mark.parametrize("cut", range(1, len('{"name": "é"}') + 1))
def test_a_torn_line_costs_only_itself(tmp_path, cut: int) -> None:
    path = tmp_path / "log.jsonl"
    append_jsonl(path, [{"a": 1}])
    torn = json.dumps({"name": "é"}, ensure_ascii=False).encode()[:cut]
    with path.open("ab") as file:
        file.write(torn)
    assert read_jsonl(path) == ([{"a": 1}], 1)
    append_jsonl(path, [{"b": 2}])
    assert read_jsonl(path) == ([{"a": 1}, {"b": 2}], 1)


@pytest.mark.parametrize(("bad", "error"), [(math.nan, ValueError), (math.inf, ValueError), (object(), TypeError)])
def test_a_record_that_is_no_json_writes_nothing(tmp_path, bad: object, error: type[Exception]) -> None:
    path = tmp_path / "log.jsonl"
    append_jsonl(path, [{"a": 1}])
    with pytest.raises(error):
        append_jsonl(path, [{"b": 2}, {"bad": bad}])
    assert read_jsonl(path) == ([{"a": 1}], 0)


@pytest.mark.parametrize(("module", "allowed"), [("ledger", set()), ("model", set()), ("report", {"rich"})])
def test_each_module_imports_only_what_it_may(module: str, allowed: set[str]) -> None:
    tree = ast.parse(Path(ledger_module.__file__).with_name(f"{module}.py").read_text())
    names = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    outside = {name.split(".")[0] for name in names if not name.startswith("lightning_accelpact.goodput.")}
    assert outside - sys.stdlib_module_names == allowed


def test_the_package_imports_neither_torch_nor_lightning() -> None:
    program = (
        "import sys, lightning_accelpact.goodput\n"
        "print([name for name in ('torch', 'lightning', 'accelerate') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert output.stdout.strip() == "[]"
