"""The one file that touches private attributes of ``torch.distributed`` (checked against torch 2.13).

Everything else speaks of process groups through these few functions; ``tests/recovery/test_c10d.py`` fails loudly
when one of the attributes moves.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from lightning_accelpact.recovery.waiter import INTERRUPTED, Waiter

CHECKED_TORCH = ("2.13",)

_REGISTRIES = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "tags_to_pg",
    "pg_coalesce_state",
)


_registered = distributed_c10d._world.pg_map  # looked at in every collective; it is emptied, never replaced


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """What it takes to make a process group again under the same name.

    Args:
        name: Its name in torch's registry. Kept, so that compiled graphs and DTensor specs stay valid.
        ranks: Global ranks of its members, in group order.
        backend: Backend, or device-to-backend map (``cpu:gloo,cuda:nccl``), as it was asked for.
        description: Free text that torch shows in its logs.
        is_world: Whether it is the default group.
    """

    name: str
    ranks: tuple[int, ...]
    backend: str
    description: str
    is_world: bool


def registered_groups() -> dict[GroupSpec, dist.ProcessGroup]:
    """Every process group that this process is a member of, oldest first."""
    world = distributed_c10d._world
    return {_spec(group): group for group in world.pg_map}


def _spec(group: dist.ProcessGroup) -> GroupSpec:
    world = distributed_c10d._world
    return GroupSpec(
        name=world.pg_names[group],
        ranks=tuple(dist.get_process_group_ranks(group)),
        backend=_backend(group),
        description=group.group_desc,
        is_world=group is dist.group.WORLD,
    )


def _backend(group: dist.ProcessGroup) -> str:
    """The backend as it was asked for, which ``get_backend`` gives back and callers compare with ``"gloo"``."""
    world = distributed_c10d._world
    asked = str(world.pg_map[group][0])
    return str(world.pg_backend_config[group]) if asked == dist.Backend.UNDEFINED else asked


def forget_groups() -> list[dist.ProcessGroup]:
    """Take every process group out of torch's registries without shutting it down or waiting for it.

    ``destroy_process_group`` waits for each group's threads (about 15 ms a Gloo group); a repair cannot afford that.

    Returns:
        The forgotten groups; whoever drops the last reference pays for their destruction.
    """
    world = distributed_c10d._world
    groups = list(world.pg_map)
    distributed_c10d._update_default_pg(None)
    for name in _REGISTRIES:
        getattr(world, name).clear()
    distributed_c10d._unregister_all_process_groups()
    return groups


def create_group(spec: GroupSpec, *, rank: int, store: dist.Store, timeout: timedelta) -> dist.ProcessGroup:
    """Make the group of ``spec`` on ``store``. Members alone call this; the default group must come first."""
    world = distributed_c10d._world
    if spec.is_world:
        count, world.group_count = world.group_count, int(spec.name)
        dist.init_process_group(spec.backend, store=store, rank=rank, world_size=len(spec.ranks), timeout=timeout)
        world.group_count = max(count, world.group_count)
        return dist.group.WORLD
    group, _ = distributed_c10d._new_process_group_helper(
        len(spec.ranks),
        spec.ranks.index(rank),
        list(spec.ranks),
        spec.backend,
        store,
        spec.name,
        timeout=timeout,
        group_desc=spec.description,
    )
    world.pg_group_ranks[group] = {member: index for index, member in enumerate(spec.ranks)}
    return group


def current(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group that bears this group's name now: whoever got hold of one may have kept it over a repair."""
    return group if group is None or group in _registered else current_by_name(group.group_name)


def current_by_name(name: str) -> dist.ProcessGroup:
    """The group that bears this name now."""
    return distributed_c10d._resolve_process_group(name)


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Change how long the group's collectives may take."""
    distributed_c10d._set_pg_timeout(timeout, group)


def backend_names(group: dist.ProcessGroup) -> set[str]:
    """The lower-case backend names behind a group, such as ``{"gloo"}``."""
    config = distributed_c10d.BackendConfig(distributed_c10d._world.pg_backend_config[group])
    return {str(name).lower() for name in config.get_device_backend_map().values()}


def abort_all() -> None:
    """Abort every NCCL communicator of this process, grouped into one call."""
    distributed_c10d._abort_process_group(None)


def nccl_error() -> str:
    """What NCCL says is wrong with a communicator of this process; empty if nothing is."""
    for group in distributed_c10d._world.pg_map:
        if "nccl" in backend_names(group):
            state = group._get_backend(torch.device("cuda")).get_error()
            if state != torch._C._distributed_c10d.ErrorType.SUCCESS:
                return f"NCCL reports {state} on group {group.group_name}"
    return ""


def device_of(group: dist.ProcessGroup) -> torch.device:
    """A device whose tensors the group can reduce."""
    kinds = {device.type for device in group._device_types}
    if "cuda" in kinds and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


_native_wait = dist.Work.wait
_native_wait_tensor = _functional_collectives.wait_tensor
_NO_TIMEOUT = timedelta(0)
_SLICE = timedelta(milliseconds=25)
_interrupted: Callable[[], bool] | None = None  # whether the links are down, where waits are interruptible


def make_waits_interruptible(interrupted: Callable[[], bool]) -> None:
    """Let a blocked synchronous collective return when the links are cut, also where Gloo forgets to wake it.

    A Gloo pair that goes down wakes its queued receives, but not a send that has left the queue and not been written
    (``Pair::signalException`` looks at bound buffers only): that collective would wait for its whole timeout. So the
    wait is cut into slices, and given up between two of them. Gloo's reduce-scatter takes no notice of a timeout, and a
    functional all-reduce, which the clipping of DTensor's norm needs, gives no work to wait for: they become the
    all-reduce that they are. Where nothing of that can be done a thread waits instead, which costs two switches of
    context: for other functional collectives, and for a send or receive, whose timeout would close the pair when it
    passes. For host-synchronous backends only: on NCCL a wait with a timeout blocks the host.

    Args:
        interrupted: Whether the links are down.
    """
    global _interrupted
    _interrupted = interrupted
    dist.Work.wait = _wait
    _functional_collectives.wait_tensor = _wait_tensor


def _wait(work: dist.Work, timeout: timedelta = _NO_TIMEOUT) -> bool:
    if timeout != _NO_TIMEOUT:
        return _native_wait(work, timeout)
    if work._get_op_type() in _INDIVISIBLE and not work.is_completed():
        return Waiter.result(lambda: _native_wait(work), _interrupted)
    return _wait_in_slices(work)


def _wait_in_slices(work: dist.Work) -> bool:
    while True:
        try:
            return _native_wait(work, _SLICE)
        except RuntimeError:
            if work.is_completed():
                return _native_wait(work)
            if _interrupted():
                raise dist.DistBackendError(INTERRUPTED) from None


def _wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return _native_wait_tensor(tensor)
    return Waiter.result(lambda: _native_wait_tensor(tensor), _interrupted)


_OpType = torch._C._distributed_c10d.OpType
_INDIVISIBLE = {int(kind) for kind in (_OpType.SEND, _OpType.RECV, _OpType.RECVANYSOURCE, _OpType.UNKNOWN)}


class Finished(dist.Work):
    """What a collective returns that has been waited for already, or will be by somebody else."""

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


FINISHED = Finished()
Tensors = list[torch.Tensor]


@dataclass(slots=True, eq=False)
class Collective:
    """A collective of all members of a group, in a form that can be run again.

    Each member's result depends on the input of every member: nobody finishes before all have begun.

    Args:
        group: The group that it was called on.
        outputs: Tensors that it writes.
        inputs: Tensors that it reads; the same list as ``outputs`` if it works in place.
        options: What else it was called with, in torch's own form.
        waited: Whether the caller waits for its end; else for a work that it gets.
    """

    group: dist.ProcessGroup
    outputs: Tensors
    inputs: Tensors
    options: Any
    waited: bool

    bulky: ClassVar[bool] = False  # whether it reads much more than it writes

    def begin(self, group: dist.ProcessGroup, outputs: Tensors, inputs: Tensors) -> dist.Work:
        """Put it on its way, with this group and these tensors in the place of its own."""
        raise NotImplementedError(f"{type(self).__name__} gives no work")

    def finish(self, group: dist.ProcessGroup, outputs: Tensors, inputs: Tensors) -> Any:
        """Run it to its end, likewise; returns what a caller gets that waits for it."""
        work = self.begin(group, outputs, inputs)
        if _interrupted is None:
            work.wait()
        else:
            _wait_in_slices(work)
        return FINISHED

    @property
    def in_place(self) -> bool:
        """Whether it overwrites its inputs."""
        return self.outputs is self.inputs

    @property
    def registered(self) -> bool:
        """Whether torch knows a group of this name: this one, or the one that has taken its place."""
        return self.group in _registered or self.group.group_name in distributed_c10d._world.pg_names.values()

    @property
    def dense(self) -> bool:
        """Whether its inputs are ordinary tensors, which can be copied into memory of a given size; on all ranks alike."""
        return all(tensor.layout is torch.strided for tensor in self.inputs)

    def run(self) -> Any:
        """Run it on the group that bears the name now."""
        return self._on(current(self.group))

    def plain(self) -> Any:
        """Run it as it was called."""
        return self._on(self.group)

    def _on(self, group: dist.ProcessGroup) -> Any:
        return (self.finish if self.waited else self.begin)(group, self.outputs, self.inputs)


class _AllReduce(Collective):
    __slots__ = ()

    @classmethod
    def called(cls, group: dist.ProcessGroup, tensors: Tensors, options: Any, waited: bool) -> Collective:
        return cls(group, tensors, tensors, options, waited)

    def begin(self, group: dist.ProcessGroup, outputs: Tensors, inputs: Tensors) -> dist.Work:
        return _native_methods["allreduce"](group, outputs, self.options)


class _AllGatherSingle(Collective):
    __slots__ = ()

    @classmethod
    def called(
        cls, group: dist.ProcessGroup, output: torch.Tensor, own: torch.Tensor, options: Any, waited: bool
    ) -> Collective:
        return cls(group, [output], [own], options, waited)

    def begin(self, group: dist.ProcessGroup, outputs: Tensors, inputs: Tensors) -> dist.Work:
        return _native_methods["all_gather_single"](group, outputs[0], inputs[0], self.options)


class _ReduceScatterSingle(_AllGatherSingle):
    __slots__ = ()
    bulky: ClassVar[bool] = True

    def begin(self, group: dist.ProcessGroup, outputs: Tensors, inputs: Tensors) -> dist.Work:
        return _native_methods["reduce_scatter_single"](group, outputs[0], inputs[0], self.options)

    def finish(self, group: dist.ProcessGroup, outputs: Tensors, inputs: Tensors) -> Any:
        (output,), (own,) = outputs, inputs
        size = group.size()
        fits = output.dim() > 0 and own.shape == (output.shape[0] * size, *output.shape[1:])
        alike = output.dtype == own.dtype and own.device.type == "cpu" and own.is_contiguous()
        if _interrupted is None or not (fits and alike):
            _native_methods["reduce_scatter_single"](group, output, own, self.options).wait()
            return FINISHED
        # What Gloo does: an all-reduce of a copy, of which each member keeps its part
        whole = own.detach().clone()
        _all_reduce(group, whole, self.options.reduceOp, self.options.timeout)
        output.copy_(whole.view(size, -1)[group.rank()].view(output.shape))
        return FINISHED


def _all_reduce(group: dist.ProcessGroup, tensor: torch.Tensor, op: Any, timeout: timedelta | None = None) -> None:
    """All-reduce in place, waited for in slices."""
    options = dist.AllreduceOptions()
    options.reduceOp = op
    if timeout is not None:
        options.timeout = timeout
    _wait_in_slices(_native_methods["allreduce"](group, [tensor], options))


class _AllGather(Collective):
    __slots__ = ()

    @classmethod
    def called(
        cls, group: dist.ProcessGroup, lists: list[Tensors], inputs: Tensors, options: Any, waited: bool
    ) -> Collective:
        return cls(group, lists[0], inputs, options, waited)

    def begin(self, group: dist.ProcessGroup, outputs: Tensors, inputs: Tensors) -> dist.Work:
        return _native_methods["allgather"](group, [outputs], inputs, self.options)


class _Barrier(Collective):
    __slots__ = ()

    @classmethod
    def called(cls, group: dist.ProcessGroup, options: Any, waited: bool) -> Collective:
        return cls(group, [], [], options, waited)

    def begin(self, group: dist.ProcessGroup, outputs: Tensors, inputs: Tensors) -> dist.Work:
        return _native_methods["barrier"](group, self.options)


class _Functional(Collective):
    """One that gives its result back, and no work."""

    __slots__ = ()
    name: ClassVar[str]

    def finish(self, group: dist.ProcessGroup, outputs: Tensors, inputs: Tensors) -> torch.Tensor:
        result = _native_functions[self.name](inputs[0], group=group, **self.options)
        return result.wait() if isinstance(result, _functional_collectives.AsyncCollectiveTensor) else result


class _FunctionalAllGather(_Functional):
    __slots__ = ()
    name = "all_gather_single"


class _FunctionalReduceScatter(_Functional):
    __slots__ = ()
    name = "reduce_scatter_single"


class _FunctionalAllReduce(_Functional):
    __slots__ = ()
    name = "all_reduce"

    def finish(self, group: dist.ProcessGroup, outputs: Tensors, inputs: Tensors) -> torch.Tensor:
        (own,) = inputs
        op = getattr(dist.ReduceOp, self.options["reduceOp"].upper(), None)
        differentiated = own.requires_grad and torch.is_grad_enabled()
        if _interrupted is None or op is None or own.device.type != "cpu" or own.is_complex() or differentiated:
            return super().finish(group, outputs, inputs)
        result = own.clone(memory_format=torch.contiguous_format)
        _all_reduce(current(group), result, op)  # torch's own finds it by name as well
        return result


_METHODS = {
    "allreduce": _AllReduce,
    "all_gather_single": _AllGatherSingle,
    "reduce_scatter_single": _ReduceScatterSingle,
    "allgather": _AllGather,
    "barrier": _Barrier,
}
_FUNCTIONS = {kind.name: kind for kind in (_FunctionalAllReduce, _FunctionalAllGather, _FunctionalReduceScatter)}
_native_methods = {name: getattr(dist.ProcessGroup, name) for name in _METHODS}
_native_functions = {name: getattr(_functional_collectives, name) for name in _FUNCTIONS}


def replaceable() -> list[tuple[Any, str, Any]]:
    """(holder, name, what is there now) of all that waits for collectives and their interception put something else into."""
    places = [(dist.Work, "wait"), (_functional_collectives, "wait_tensor")]
    places += [(dist.ProcessGroup, name) for name in _METHODS]
    places += [(_functional_collectives, name) for name in _FUNCTIONS]
    return [(holder, name, vars(holder)[name]) for holder, name in places]


def intercept_collectives(handle: Callable[[Collective], Any]) -> None:
    """Let ``handle`` run every collective that its caller waits for, FSDP's, DTensor's and the user's own.

    FSDP2 lets a user replace its all-gather and reduce-scatter but not the all-reduce of HSDP, and DTensor offers nothing,
    so this is done one level below: in the methods of ``ProcessGroup``, and in the functional collectives, which reach
    the group in C++. Left alone are those in which a member does not need all others (such as a broadcast), and
    everything that is being traced.

    Args:
        handle: Takes a collective and returns what running it returned.
    """
    for name, kind in _METHODS.items():
        setattr(dist.ProcessGroup, name, _intercepted_method(_native_methods[name], kind.called, handle))
    for name, kind in _FUNCTIONS.items():
        setattr(_functional_collectives, name, _intercepted_function(_native_functions[name], kind, handle))


def _intercepted_method(native: Any, called: Callable[..., Collective], handle: Callable[[Collective], Any]) -> Any:
    @functools.wraps(native)
    def method(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> dist.Work:
        given = (*args, kwargs["opts"]) if kwargs.keys() == {"opts"} else args
        asynchronous = getattr(given[-1], "asyncOp", None) if given else None
        if asynchronous is None:
            return native(group, *args, **kwargs)
        return handle(called(group, *given, not asynchronous))

    return method


def _intercepted_function(native: Any, kind: type[_Functional], handle: Callable[[Collective], Any]) -> Any:
    signature = inspect.signature(native)

    @functools.wraps(native)
    def function(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _functional_collectives._are_we_tracing():
            return native(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        tensor, group = given.pop("self"), _functional_collectives._resolve_group(given.pop("group"))
        known = current_by_name(group) if isinstance(group, str) else group
        return handle(kind(known, [], [tensor], given, True))

    return function


def issued(group: dist.ProcessGroup) -> int:
    """How many collectives this rank has begun on a group, by torch's own count."""
    return group._get_sequence_number_for_group()


def mesh_registries(mesh: DeviceMesh) -> list[dict[str, dist.ProcessGroup]]:
    """The name-to-group registries of a device mesh and of its root."""
    root = mesh._get_root_mesh()
    return [mesh._pg_registry] if root is mesh else [mesh._pg_registry, root._pg_registry]
