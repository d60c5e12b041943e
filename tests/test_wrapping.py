"""Which modules the wrap policy chooses, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from lightning_accelpact.wrapping import WrapPolicy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(2, 2)
        self.mlp = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


class Bare(nn.Module):
    """A block without parameters."""


class Model(nn.Module):
    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 2)
        self.blocks = blocks
        self.head = nn.Linear(2, 2)


def names(root: nn.Module, wrap: Any = "auto") -> list[str]:
    known = {id(module): name for name, module in root.named_modules()}
    return [known[id(block)] for block in WrapPolicy(wrap).blocks(root)]


@pytest.mark.parametrize("container", [nn.ModuleList, lambda blocks: nn.Sequential(*blocks)], ids=["list", "sequence"])
def test_auto_finds_the_repeated_blocks(container: Any) -> None:
    assert names(Model(container([Block(), Block(), Block()]))) == ["blocks.2", "blocks.1", "blocks.0"]


def test_auto_takes_the_outermost_of_nested_repetitions() -> None:
    assert "blocks.0.mlp.0" not in names(Model(nn.ModuleList([Block(), Block()])))


def test_auto_looks_inside_what_is_not_repeated() -> None:
    # One block alone is no repetition, but its two equal layers are
    assert names(Model(nn.ModuleList([Block()]))) == ["blocks.0.mlp.1", "blocks.0.mlp.0"]


@pytest.mark.parametrize(
    "blocks",
    [nn.ModuleList(), nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2)]), nn.ModuleList([Bare(), Bare()]), nn.Identity()],
    ids=["empty", "mixed", "without parameters", "none"],
)
def test_auto_finds_nothing_to_wrap(blocks: nn.Module) -> None:
    assert names(Model(blocks)) == []


def test_auto_finds_encoder_and_decoder() -> None:
    model = nn.ModuleDict({"encoder": nn.ModuleList([Block(), Block()]), "decoder": nn.ModuleList([Bare(), Bare()])})
    model["decoder"] = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    assert names(model) == ["decoder.1", "decoder.0", "encoder.1", "encoder.0"]


def test_classes_come_innermost_first_and_without_the_root() -> None:
    # FSDP2 wants the inner modules wrapped before those around them
    assert names(Model(nn.ModuleList([Block()])), {Block, nn.Sequential, Model}) == ["blocks.0.mlp", "blocks.0"]


def test_one_class_may_stand_alone() -> None:
    assert names(Model(nn.ModuleList([Block()])), Block) == ["blocks.0"]
    assert names(Model(nn.ModuleList([Block()])), [Block]) == ["blocks.0"]


def test_a_class_without_parameters_is_not_wrapped() -> None:
    assert names(Model(nn.ModuleList([Bare(), Block()])), {Bare, Block}) == ["blocks.1"]


@pytest.mark.parametrize("wrap", ["none", "", 3, None, set(), {int}, ["Block"], [Block()]], ids=repr)
def test_anything_else_is_refused(wrap: Any) -> None:
    with pytest.raises(ValueError) as caught:
        WrapPolicy(wrap)
    assert f"wrap={wrap!r}" in str(caught.value)
    assert '"auto" or a set of torch.nn.Module classes, such as {Block}' in str(caught.value)
