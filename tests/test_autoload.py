"""How the strategy's name gets into Lightning's registry, each case in a fresh interpreter.

Importing the real frameworks takes seconds, so the combinations of switches and import orders run against small
stand-ins for torch and Lightning; the cases at the end run against the real ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What torch does at the end of its import (torch/__init__.py, _import_device_backends)
TORCH = """
import os
from importlib.metadata import entry_points
if os.getenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
    for entry in entry_points(group="torch.backends"):
        entry.load()()
"""

STRATEGIES = """
class Registry(dict):
    def register(self, name, strategy, description):
        if name in self:
            raise ValueError(name)
        self[name] = strategy
StrategyRegistry = STRATEGY_REGISTRY = Registry()
"""

# Either package may be imported without the other: each has a registry of its own
REGISTERED = """
import lightning.pytorch.strategies as strategies
import lightning.fabric.strategies as fabric
registries = [strategies.StrategyRegistry, fabric.STRATEGY_REGISTRY]
print(*{str("accelpact_hsdp" in registry) for registry in registries})
"""

OURS_OFF = {"ACCELPACT_AUTOLOAD": "0"}
TORCHS_OFF = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}

Run = Callable[..., subprocess.CompletedProcess[str]]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder for ``sys.path`` that makes the source tree look installed, entry point included."""
    info = tmp_path / "lightning_accelpact-0.dist-info"
    write(info / "METADATA", "Metadata-Version: 2.1\nName: lightning-accelpact\nVersion: 0\n")
    write(info / "entry_points.txt", "[torch.backends]\naccelpact = lightning_accelpact._autoload:autoload\n")
    return tmp_path


@pytest.fixture
def stand_ins(site: Path) -> Path:
    """The same with stand-ins for torch and Lightning."""
    write(site / "torch.py", TORCH)
    write(site / "lightning" / "__init__.py", "import torch\n")
    write(site / "lightning" / "pytorch" / "__init__.py", "from lightning.pytorch import strategies\n")
    write(site / "lightning" / "pytorch" / "strategies.py", STRATEGIES)
    write(site / "lightning" / "fabric" / "__init__.py", "from lightning.fabric import strategies\n")
    write(site / "lightning" / "fabric" / "strategies.py", STRATEGIES)
    return site


def run(code: str, site: Path, *options: str, **switches: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter that sees ``site`` and the source tree first."""
    names = {"ACCELPACT_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD", "PYTHONPATH", "PYTHONWARNINGS"}
    env = {key: value for key, value in os.environ.items() if key not in names}
    env |= {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]), **switches}
    return subprocess.run(
        [sys.executable, *options, "-c", code], env=env, cwd=site, capture_output=True, text=True, timeout=120
    )


def output(code: str, site: Path, **switches: str) -> str:
    result = run(code, site, **switches)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout.strip()


@pytest.mark.parametrize(
    "imports",
    ["", "import torch", "import lightning.pytorch", "import lightning.fabric", "import lightning_accelpact"],
)
def test_registered_by_installation_alone(stand_ins: Path, imports: str) -> None:
    assert output(imports + REGISTERED, stand_ins) == "True"


@pytest.mark.parametrize("switch", [OURS_OFF, TORCHS_OFF, OURS_OFF | TORCHS_OFF], ids=["ours", "torch's", "both"])
class TestSwitchedOff:
    @pytest.mark.parametrize("imports", ["", "import torch", "import lightning.pytorch"])
    def test_installation_alone_registers_nothing(self, stand_ins: Path, switch: dict[str, str], imports: str) -> None:
        assert output(imports + REGISTERED, stand_ins, **switch) == "False"

    @pytest.mark.parametrize(
        "imports",
        [
            "import lightning_accelpact",
            "import lightning_accelpact, torch",
            "import lightning_accelpact._autoload, torch",
            "import torch, lightning_accelpact",
            "import lightning.pytorch, lightning_accelpact",
            "import lightning.fabric, lightning_accelpact",
            "import torch, lightning.pytorch, lightning_accelpact",
        ],
    )
    def test_explicit_import_registers(self, stand_ins: Path, switch: dict[str, str], imports: str) -> None:
        assert output(imports + REGISTERED, stand_ins, **switch) == "True"


def test_switched_off_import_of_torch_leaves_no_trace(stand_ins: Path) -> None:
    code = """
import sys, torch
print([name for name in sys.modules if "accelpact" in name], [getattr(f, "__module__", f) for f in sys.meta_path])
"""
    without_us = output(code, stand_ins, **TORCHS_OFF)
    assert output(code, stand_ins, **OURS_OFF) == without_us
    assert output(code, stand_ins) != without_us


def test_import_is_light(stand_ins: Path) -> None:
    code = "import sys, lightning_accelpact; print(*[n for n in ('torch', 'lightning', 'numpy') if n in sys.modules])"
    assert output(code, stand_ins) == ""


def test_module_keeps_its_own_loader(stand_ins: Path) -> None:
    code = """
import lightning.pytorch.strategies as module
print(type(module.__loader__).__name__, type(module.__spec__.loader).__name__)
"""
    assert output(code, stand_ins) == "SourceFileLoader SourceFileLoader"


def test_name_taken_by_the_user_stays(stand_ins: Path) -> None:
    code = """
import os, lightning.pytorch.strategies as strategies
strategies.StrategyRegistry.register("accelpact_hsdp", print, description="")
import lightning_accelpact
print(strategies.StrategyRegistry["accelpact_hsdp"] is print)
"""
    assert output(code, stand_ins, **OURS_OFF) == "True"


@pytest.mark.parametrize(("package", "registry"), [("pytorch", "StrategyRegistry"), ("fabric", "STRATEGY_REGISTRY")])
def test_changed_registry_does_not_break_lightning(stand_ins: Path, package: str, registry: str) -> None:
    write(stand_ins / "lightning" / package / "strategies.py", "")
    result = run(f"import lightning.{package}.strategies; print('imported')", stand_ins)
    assert result.stdout == "imported\n"
    assert result.stderr.count("accelpact_hsdp is not available") == 1
    assert f"has no attribute '{registry}'" in result.stderr


@pytest.mark.parametrize("package", ["pytorch", "fabric"])
def test_import_error_of_lightning_is_not_hidden(stand_ins: Path, package: str) -> None:
    write(stand_ins / "lightning" / package / "strategies.py", "raise ImportError('the cause')\n")
    result = run(f"import lightning.{package}.strategies", stand_ins)
    assert result.returncode == 1
    assert "ImportError: the cause" in result.stderr


def test_real_lightning_knows_the_name_and_loads_the_strategy_late(site: Path) -> None:
    code = """
import sys
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry
assert "accelpact_hsdp" in StrategyRegistry.available_strategies()
assert StrategyRegistry["accelpact_hsdp"]["description"]
assert "lightning_accelpact.strategy" not in sys.modules
trainer = Trainer(strategy="accelpact_hsdp", accelerator="cpu", devices=4, logger=False)
from lightning_accelpact import ResilientFSDP1Strategy, ResilientHSDPStrategy
assert type(trainer.strategy) is ResilientHSDPStrategy, type(trainer.strategy)
assert StrategyRegistry["accelpact_hsdp_fsdp1"]["description"] != StrategyRegistry["accelpact_hsdp"]["description"]
trainer = Trainer(strategy="accelpact_hsdp_fsdp1", accelerator="cpu", devices=4, logger=False)
assert type(trainer.strategy) is ResilientFSDP1Strategy, type(trainer.strategy)
"""
    result = run(code, site)
    assert result.returncode == 0, result.stderr


def test_real_fabric_knows_the_name_and_loads_the_strategy_late(site: Path) -> None:
    code = """
import sys
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY
assert STRATEGY_REGISTRY["accelpact_hsdp"]["description"]
assert "lightning_accelpact.fabric" not in sys.modules
fabric = Fabric(strategy="accelpact_hsdp", accelerator="cpu", devices=4)
from lightning_accelpact import FabricHSDPStrategy
assert type(fabric.strategy) is FabricHSDPStrategy, type(fabric.strategy)
"""
    result = run(code, site)
    assert result.returncode == 0, result.stderr


def test_real_frameworks_switched_off_until_the_explicit_import(site: Path) -> None:
    code = """
import sys, torch
assert "lightning_accelpact" not in sys.modules
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry
assert "accelpact_hsdp" not in (*StrategyRegistry, *STRATEGY_REGISTRY)
import lightning_accelpact
assert "accelpact_hsdp" in StrategyRegistry
assert "accelpact_hsdp" in STRATEGY_REGISTRY
"""
    result = run(code, site, **OURS_OFF)
    assert result.returncode == 0, result.stderr


def test_failure_never_breaks_the_import_of_torch(site: Path) -> None:
    # meta_path as a tuple makes the installation of the hook fail; -W error turns every warning into an exception
    code = """
import sys, warnings
warnings.filterwarnings("default", module="(?!lightning_accelpact)")
sys.meta_path = tuple(sys.meta_path)
import torch
print(torch.ones(1).item())
"""
    result = run(code, site, "-W", "error")
    assert (result.returncode, result.stdout) == (0, "1.0\n"), result.stderr
    assert result.stderr.count("accelpact_hsdp is not available") == 1
    assert "'tuple' object has no attribute 'insert'" in result.stderr
