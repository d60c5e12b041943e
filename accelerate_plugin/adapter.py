"""The one file that touches private attributes of Accelerate (checked against accelerate 1.15).

It puts a resilient class under each ``Accelerator`` that is given an :class:`~.plugin.AccelPactPlugin`, and leaves all
others alone. ``tests/with_accelerate/test_adapter.py`` fails loudly when an attribute moves.
"""

from __future__ import annotations

import functools
import inspect
import os
import shutil
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.accelerator import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType

from accelerate_plugin import checks
from accelerate_plugin.plugin import AccelPactPlugin
from accelerate_plugin.run import AccelPact
from lightning_accelpact.recovery.runtime import Place
from lightning_accelpact.recovery.update import VotingClosure

CHECKED_ACCELERATE = ("1.15",)

# Of each prepared data loader; not kept in the loader, which may be pickled
_runs: weakref.WeakKeyDictionary[Any, AccelPact] = weakref.WeakKeyDictionary()
_current: AccelPact | None = None
_coming: AccelPactPlugin | None = None  # of the Accelerator that is being made

_plain_init = Accelerator.__init__
_plain_partial_init = PartialState.__init__


def install() -> None:
    """Look after every ``Accelerator`` from now on; once is enough."""
    if Accelerator.__init__ is not _plain_init:
        return
    Accelerator.__init__ = _init
    PartialState.__init__ = _partial_init
    PartialState.wait_for_everyone = _as_operation(PartialState.wait_for_everyone)
    for loader in (DataLoaderShard, DataLoaderDispatcher):
        loader.__iter__ = _iterate(loader.__iter__)
    for name in _COLLECTIVES:
        _replace_everywhere(name)


# -- set-up


@functools.wraps(_plain_init)
def _init(self: Accelerator, *args: Any, **kwargs: Any) -> None:
    global _coming, _current
    arguments = inspect.signature(_plain_init).bind(self, *args, **kwargs).arguments
    del arguments["self"]
    handlers = list(arguments.get("kwargs_handlers") or ())
    given = [handler for handler in handlers if isinstance(handler, AccelPactPlugin)]
    plugin = given[0] if given else AccelPactPlugin.from_environment()
    if plugin is None:
        _plain_init(self, **arguments)
        return
    checks.handlers(handlers)
    arguments["kwargs_handlers"] = [handler for handler in handlers if handler not in given] or None
    config = arguments["parallelism_config"] = checks.parallelism(plugin, arguments, _known_parallelism())
    run = AccelPact(plugin, config.dp_replicate_size, config.dp_shard_size)
    checks.shape(run.runtime, **_world(bool(arguments.get("cpu"))))
    if _current is not None:
        _current.finish()
    _coming = plugin
    try:
        PartialState(bool(arguments.get("cpu")))
        run.begin(_place(bool(arguments.get("cpu"))))
        run.runtime.adopt(lambda: _plain_init(self, **arguments))
    finally:
        _coming = None
    self.__class__ = _resilient(type(self))
    self.accelpact = _current = run
    counts = _SchedulerCounts(self)
    run.attach(self.state.device_mesh, self.device, _Counters(self), self.scaler, [counts])


def _known_parallelism() -> ParallelismConfig | None:
    """What an earlier ``Accelerator`` of this process has set; it holds for all."""
    return AcceleratorState._shared_state.get("parallelism_config")


def _on_cpu(cpu: bool) -> bool:
    return cpu or not torch.cuda.is_available() or checks.flag("ACCELERATE_USE_CPU")


def _world(cpu: bool) -> dict[str, Any]:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    on_cpu = _on_cpu(cpu)
    return {
        "num_nodes": max(1, world // local),
        "devices_per_node": local,
        "backend": "gloo" if on_cpu else "nccl",
        "device_type": "cpu" if on_cpu else "cuda",
    }


def _place(cpu: bool) -> Place:
    world = _world(cpu)
    return Place(
        rank=int(os.environ.get("RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        host=os.environ.get("MASTER_ADDR", "127.0.0.1"),
        port=int(os.environ.get("MASTER_PORT", "29500")),
        backend=world["backend"],
        device_type=world["device_type"],
    )


@functools.wraps(_plain_partial_init)
def _partial_init(self: PartialState, cpu: bool = False, **kwargs: Any) -> None:
    """Make the process groups before Accelerate does, and let it run FSDP without GPUs."""
    plugin = _coming or AccelPactPlugin.from_environment()
    if plugin is None or PartialState._shared_state != {} or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        _plain_partial_init(self, cpu, **kwargs)
        return
    on_cpu = _on_cpu(cpu)
    if not on_cpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    AccelPact(plugin, "auto", "auto").runtime.open_session(_place(cpu))
    _plain_partial_init(self, on_cpu, **kwargs)
    _allow_fsdp(self)


def allow_fsdp_on_cpu() -> None:
    """Let Accelerate run FSDP2 over Gloo where there is no GPU; for scripts that run without AccelPact as well."""
    if not torch.cuda.is_available() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _allow_fsdp(PartialState(cpu=True))


def _allow_fsdp(state: PartialState) -> None:
    if state.distributed_type is DistributedType.MULTI_CPU:  # which AcceleratorState refuses for FSDP
        state.distributed_type = DistributedType.MULTI_GPU


# -- the Accelerator


@functools.cache
def _resilient(cls: type[Accelerator]) -> type[Accelerator]:
    return type(cls.__name__, (_Resilient, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


class _Resilient:
    """Goes in front of ``Accelerator`` in the bases of its class."""

    accelpact: AccelPact

    def __reduce__(self) -> Any:
        state = {name: value for name, value in vars(self).items() if name != "accelpact"}
        return _as(type(self).__mro__[2], state)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        checks.prepared(args)
        result = super().prepare(*args, **kwargs)
        for model in self._models:
            self.accelpact.protect(model)
        return result

    def prepare_optimizer(self, *args: Any, **kwargs: Any) -> AcceleratedOptimizer:
        prepared = super().prepare_optimizer(*args, **kwargs)
        if type(prepared) is AcceleratedOptimizer:
            prepared.__class__ = _ResilientOptimizer
            prepared.accelpact = self.accelpact
            self.accelpact.take_in(prepared.optimizer)
        return prepared

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        return _marked(super().prepare_data_loader(*args, **kwargs), self.accelpact)

    def skip_first_batches(self, *args: Any, **kwargs: Any) -> Any:
        return _marked(super().skip_first_batches(*args, **kwargs), self.accelpact)

    @contextmanager
    def accumulate(self, *models: torch.nn.Module) -> Iterator[None]:
        if self.accelpact.plain:
            with super().accumulate(*models):
                yield
            return
        with self.accelpact.iteration() as idle:
            if idle:
                yield
            else:
                with super().accumulate(*models):
                    yield

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        with self.accelpact.backward_pass():
            super().backward(loss, **kwargs)

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        save = super().save_state
        return self.accelpact.save(
            output_dir, lambda: save(output_dir, *args, **kwargs), rewind=lambda: _forget_folder(self)
        )

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        load = super().load_state
        self.accelpact.load(lambda: load(*args, **kwargs))

    def save_model(self, *args: Any, **kwargs: Any) -> Any:
        save = super().save_model
        return self.accelpact.operation(lambda: save(*args, **kwargs))

    def get_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        get = super().get_state_dict
        return self.accelpact.operation(lambda: get(*args, **kwargs))

    def free_memory(self, *objects: Any) -> Any:
        self.accelpact.release()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """Leave together, report, and end the trackers. The process groups stay for a next run in this process."""
        if self.log_with and self.accelpact.is_open:  # the trackers themselves are the main process's alone
            self.log(self.accelpact.goodput_metrics(), step=self.accelpact.committed_updates)
        self.accelpact.finish()
        for tracker in self.trackers:
            tracker.finish()


class _Counters:
    """Accelerate's count of micro-batches."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    @property
    def step(self) -> int:
        return self._accelerator.step

    @step.setter
    def step(self, step: int) -> None:
        self._accelerator.step = step

    def hold_back(self) -> None:
        self._accelerator.gradient_state._set_sync_gradients(False)


class _SchedulerCounts:
    """What prepared LR schedulers count in micro-batches that do not step."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def capture(self) -> list[tuple[Any, int]]:
        schedulers = [scheduler.scheduler for scheduler in self._accelerator._schedulers]
        return [(scheduler, scheduler._step_count) for scheduler in schedulers if hasattr(scheduler, "_step_count")]

    def restore(self, state: list[tuple[Any, int]]) -> None:
        for scheduler, count in state:
            scheduler._step_count = count


def _forget_folder(accelerator: Accelerator) -> None:
    """A checkpoint that is named automatically may not be there already when it is written again."""
    project = accelerator.project_configuration
    if project.automatic_checkpoint_naming:
        folder = os.path.join(accelerator.project_dir, "checkpoints", f"checkpoint_{accelerator.save_iteration}")
        shutil.rmtree(folder, ignore_errors=True)


class _ResilientOptimizer(AcceleratedOptimizer):
    """Votes right before it writes."""

    accelpact: AccelPact

    def __reduce__(self) -> Any:
        state = {name: value for name, value in self.__getstate__().items() if name != "accelpact"}
        return _as(AcceleratedOptimizer, state)

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if not self.gradient_state.sync_gradients:
            return super().step(closure)
        write = super().step

        def voted(vote: Callable[[], None]) -> None:
            if closure is None:
                vote()
            write(closure and VotingClosure(closure, vote))

        return self.accelpact.step(self.optimizer, voted)


def _as(cls: type, state: dict[str, Any]) -> tuple[Any, ...]:
    """How to pickle an object: as Accelerate's own, since a run cannot be."""
    return _blank, (cls,), state


def _blank(cls: type) -> Any:
    return object.__new__(cls)


# -- loaders and collectives


def _marked(loader: Any, run: AccelPact) -> Any:
    _runs[loader] = run
    return loader


def _iterate(plain: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    @functools.wraps(plain)
    def iterate(loader: Any) -> Iterator[Any]:
        if (run := _runs.get(loader)) is None:
            return plain(loader)
        if run.protects:
            checks.loader(loader)
        return run.feed(loader, plain(loader), lambda: _batches_ahead(loader))

    return iterate


def _batches_ahead(loader: Any) -> int:
    """The rest of an update, where batches come from another rank."""
    return GradientState().num_steps if isinstance(loader, DataLoaderDispatcher) else 1


_COLLECTIVES = (
    "gather", "gather_object", "reduce", "broadcast", "broadcast_object_list", "pad_across_processes",
    "synchronize_rng_states",
)  # fmt: skip


def _replace_everywhere(name: str) -> None:
    """Replace one of Accelerate's functions under every name that its own modules have imported it by."""
    home = sys.modules["accelerate.utils"]
    plain = getattr(home, name)
    resilient = _as_operation(plain)
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "accelerate" and vars(module).get(name) is plain:
            setattr(module, name, resilient)


def _as_operation(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def resilient(*args: Any, **kwargs: Any) -> Any:
        if _current is None:
            return plain(*args, **kwargs)
        lists = [(value, list(value)) for value in (*args, *kwargs.values()) if isinstance(value, list)]

        def rewind() -> None:
            for value, content in lists:
                value[:] = content

        return _current.operation(lambda: plain(*args, **kwargs), rewind)

    return resilient
