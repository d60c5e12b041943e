"""The fingerprint of this machine's stack."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import torch

from lightning_accelpact.recovery import stack
from lightning_accelpact.recovery.stack import Stack


@pytest.mark.parametrize(
    ("framework", "distribution"),
    [("lightning.pytorch", "lightning"), ("lightning.fabric", "lightning"), ("accelerate", "accelerate")],
)
def test_it_names_versions(framework: str, distribution: str) -> None:
    here = Stack.here(backend="gloo", device_type="cpu", framework=framework)
    assert here.torch == torch.__version__
    assert here.framework == f"{framework} {version(distribution)}"
    assert (here.backend, here.fsdp) == ("gloo", "fsdp2")
    assert here.driver.startswith("Linux ") and here.device.startswith("cpu ")
    assert all(here.to_dict().values())
    assert Stack.from_dict(here.to_dict()) == here
    assert all(value in str(here) for value in here.to_dict().values())


def test_the_backend_may_be_a_map() -> None:
    plain = Stack.here(backend="gloo", device_type="cpu", framework="accelerate")
    mapped = Stack.here(backend="cpu:gloo", device_type="cpu", framework="accelerate")
    assert mapped.backend_version == plain.backend_version
    assert plain.differences(mapped) == {"backend": ("gloo", "cpu:gloo")}


def test_the_driver_of_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "version").write_text("570.1.2\n")
    monkeypatch.setattr(stack, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    here = Stack.here(backend="gloo", device_type="cuda", framework="accelerate")
    assert (here.device, here.driver) == ("cuda NVIDIA H200", "570.1.2, CUDA 13.0")
    assert not {field for field in here.differences(Stack.here(backend="gloo", device_type="cpu", framework="accelerate"))} - {
        "device", "driver",
    }  # fmt: skip


def test_a_framework_that_is_not_installed_has_no_version() -> None:
    assert Stack.here(backend="gloo", device_type="cpu", framework="none").framework == "none unknown"
