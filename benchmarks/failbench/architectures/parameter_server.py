"""A1: parameter server, with a barrier and without."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.failbench.architectures.architecture import Architecture

_SERVER = 0


class ParameterServer(Architecture):
    """A1: rank 0 sums the workers' gradients, steps, and sends its parameters back; all wait for all."""

    derived = frozenset({"worker"})

    @classmethod
    def contributors(cls, size: int) -> int:
        return size - 1

    @classmethod
    def share_of(cls, rank: int) -> int:
        return max(0, rank - 1)

    @classmethod
    def shard(cls, rank: int, members: Sequence[int]) -> str:
        return "worker" if rank else "server"

    def build(self) -> None:
        self.model = self.task.model()
        self.workers = range(1, self.world.size)

    @property
    def serves(self) -> bool:
        """Whether this rank is the server."""
        return self.world.rank == _SERVER

    def step(self) -> float:
        if self.serves:
            loss = self.apply(self._sum())
        else:
            loss = self.backward()
            dist.send(self.flat_gradients(loss), _SERVER)
            self.prepared()
        self.synchronize()
        return loss

    def roll_forward(self) -> None:
        if self.serves:
            super().roll_forward()

    def synchronize(self) -> None:
        """All workers take the server's parameters."""
        parameters = self.flat_parameters()
        if self.serves:
            for work in [dist.isend(parameters, worker) for worker in self.workers]:
                work.wait()
        else:
            dist.recv(parameters, _SERVER)
            self.set_parameters(parameters)

    def _sum(self) -> Tensor:
        """In the order of the workers, so that the same gradients have the same sum."""
        self.skip()
        incoming = [torch.empty(sum(self._sizes()) + 1) for _ in self.workers]
        for work in [dist.irecv(one, worker) for one, worker in zip(incoming, self.workers, strict=True)]:
            work.wait()
        return torch.stack(incoming).sum(0)

    def skip(self) -> None:
        """Move the data position on without looking at the samples; the server trains on none."""
        self.samples.position += self.batch
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


class AsyncParameterServer(ParameterServer):
    """A1-async: the server steps with each gradient as it comes, and no worker waits for another one.

    Each worker has a group of its own with the server, which goes on without those whose group fails. A step of the
    server is as many gradients as there are workers.
    """

    degrades = True

    def build(self) -> None:
        super().build()
        links = [worker for worker in self.workers if self.serves or worker == self.world.rank]
        self._groups = {worker: self.world.subgroup([_SERVER, worker]) for worker in links}
        self._steps_left = dict.fromkeys(links, self.preset.steps)
        self._arrivals: queue.Queue[tuple[int, Tensor | RuntimeError]] = queue.Queue()
        self._listeners: dict[int, threading.Thread] = {}

    def step(self) -> float:
        if self.serves:
            return self._serve(len(self._steps_left))
        group = self._groups[self.world.rank]
        # One of the shares' worth of the batch, so that a step goes as far as one of the synchronous server
        loss = self.backward()
        dist.send(self.flat_gradients(loss), _SERVER, group=group)
        parameters = self.flat_parameters()
        dist.recv(parameters, _SERVER, group=group)
        self.set_parameters(parameters)
        return loss

    def finish(self) -> None:
        """Serve those that are behind."""
        while self.serves and self._steps_left:
            self._serve(1)

    def _serve(self, count: int) -> float:
        """Take so many gradients; fewer if no worker has any left."""
        self.skip()
        losses: list[float] = []
        while len(losses) < count and self._steps_left:
            worker, arrived = self._next()
            if isinstance(arrived, RuntimeError):
                self._lose(worker, arrived)
                count -= 1
            else:
                losses.append(self.apply(arrived))
                self._answer(worker)
        return sum(losses) * self.shares / len(losses) if losses else float("nan")

    def _next(self) -> tuple[int, Tensor | RuntimeError]:
        """A worker's gradient, or the error of its group.

        Raises:
            RuntimeError: if none comes in time.
        """
        for worker in self._steps_left:
            if worker not in self._listeners:
                self._listeners[worker] = threading.Thread(target=self._listen, args=(worker,), daemon=True)
                self._listeners[worker].start()
        until = time.monotonic() + 2 * self.world.timeout_s  # each listener has an error before
        try:
            return self._arrivals.get(timeout=until - time.monotonic())
        except queue.Empty as error:
            raise RuntimeError("no worker was heard of in time") from error

    def _listen(self, worker: int) -> None:
        """Receive from one worker, to its last step; in a thread of its own."""
        try:
            for _ in range(self.preset.steps):
                incoming = torch.empty(sum(self._sizes()) + 1)
                dist.recv(incoming, worker, group=self._groups[worker])
                self._arrivals.put((worker, incoming))
        except RuntimeError as error:
            self._arrivals.put((worker, error))

    def _answer(self, worker: int) -> None:
        self._steps_left[worker] -= 1
        if not self._steps_left[worker]:
            del self._steps_left[worker]
        try:
            dist.send(self.flat_parameters(), worker, group=self._groups[worker])
        except RuntimeError:
            return  # its listener has the same error

    def _lose(self, worker: int, error: RuntimeError) -> None:
        if self.on_loss is None:
            raise error
        if self._steps_left.pop(worker, None) is not None:
            self.on_loss(worker)
