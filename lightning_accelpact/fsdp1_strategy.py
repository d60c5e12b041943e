"""``accelpact_hsdp_fsdp1``: Lightning's FSDP1 strategy, hybrid-sharded, that repairs communication faults."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, MixedPrecision, StateDictType
from torch.distributed.fsdp.wrap import CustomPolicy, enable_wrap
from torch.optim import Optimizer

from lightning_accelpact.callback import GoodputCallback
from lightning_accelpact.recovery import fsdp1
from lightning_accelpact.recovery.fault import FaultPlan
from lightning_accelpact.recovery.options import HsdpShape, RecoveryOptions
from lightning_accelpact.recovery.subject import Fsdp1Subject
from lightning_accelpact.strategy import ResilientTraining


class ResilientFSDP1Strategy(ResilientTraining, FSDPStrategy):
    """Hybrid-sharded data parallelism with FSDP1 that survives failed collectives.

    What :class:`~lightning_accelpact.strategy.ResilientHSDPStrategy` gives for FSDP2, for models that are to stay with
    ``FullyShardedDataParallel``. The actions that are taken are those of
    :attr:`~lightning_accelpact.recovery.subject.Fsdp1Subject.qualified`.

    Args:
        replicate: Size of a replication group. ``"auto"``: the number of nodes; on one node 2 if that divides.
        shard: Size of a sharding group, at least 2. ``"auto"``: the rest, which is the devices per node on several.
        wrap: Which modules are sharded as a unit: ``"auto"`` for the model's repeated blocks, or a set of classes.
            What ``configure_model`` has wrapped stays as it is; the rest is sharded together with the root.
        mixed_precision: As for Lightning's ``FSDPStrategy``; ``None`` for what the Trainer's ``precision`` means.
        state_dict_type: As for Lightning's ``FSDPStrategy``: checkpoints in one file for each rank, or one for all.
        repair_budget: See :class:`~lightning_accelpact.recovery.options.RecoveryOptions`; seconds.
        max_repairs_per_update: See there.
        collective_timeout: See there; seconds.
        rebuild_timeout: See there; seconds.
        heartbeat_deadline: See there; seconds.
        control_interface: See there.
        uncommitted: See there.
        digest_every: See there.
        on_divergence: See there.
        envelope: See there.
        goodput: The callback that keeps account, ``True`` for one with its defaults, ``False`` for none.
        faults: Faults to inject, for drills and tests.
        process_group_backend: Backend of the training groups; ``None`` for the device's own.

    Raises:
        ValueError: if an option is out of range; nothing has been started then.
    """

    strategy_name = "accelpact_hsdp_fsdp1"

    def __init__(
        self,
        *,
        replicate: int | Literal["auto"] = "auto",
        shard: int | Literal["auto"] = "auto",
        wrap: Literal["auto"] | Collection[type[torch.nn.Module]] = "auto",
        mixed_precision: MixedPrecision | None = None,
        state_dict_type: Literal["full", "sharded"] = "sharded",
        repair_budget: float = RecoveryOptions.repair_budget,
        max_repairs_per_update: int = RecoveryOptions.max_repairs_per_update,
        collective_timeout: float = RecoveryOptions.collective_timeout,
        rebuild_timeout: float = RecoveryOptions.rebuild_timeout,
        heartbeat_deadline: float = RecoveryOptions.heartbeat_deadline,
        control_interface: str | None = None,
        uncommitted: Literal["retry", "redo", "restart"] = "retry",
        digest_every: int = RecoveryOptions.digest_every,
        on_divergence: Literal["warn", "stop"] = RecoveryOptions.on_divergence,
        envelope: Literal["auto", "off"] | str | os.PathLike[str] = RecoveryOptions.envelope,
        goodput: bool | GoodputCallback = True,
        faults: FaultPlan | None = None,
        process_group_backend: str | None = None,
    ) -> None:
        options = RecoveryOptions(
            repair_budget=repair_budget,
            max_repairs_per_update=max_repairs_per_update,
            collective_timeout=collective_timeout,
            rebuild_timeout=rebuild_timeout,
            heartbeat_deadline=heartbeat_deadline,
            control_interface=control_interface,
            uncommitted=uncommitted,
            digest_every=digest_every,
            on_divergence=on_divergence,
            envelope=envelope,
        )
        super().__init__(
            sharding_strategy="HYBRID_SHARD",
            device_mesh=(1, 1),  # Lightning demands one; ours takes its place
            mixed_precision=mixed_precision,
            state_dict_type=_checked(state_dict_type),
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=collective_timeout),
        )
        self._prepare_training(
            options=options,
            replicate=replicate,
            shard=shard,
            wrap=wrap,
            faults=faults,
            manual_optimization="refuse",
            goodput=goodput,
            subject=Fsdp1Subject(),
        )
        self._forward_redirection = _Redirection()
        self._wrapped: FullyShardedDataParallel | None = None  # of an earlier run, such as the fit before a test

    # -- set-up

    def setup_environment(self) -> None:
        """Check the options against the world, then make control plane, communicators and device mesh."""
        if not self.lightning_module.automatic_optimization:
            raise MisconfigurationException(
                f"{type(self.lightning_module).__name__} sets automatic_optimization=False, and FSDP1 holds the whole"
                " training_step for one forward pass: either return the loss from training_step, or use"
                ' strategy="accelpact_hsdp"'
            )
        super().setup_environment()
        if self._has_wrapped(self.model):
            self.runtime.protect(self._wrapped)

    def _has_wrapped(self, model: torch.nn.Module) -> bool:
        return self._wrapped is not None and self._wrapped.module is model

    def _adopt_groups(self, shape: HsdpShape) -> None:
        reset_seed()
        self._device_mesh = self.kwargs["device_mesh"] = self.runtime.mesh

    @property
    def device_mesh(self) -> DeviceMesh:
        """The (replicate, shard) mesh, once the environment has been set up; a module has it as well."""
        if self.runtime.mesh is None:
            raise RuntimeError("the device mesh is not there yet: it is made when the Trainer's run begins")
        return self.runtime.mesh

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        if not self._has_wrapped(model):
            self._wrapped = self._wrap_all(model)
        return super()._setup_model(self._wrapped)

    def _wrap_all(self, model: torch.nn.Module) -> FullyShardedDataParallel:
        if fsdp1.orphans(model):
            raise MisconfigurationException(
                f"{type(model).__name__} has been sharded by another strategy, which holds the unit around it: use the"
                " same Trainer again, or a new module that loads a checkpoint"
            )
        wrapped = self._shard(model)
        if not isinstance(wrapped, FullyShardedDataParallel):  # the user's units, but what is left belongs to nobody
            wrapped = FullyShardedDataParallel(wrapped, **self._unit_options)
        if reason := fsdp1.unsupported(wrapped):
            raise MisconfigurationException(
                f"accelpact_hsdp_fsdp1 cannot protect a model with {reason}. Wrap it in configure_model() with"
                " torch.distributed.fsdp.wrap.wrap(), which knows the options, or not at all"
            )
        return wrapped

    def _wrap_units(self, module: torch.nn.Module) -> tuple[torch.nn.Module, int]:
        blocks = {id(block) for block in self._wrap.blocks(module)}
        policy = CustomPolicy(lambda part: id(part) in blocks)
        return FullyShardedDataParallel(module, auto_wrap_policy=policy, **self._unit_options), len(blocks)

    @property
    def _unit_options(self) -> dict[str, Any]:
        return {
            "device_mesh": self.runtime.mesh,
            "device_id": self.root_device,  # not its index, which a CPU does not have
            "sharding_strategy": self.sharding_strategy,
            "mixed_precision": self.mixed_precision_config,
            "use_orig_params": True,
        }

    @property
    def mixed_precision_config(self) -> MixedPrecision | None:
        """FSDP1's mixed precision; none for ``"32-true"``, which would shard every BatchNorm as a unit of its own."""
        config = super().mixed_precision_config
        return None if self.mixed_precision is None and self.precision_plugin.precision == "32-true" else config

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """In which ``wrap()`` makes units like ours."""
        with enable_wrap(wrapper_cls=FullyShardedDataParallel, **self._unit_options):
            yield

    def setup_precision_plugin(self) -> None:
        """Let gradients be clipped by their norm, which Lightning's FSDP1 strategy refuses for want of the root."""
        super().setup_precision_plugin()
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        self.model.clip_grad_norm_(clip_val)

    # -- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state for a checkpoint."""
        if self._state_dict_type == "full" and self.root_device.type == "cpu":
            return self._run_operation(self._whole_state)
        return super().lightning_module_state_dict()

    def _whole_state(self) -> dict[str, Any]:
        # Lightning lets FSDP1 offload it to the CPU, and what is there already FSDP1 frees before it copies it
        config = FullStateDictConfig(offload_to_cpu=False, rank0_only=True)
        with FullyShardedDataParallel.state_dict_type(self.model, StateDictType.FULL_STATE_DICT, config):
            return self.model.state_dict()


def _checked(state_dict_type: str) -> str:
    if state_dict_type not in ("full", "sharded"):
        raise ValueError(f"state_dict_type={state_dict_type!r} must be one of ['full', 'sharded']")
    return state_dict_type


class _Redirection(_ForwardRedirection):
    """Lightning's way to a step through ``forward``, which it leaves replaced if a pass ends before the step."""

    def __call__(
        self, wrapper_module: torch.nn.Module, original_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> Any:
        forward = original_module.forward
        try:
            return super().__call__(wrapper_module, original_module, *args, **kwargs)
        except BaseException:  # whatever ends the pass goes on; an aborted update is no Exception
            original_module.forward = forward
            raise
