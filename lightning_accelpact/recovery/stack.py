"""The platform stack that a run stands on, as far as a recovery action can depend on it."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_DRIVER = Path("/sys/module/nvidia/version")
_DISTRIBUTIONS = {"lightning.pytorch": "lightning", "lightning.fabric": "lightning", "accelerate": "accelerate"}


@dataclass(frozen=True, kw_only=True)
class Stack:
    """What has to be the same for a qualification to hold; all as text.

    Args:
        torch: Version of torch, with its build, such as ``2.13.0+cpu``.
        backend: Backend of the training groups, such as ``gloo``.
        backend_version: Its version. Gloo has none of its own and is told by the commit of torch that it came with.
        device: Type of the device that holds the model, and its model or architecture.
        driver: Version of the device's driver; for CPUs the kernel, which drives the links.
        framework: Whose loop trains, and its version.
        fsdp: Generation of FSDP, ``fsdp2`` or ``fsdp1``.
        accelpact: Version of this package.
    """

    torch: str
    backend: str
    backend_version: str
    device: str
    driver: str
    framework: str
    fsdp: str
    accelpact: str

    @classmethod
    def here(cls, *, backend: str, device_type: str, framework: str, fsdp: str = "fsdp2") -> Stack:
        """This process's.

        Args:
            backend: Backend of the training groups, or a map such as ``cpu:gloo,cuda:nccl``.
            device_type: Type of the device that holds the model.
            framework: Whose loop trains: ``lightning.pytorch``, ``lightning.fabric`` or ``accelerate``.
            fsdp: Generation of FSDP.
        """
        return cls(
            torch=torch.__version__,
            backend=backend,
            backend_version=", ".join(_backend_version(name) for name in _backends(backend)),
            device=f"cuda {torch.cuda.get_device_name()}" if device_type == "cuda" else f"cpu {platform.machine()}",
            driver=_cuda_driver() if device_type == "cuda" else _kernel(),
            framework=f"{framework} {_version(_DISTRIBUTIONS.get(framework, framework))}",
            fsdp=fsdp,
            accelpact=_version("lightning-accelpact"),
        )

    @classmethod
    def from_dict(cls, values: dict[str, str]) -> Stack:
        """The inverse of :meth:`to_dict`.

        Raises:
            TypeError: if a field is missing or unknown, or is no text.
        """
        for name, value in values.items():
            if not isinstance(value, str):
                raise TypeError(f"{name}={value!r} must be a text")
        return cls(**values)

    def to_dict(self) -> dict[str, str]:
        """As plain JSON values."""
        return asdict(self)

    def differences(self, other: Stack) -> dict[str, tuple[str, str]]:
        """Field -> its value here and in the other stack, where they differ."""
        mine, theirs = self.to_dict(), other.to_dict()
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}

    def __str__(self) -> str:
        return (
            f"torch {self.torch}, {self.backend} {self.backend_version}, {self.device}, driver {self.driver},"
            f" {self.framework}, {self.fsdp}, accelpact {self.accelpact}"
        )


def _backends(backend: str) -> Iterable[str]:
    """The names in a backend, which may be a map of device types."""
    return dict.fromkeys(part.rpartition(":")[2] for part in backend.split(","))


def _backend_version(name: str) -> str:
    if name == "nccl" and torch.cuda.is_available():
        return ".".join(map(str, torch.cuda.nccl.version()))
    return f"of torch {torch.version.git_version[:12]}"


def _kernel() -> str:
    """Major and minor version: what is fixed in a release below does not change what sockets promise."""
    return " ".join([platform.system(), ".".join(platform.release().split(".")[:2])])


def _cuda_driver() -> str:
    try:
        driver = _DRIVER.read_text().strip()
    except OSError:  # in some containers; this number is the newest CUDA that the driver knows
        driver = f"for CUDA {torch._C._cuda_getDriverVersion()}"
    return f"{driver}, CUDA {torch.version.cuda}"


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"
