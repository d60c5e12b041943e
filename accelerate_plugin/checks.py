"""What is refused, before anything has been started, with what to do instead."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin, InitProcessGroupKwargs, KwargsHandler

from accelerate_plugin.plugin import AccelPactPlugin
from lightning_accelpact.recovery.options import HsdpShape
from lightning_accelpact.recovery.runtime import HsdpRuntime

_OTHER_ENGINES = {
    "deepspeed_plugin": "ACCELERATE_USE_DEEPSPEED",
    "deepspeed_plugins": "ACCELERATE_USE_DEEPSPEED",
    "megatron_lm_plugin": "ACCELERATE_USE_MEGATRON_LM",
}
_OTHER_DIMENSIONS = ("tp_size", "cp_size", "sp_size")


def flag(name: str) -> bool:
    """Whether one of Accelerate's environment switches is on."""
    return os.environ.get(name, "false").lower() in ("1", "true", "yes", "y", "on", "t")


def handlers(given: Sequence[KwargsHandler]) -> None:
    """Refuse more than one plugin, and options of process groups, which AccelPact makes itself.

    Raises:
        ValueError: says what to do.
    """
    plugins = [handler for handler in given if isinstance(handler, AccelPactPlugin)]
    if len(plugins) > 1:
        raise ValueError(f"kwargs_handlers holds {len(plugins)} AccelPactPlugin(...): pass one")
    for handler in given:
        if isinstance(handler, InitProcessGroupKwargs) and (options := handler.to_kwargs()):
            raise ValueError(
                f"InitProcessGroupKwargs({', '.join(options)}) has no effect, since AccelPact makes the process groups:"
                " leave it out; AccelPactPlugin(collective_timeout=...) limits what a collective may take"
            )


def parallelism(
    plugin: AccelPactPlugin, arguments: dict[str, Any], known: ParallelismConfig | None
) -> ParallelismConfig:
    """The sizes of the groups, from plugin and Accelerate.

    Args:
        plugin: The options.
        arguments: What ``Accelerator`` was called with.
        known: What an earlier ``Accelerator`` of this process has used.

    Raises:
        ValueError: names what AccelPact cannot work with.
    """
    _require_fsdp2(arguments)
    if arguments.get("mixed_precision", os.environ.get("ACCELERATE_MIXED_PRECISION")) == "fp8":
        raise ValueError(
            'AccelPact cannot run an update again under mixed_precision="fp8", whose scaling factors change in every'
            ' forward pass: use "bf16", "fp16" or "no"'
        )
    config = arguments.get("parallelism_config")
    if config is None and flag("ACCELERATE_USE_PARALLELISM_CONFIG"):
        config = ParallelismConfig()
    if config is None:
        config = known or _sized(plugin)
    for name in _OTHER_DIMENSIONS:
        if getattr(config, name) > 1:
            raise ValueError(
                f"AccelPact protects hybrid sharding only, but ParallelismConfig has {name}={getattr(config, name)}:"
                " leave it at 1"
            )
    for ours, theirs in (("replicate", "dp_replicate_size"), ("shard", "dp_shard_size")):
        wanted, there = getattr(plugin, ours), getattr(config, theirs)
        if wanted not in ("auto", there):
            raise ValueError(
                f'AccelPactPlugin({ours}={wanted}) contradicts ParallelismConfig({theirs}={there}): leave {ours}="auto"'
            )
    return config


def _require_fsdp2(arguments: dict[str, Any]) -> None:
    for name, switch in _OTHER_ENGINES.items():
        if arguments.get(name) is not None or flag(switch):
            raise ValueError(f"AccelPact needs Accelerate's FSDP2, but {name} is given: leave it out")
    fsdp = arguments.get("fsdp_plugin")
    if fsdp is None and not flag("ACCELERATE_USE_FSDP"):
        raise ValueError(
            "AccelPact needs Accelerate's FSDP2: pass fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), or"
            " set distributed_type: FSDP and fsdp_version: 2 in the configuration file"
        )
    given = isinstance(fsdp, FullyShardedDataParallelPlugin)
    version = fsdp.fsdp_version if given else int(os.environ.get("FSDP_VERSION", "1"))
    if version != 2:
        raise ValueError(f"AccelPact protects FSDP2 only, but fsdp_version is {version}: set it to 2")


def _sized(plugin: AccelPactPlugin) -> ParallelismConfig:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    require_processes(world)
    shape = HsdpShape.resolve(
        plugin.replicate, plugin.shard, num_nodes=max(1, world // local), devices_per_node=local
    )
    return ParallelismConfig(dp_replicate_size=shape.replicate, dp_shard_size=shape.shard)


def require_processes(world: int) -> None:
    """Refuse a single process.

    Raises:
        ValueError: says how to start more.
    """
    if world < 2:
        raise ValueError(
            "AccelPact needs at least 2 processes, since recovery needs peers; got 1: start the script with"
            " `accelerate launch --num_processes N`"
        )


def shape(runtime: HsdpRuntime, **world: Any) -> None:
    """Check the options against the world.

    Raises:
        ValueError: names the value, what is allowed and what to do.
    """
    require_processes(world["num_nodes"] * world["devices_per_node"])
    runtime.check(**world)


def prepared(objects: Sequence[Any]) -> None:
    """Refuse optimizers whose steps could not be voted on.

    Raises:
        ValueError: says what to use instead.
    """
    for one in objects:
        if isinstance(one, torch.optim.LBFGS):
            raise ValueError(
                "AccelPact votes once before each step, but LBFGS evaluates its closure several times in a step: use an"
                " optimizer that calls it once, such as AdamW"
            )


def loader(prepared_loader: Any) -> None:
    """Refuse a data loader that gives some ranks more batches than others: those would wait for ever.

    Raises:
        ValueError: says what to do.
    """
    sampler = getattr(prepared_loader, "batch_sampler", None)
    if getattr(sampler, "even_batches", True) or not hasattr(sampler, "num_processes"):
        return
    whole = sampler.batch_sampler
    if not sampler.split_batches and not sampler.drop_last and len(whole) % sampler.num_processes:
        raise ValueError(
            f"with even_batches=False this data loader gives its {len(whole)} batches unevenly to"
            f" {sampler.num_processes} processes, and under FSDP2 every process takes part in every forward pass: leave"
            " even_batches=True, or pass drop_last=True"
        )
