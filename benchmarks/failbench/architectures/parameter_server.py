"""A1: parameter server, with a barrier and without."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.failbench.architectures.architecture import Architecture
from benchmarks.failbench.world import post

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
            self.synchronize()
            return loss
        loss = self.backward()
        post(self.flat_gradients(loss), _SERVER)
        self.prepared()
        self.synchronize()
        self.roll_forward()
        return loss

    def optimize(self) -> None:
        if self.serves:
            super().optimize()

    def synchronize(self) -> None:
        """All workers take the server's parameters."""
        parameters = self.flat_parameters()
        if self.serves:
            for worker in self.workers:
                post(parameters, worker)
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

    Each worker has a link of its own to the server, which goes on without those whose link fails. A step of the server
    is as many gradients as there are workers.
    """

    degrades = True

    def build(self) -> None:
        super().build()
        if not self.serves:
            self._link = self.world.link(_SERVER)
            return
        self._links = {worker: self.world.link(worker) for worker in self.workers}
        self._to_come: dict[int, int] = {}
        self._arrivals: queue.Queue[tuple[int, Tensor | RuntimeError]] = queue.Queue()

    def step(self) -> float:
        if self.serves:
            loss = self._serve()
            self.commit(self._committed + 1)
            return loss
        # Like the synchronous one's, gradients are of the mean over the batch of all: a round of them goes as far
        loss = self.backward()
        self._link.post(self.flat_gradients(loss))
        parameters = self.flat_parameters()
        self._link.receive(parameters)
        self.set_parameters(parameters)
        self.commit(self._committed + 1)
        return loss

    def roll_forward(self) -> None:
        """Several gradients make a step of the server: they are committed together."""
        self.optimize()

    def finish(self) -> None:
        """Serve those that are behind."""
        while self.serves and self._to_come:
            self._serve()

    def _serve(self) -> float:
        """Take a gradient for each worker that is left, whichever they come from.

        Returns:
            The mean loss over their samples.
        """
        self.skip()
        if self._committed < self.preset.steps and not self._to_come:
            self._listen_to_all()
        losses: list[float] = []
        while self._to_come and len(losses) < len(self._to_come):
            worker, arrived = self._next()
            if isinstance(arrived, RuntimeError):
                self._lose(worker, arrived)
            else:
                losses.append(self.apply(arrived))
                self._answer(worker)
        return sum(losses) * self.shares / max(1, len(losses))

    def _listen_to_all(self) -> None:
        self._to_come = dict.fromkeys(self._links, self.preset.steps - self._committed)
        for worker, count in self._to_come.items():
            threading.Thread(target=self._listen, args=(worker, count), daemon=True).start()

    def _listen(self, worker: int, count: int) -> None:
        """Receive so many gradients from one worker; in a thread of its own."""
        try:
            for _ in range(count):
                incoming = torch.empty(sum(self._sizes()) + 1)
                self._links[worker].receive(incoming)
                self._arrivals.put((worker, incoming))
        except RuntimeError as error:
            self._arrivals.put((worker, error))

    def _next(self) -> tuple[int, Tensor | RuntimeError]:
        """A worker's gradient, or the error of its link.

        Raises:
            RuntimeError: if none comes in time.
        """
        try:
            return self._arrivals.get(timeout=2 * self.world.timeout_s)  # each link has an error before
        except queue.Empty as error:
            raise RuntimeError("no worker was heard of in time") from error

    def _answer(self, worker: int) -> None:
        try:
            self._links[worker].post(self.flat_parameters())
        except RuntimeError:
            return  # its listener has the same error, unless that was its last gradient
        finally:
            self._to_come[worker] -= 1
            if not self._to_come[worker]:
                del self._to_come[worker]

    def _lose(self, worker: int, error: RuntimeError) -> None:
        if self.on_loss is None:
            raise error
        if self._to_come.pop(worker, None) is not None:
            self.on_loss(worker)
