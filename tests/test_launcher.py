"""A launcher that starts all ranks hands them a secret; one that does not leaves it to whoever does."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric import Fabric

from lightning_accelpact import FabricHSDPStrategy, ResilientHSDPStrategy
from lightning_accelpact.recovery import secret


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (secret.VARIABLE, secret.FILE_VARIABLE, "LOCAL_RANK"):
        monkeypatch.setenv(name, "")  # so that what the test sets is undone
        monkeypatch.delenv(name)


def trainer(**options: Any) -> None:
    pl.Trainer(accelerator="cpu", strategy=ResilientHSDPStrategy(), logger=False, enable_checkpointing=False, **options)


def fabric(**options: Any) -> None:
    Fabric(accelerator="cpu", strategy=FabricHSDPStrategy(), **options)


@pytest.mark.parametrize("framework", [trainer, fabric])
def test_lightnings_own_launcher_makes_a_secret_on_one_node(framework: Any) -> None:
    framework(devices=2)
    assert len(os.environ[secret.VARIABLE]) == 64


@pytest.mark.parametrize("framework", [trainer, fabric])
def test_on_several_nodes_each_would_make_another(framework: Any) -> None:
    framework(devices=2, num_nodes=2)
    assert secret.VARIABLE not in os.environ


@pytest.mark.parametrize("framework", [trainer, fabric])
def test_a_rank_that_somebody_else_has_started_makes_none(framework: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    framework(devices=2)
    assert secret.VARIABLE not in os.environ
