"""A state survives being sent, and being written to disk."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.failbench.mechanisms.checkpoints import Checkpoints
from benchmarks.failbench.preset import PRESETS
from benchmarks.failbench.state import State
from benchmarks.failbench.workload import Features, Images


def state(seed: int) -> State:
    torch.manual_seed(seed)
    tensors = {"model/a": torch.randn(3, 2), "momentum/a": torch.randn(3, 2), "model/b": torch.randn(())}
    return State(7 + seed, 100 + seed, torch.get_rng_state(), tensors)


def same(one: State, other: State) -> bool:
    if (one.step, one.position, list(one.tensors)) != (other.step, other.position, list(other.tensors)):
        return False
    pairs = [(one.generator, other.generator), *zip(one.tensors.values(), other.tensors.values(), strict=True)]
    return all(torch.equal(*pair) for pair in pairs)


def test_pack_and_unpack() -> None:
    sent = state(1)
    packed = sent.pack()
    assert len(packed) == sent.bytes
    assert same(state(2).unpack(packed), sent)
    assert not same(state(2), sent)


def test_a_copy_does_not_change() -> None:
    one = state(1)
    copy = one.clone()
    one.tensors["model/a"].zero_()
    assert same(copy, state(1))


def test_fingerprints_are_of_the_weights() -> None:
    one, other = state(1), state(1)
    other.tensors["momentum/a"].zero_()
    assert one.weights_sha256() == other.weights_sha256()
    other.tensors["model/b"].zero_()
    assert one.weights_sha256() != other.weights_sha256()


def test_checkpoints_count_when_all_parts_are_there(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "new")
    parts = ("stage 0, slice 1", "member 3")
    checkpoints.write(5, parts[0], state(1).tensors)
    assert checkpoints.complete(parts) == ()
    checkpoints.write(5, parts[1], state(1).own)
    checkpoints.write(10, parts[1], state(2).own)
    assert checkpoints.complete(parts) == (5,)
    assert same(State(tensors=checkpoints.read(5, parts[0]), **checkpoints.read(5, parts[1])), state(1))


def test_samples_go_on_where_they_were() -> None:
    first = Images(PRESETS["tiny"], 0).samples
    second = Images(PRESETS["tiny"], 0).samples
    for _ in range(20):  # over the end of an epoch
        first.take(32, 0, 8)
    second.position = first.position
    torch.manual_seed(4)
    expected = first.take(32, 3, 8)
    torch.manual_seed(4)
    assert all(torch.equal(*pair) for pair in zip(second.take(32, 3, 8), expected, strict=True))


def test_shares_make_up_the_batch() -> None:
    def targets(shares: int) -> torch.Tensor:
        parts = []
        for share in range(shares):
            samples = Features(PRESETS["tiny"], 0).samples
            parts.append(samples.take(32, share, shares)[1])
        return torch.cat(parts)

    assert torch.equal(targets(8), targets(7))
