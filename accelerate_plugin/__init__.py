"""AccelPact for Hugging Face Accelerate: a plain training loop that survives failed collectives.

Importing this package makes ``Accelerator(kwargs_handlers=[AccelPactPlugin(...)])`` work. It never imports Lightning.
"""

from __future__ import annotations

from accelerate_plugin.adapter import allow_fsdp_on_cpu, install
from accelerate_plugin.plugin import AccelPactPlugin
from accelerate_plugin.run import AccelPact
from lightning_accelpact.goodput.account import GoodputOptions
from lightning_accelpact.recovery.fault import FaultPlan
from lightning_accelpact.recovery.policy import FailStop

__all__ = ["AccelPact", "AccelPactPlugin", "FailStop", "FaultPlan", "GoodputOptions", "allow_fsdp_on_cpu"]

install()
