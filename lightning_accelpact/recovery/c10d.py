"""The one file that touches private attributes of ``torch.distributed`` (checked against torch 2.13).

Everything else speaks of process groups through these few functions; ``tests/recovery/test_c10d.py`` fails loudly
when one of the attributes moves.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

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

    def wait(work: dist.Work, timeout: timedelta = _NO_TIMEOUT) -> bool:
        if timeout != _NO_TIMEOUT:
            return _native_wait(work, timeout)
        if work._get_op_type() in _INDIVISIBLE and not work.is_completed():
            return _Waiter.result(lambda: _native_wait(work), interrupted)
        while True:
            try:
                return _native_wait(work, _SLICE)
            except RuntimeError:
                if work.is_completed():
                    return _native_wait(work)
                if interrupted():
                    raise dist.DistBackendError(_INTERRUPTED) from None

    def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return _native_wait_tensor(tensor)
        return _Waiter.result(lambda: _native_wait_tensor(tensor), interrupted)

    dist.Work.wait = wait
    _functional_collectives.wait_tensor = wait_tensor
    _methods["reduce_scatter_single"] = _DivisibleReduceScatter.start
    _functions["all_reduce"] = _divisible_all_reduce


_OpType = torch._C._distributed_c10d.OpType
_INDIVISIBLE = {int(kind) for kind in (_OpType.SEND, _OpType.RECV, _OpType.RECVANYSOURCE, _OpType.UNKNOWN)}
_INTERRUPTED = "the collective was interrupted: its links are down"


class _Waiter:
    """A thread that waits in the place of others, one wait at a time; it outlives a wait that is given up.

    Not an executor of the standard library: that would join its threads when the interpreter exits.
    """

    _idle: ClassVar[list[_Waiter]] = []
    _made: ClassVar[int] = 0

    def __init__(self) -> None:
        self._waits: SimpleQueue[_Wait] = SimpleQueue()
        threading.Thread(target=self._run, name="accelpact-wait", daemon=True).start()

    def _run(self) -> None:
        while True:
            wait = self._waits.get()
            wait.run()
            self._idle.append(self)
            wait.ended.set()

    @classmethod
    def busy(cls) -> int:
        """How many are waiting: asked by a thread that is not, those whose wait has been given up and is not over yet."""
        return cls._made - len(cls._idle)

    @classmethod
    def result(cls, function: Callable[[], T], interrupted: Callable[[], bool]) -> T:
        """What ``function`` returns, called in another thread; raises its error if it fails, or if interrupted."""
        try:
            waiter = cls._idle.pop()
        except IndexError:
            cls._made += 1
            waiter = cls()
        wait = _Wait(function)
        waiter._waits.put(wait)
        while not wait.ended.wait(_SLICE.total_seconds()):
            if interrupted():
                raise dist.DistBackendError(_INTERRUPTED)
        if wait.error is not None:
            raise wait.error
        return wait.value


waits_under_way = _Waiter.busy


class _Wait:
    """One wait, done under the gradient and inference mode of the thread that asks for it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        self.value: Any = None
        self.error: BaseException | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        grad, inference = self._modes
        try:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                self.value = self._function()
        except BaseException as error:  # raised in the thread that waits for it
            self.error = error


class _DivisibleReduceScatter:
    """What Gloo's reduce-scatter does, an all-reduce of a copy of which each member keeps its part, with a divisible wait."""

    def __init__(self, group: dist.ProcessGroup, output: torch.Tensor, own: torch.Tensor, opts: Any) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp, options.timeout, options.asyncOp = opts.reduceOp, opts.timeout, opts.asyncOp
        self._output = output
        self._whole = own.detach().clone()
        self._part = self._whole.view(group.size(), -1)[group.rank()]
        self._reduction = _native_methods["allreduce"](group, [self._whole], options)

    @classmethod
    def start(cls, group: dist.ProcessGroup, output: torch.Tensor, own: torch.Tensor, opts: Any) -> Any:
        """Begin one; in torch's own way where a caller wants its work, or it is not known to be the same."""
        fits = output.dim() > 0 and own.shape == (output.shape[0] * group.size(), *output.shape[1:])
        alike = output.dtype == own.dtype and own.device.type == "cpu" and own.is_contiguous()
        if opts.asyncOp or not (fits and alike):
            return _native_methods["reduce_scatter_single"](group, output, own, opts)
        return cls(group, output, own, opts)

    def wait(self) -> None:
        self._reduction.wait()
        self._output.copy_(self._part.view(self._output.shape))


def _divisible_all_reduce(self: torch.Tensor, reduceOp: str, group: dist.ProcessGroup, **options: Any) -> torch.Tensor:
    """A functional all-reduce, waited for."""
    kind = getattr(dist.ReduceOp, reduceOp.upper(), None)
    if kind is None or self.device.type != "cpu" or self.is_complex() or (self.requires_grad and torch.is_grad_enabled()):
        return _native_functions["all_reduce"](self, reduceOp, group, **options)
    result = self.clone(memory_format=torch.contiguous_format)
    opts = dist.AllreduceOptions()
    opts.reduceOp = kind
    _native_methods["allreduce"](current(group), [result], opts).wait()  # torch's own finds it by name as well
    return result


@dataclass(slots=True, eq=False)
class Collective:
    """A collective of all members of a group, in a form that can be run again.

    Each member's result depends on the input of every member: nobody finishes before all have begun.

    Args:
        group: The group that it was called on.
        outputs: Tensors that it writes.
        inputs: Tensors that it reads; the same list as ``outputs`` if it works in place.
        call: Runs it to its end, given a group, outputs and inputs; returns what the caller gets.
        start: Likewise, but returns the work as soon as it is under way; ``None`` if the caller gets no work.
        waited: Whether the caller waits for its end.
        bulky: Whether its inputs are larger than the outputs that it is given.
    """

    group: dist.ProcessGroup
    outputs: list[torch.Tensor]
    inputs: list[torch.Tensor]
    call: Callable[[dist.ProcessGroup, list[torch.Tensor], list[torch.Tensor]], Any]
    start: Callable[[dist.ProcessGroup, list[torch.Tensor], list[torch.Tensor]], dist.Work] | None = None
    waited: bool = True
    bulky: bool = False

    @property
    def in_place(self) -> bool:
        """Whether it overwrites its inputs."""
        return self.outputs is self.inputs

    @property
    def registered(self) -> bool:
        """Whether torch knows a group of this name: this one, or the one that has taken its place."""
        return self.group in _registered or self.group.group_name in distributed_c10d._world.pg_names.values()

    def run(self) -> Any:
        """Run it on the group that bears the name now."""
        return (self.call if self.waited else self.start)(current(self.group), self.outputs, self.inputs)

    def plain(self) -> Any:
        """Run it as it was called."""
        return (self.call if self.waited else self.start)(self.group, self.outputs, self.inputs)


class Finished(dist.Work):
    """What a collective returns that has been waited for already, or will be by somebody else."""

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


FINISHED = Finished()


def replaceable() -> list[tuple[Any, str, Any]]:
    """(holder, name, what is there now) of all that waits for collectives and their interception put something else into."""
    places = [(dist.Work, "wait"), (_functional_collectives, "wait_tensor")]
    places += [(dist.ProcessGroup, name) for name in _METHODS]
    places += [(_functional_collectives, name) for name in _native_functions]
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
    for name, describe in _METHODS.items():
        setattr(dist.ProcessGroup, name, _intercepted_method(name, describe, handle))
    for name in _native_functions:
        setattr(_functional_collectives, name, _intercepted_function(name, handle))


Tensors = list[torch.Tensor]


def _gathered(native: Callable[..., dist.Work], lists: list[Tensors], inputs: Tensors, opts: Any) -> tuple[Any, ...]:
    return lists[0], inputs, lambda group, out, own: native(group, [out], own, opts)


def _from_one_into_one(
    native: Callable[..., dist.Work], output: torch.Tensor, own: torch.Tensor, opts: Any
) -> tuple[Any, ...]:
    return [output], [own], lambda group, out, own: native(group, out[0], own[0], opts)


_BULKY = {"reduce_scatter_single"}

# How the arguments of a method tell outputs, inputs, and the call with others in their place
_METHODS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "allreduce": lambda native, tensors, opts: (tensors, tensors, lambda group, out, own: native(group, out, opts)),
    "all_gather_single": _from_one_into_one,
    "reduce_scatter_single": _from_one_into_one,
    "allgather": _gathered,
    "barrier": lambda native, opts: ([], [], lambda group, out, own: native(group, opts)),
}  # fmt: skip
_native_methods = {name: getattr(dist.ProcessGroup, name) for name in _METHODS}
_native_functions = {
    name: getattr(_functional_collectives, name)
    for name in ("all_reduce", "all_gather_single", "reduce_scatter_single")
}
# What runs in their places
_methods: dict[str, Callable[..., Any]] = dict(_native_methods)
_functions: dict[str, Callable[..., torch.Tensor]] = dict(_native_functions)

def _intercepted_method(name: str, describe: Callable[..., tuple[Any, ...]], handle: Any) -> Any:
    native, run, bulky = _native_methods[name], _methods[name], name in _BULKY

    @functools.wraps(native)
    def method(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> dist.Work:
        given = (*args, *kwargs.values()) if kwargs else args
        if not (given and hasattr(given[-1], "asyncOp") and kwargs.keys() <= {"opts"}):
            return native(group, *args, **kwargs)
        outputs, inputs, start = describe(run, *given)

        def call(group: dist.ProcessGroup, outputs: Tensors, inputs: Tensors) -> dist.Work:
            start(group, outputs, inputs).wait()
            return FINISHED

        return handle(Collective(group, outputs, inputs, call, start, not given[-1].asyncOp, bulky))

    return method


def _intercepted_function(name: str, handle: Any) -> Any:
    native, run = _native_functions[name], _functions[name]
    signature = inspect.signature(native)

    @functools.wraps(native)
    def function(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _functional_collectives._are_we_tracing():
            return native(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        tensor, group = given.pop("self"), _functional_collectives._resolve_group(given.pop("group"))

        def call(group: dist.ProcessGroup, outputs: Tensors, inputs: Tensors) -> torch.Tensor:
            result = run(inputs[0], group=group, **given)
            return result.wait() if isinstance(result, _functional_collectives.AsyncCollectiveTensor) else result

        known = current_by_name(group) if isinstance(group, str) else group
        return handle(Collective(known, [], [tensor], call, bulky=True))

    return function


def issued(group: dist.ProcessGroup) -> int:
    """How many collectives this rank has begun on a group, by torch's own count."""
    return group._get_sequence_number_for_group()


def mesh_registries(mesh: DeviceMesh) -> list[dict[str, dist.ProcessGroup]]:
    """The name-to-group registries of a device mesh and of its root."""
    root = mesh._get_root_mesh()
    return [mesh._pg_registry] if root is mesh else [mesh._pg_registry, root._pg_registry]
