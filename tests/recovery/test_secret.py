"""The run's secret: where it comes from, and what its seal lets through."""

from __future__ import annotations

import ast
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lightning_accelpact.recovery
from lightning_accelpact.recovery import secret
from lightning_accelpact.recovery.endpoint import Endpoint
from lightning_accelpact.recovery.secret import Message, Seal, hand_out, run_secret

GOOD = "0123456789abcdef"


def seal(**changes: object) -> Seal:
    return Seal(**{"secret": GOOD.encode(), "namespace": "run/0", "rank": 2, **changes})  # type: ignore[arg-type]


# -- where it comes from


def test_it_is_handed_out_in_a_variable_or_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{GOOD}\n")
    assert run_secret({"ACCELPACT_SECRET": GOOD}) == run_secret({"ACCELPACT_SECRET_FILE": str(file)}) == GOOD.encode()


def test_without_one_the_run_id_tells_runs_apart() -> None:
    assert run_secret({}) == run_secret({})
    assert run_secret({"TORCHELASTIC_RUN_ID": "a"}) != run_secret({"TORCHELASTIC_RUN_ID": "b"})


def test_a_short_one_is_refused_without_being_told() -> None:
    with pytest.raises(ValueError, match="the secret in ACCELPACT_SECRET has 5 characters, but needs at least 16") as caught:
        run_secret({"ACCELPACT_SECRET": "hush!"})
    assert "hush!" not in str(caught.value)


def test_an_empty_one_is_none() -> None:
    with pytest.raises(ValueError, match="has 0 characters"):
        run_secret({"ACCELPACT_SECRET": ""})


def test_two_are_refused() -> None:
    with pytest.raises(ValueError, match="are both set: unset one of them"):
        run_secret({"ACCELPACT_SECRET": GOOD, "ACCELPACT_SECRET_FILE": "secret"})


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"ACCELPACT_SECRET_FILE={tmp_path} cannot be read"):
        run_secret({"ACCELPACT_SECRET_FILE": str(tmp_path)})


def test_a_launcher_makes_one_for_its_children_unless_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(secret.FILE_VARIABLE, raising=False)
    monkeypatch.setenv(secret.VARIABLE, "")  # so that what follows is undone
    monkeypatch.delenv(secret.VARIABLE)
    hand_out()
    made = os.environ[secret.VARIABLE]
    assert len(made) == 64
    hand_out()
    assert os.environ[secret.VARIABLE] == made


def test_it_is_not_printed() -> None:
    assert GOOD not in repr(Endpoint(host="localhost", port=1, hosted_here=False, secret=GOOD.encode()))


# -- what its seal lets through


@given(st.text(), st.text())
def test_what_was_sealed_is_read(key: str, text: str) -> None:
    assert seal().open(key, seal().close(key, text).encode()) == Message(2, text)


@pytest.mark.parametrize(
    "other", [{"secret": b"another one, as long"}, {"namespace": "run/1"}, {"secret": b""}], ids=["secret", "attempt", "none"]
)
def test_a_seal_of_another_run_counts_for_nothing(other: dict[str, object]) -> None:
    mine = seal()
    assert mine.open("vote/1/0/7", seal(**other).close("vote/1/0/7", "yes").encode()) is None
    assert mine.rejected == 1


def test_a_message_counts_under_its_own_key_only() -> None:
    old = seal().close("vote/1/0/7", "yes").encode()
    for key in ("vote/1/1/7", "vote/1/0/8", "vote/2/0/7"):
        assert seal().open(key, old) is None


@given(st.data())
def test_no_byte_can_be_changed(data: st.DataObject) -> None:
    genuine = seal().close("key", "yes").encode()
    place = data.draw(st.integers(0, len(genuine) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda value: value != genuine[place]))
    assert seal().open("key", genuine[:place] + bytes([other]) + genuine[place + 1 :]) is None


@given(st.binary(min_size=1))
def test_garbage_counts_for_nothing(garbage: bytes) -> None:
    assert seal().open("key", garbage) is None


def test_a_sender_cannot_be_exchanged() -> None:
    mark, sender, text = seal().close("key", "yes").split(" ")
    assert sender == "2"
    assert seal().open("key", f"{mark} 1 {text}".encode()) is None


def test_what_is_rejected_is_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    mine = seal()
    with caplog.at_level(logging.WARNING, logger="accelpact"):
        for key in ("one", "two", "three"):
            mine.open(key, b"garbage")
    assert mine.rejected == 3
    assert [record.getMessage().split(" in the")[0] for record in caplog.records] == [
        "somebody who does not have this run's secret has written to run/0/one"
    ]


def test_what_nobody_has_written_yet_is_not_counted() -> None:
    mine = seal()
    assert mine.open("key", b"") is None
    assert mine.rejected == 0


# -- no pickle

FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing"}
FORBIDDEN_CALLS = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
}  # fmt: skip


@pytest.mark.parametrize(
    "file", sorted(Path(lightning_accelpact.recovery.__file__).parent.glob("*.py")), ids=lambda file: file.name
)
def test_the_recovery_core_pickles_nothing(file: Path) -> None:
    """Nor does it load what a peer could have pickled."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            assert not {alias.name.partition(".")[0] for alias in node.names} & FORBIDDEN_MODULES
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] not in FORBIDDEN_MODULES
        elif isinstance(node, ast.Attribute):
            assert node.attr not in FORBIDDEN_CALLS
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            assert (owner, node.attr) not in {("torch", "load"), ("torch", "save")}
