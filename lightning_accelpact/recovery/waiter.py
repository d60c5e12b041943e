"""Threads that wait in the place of others: for waits that cannot be cut into slices and have to be given up all the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

INTERRUPTED = "the collective was interrupted: its links are down"
_SLICE_S = 0.025


class Waiter:
    """A thread that waits in the place of others, one wait at a time; it outlives a wait that is given up.

    Not an executor of the standard library: that would join its threads when the interpreter exits.
    """

    _idle: ClassVar[list[Waiter]] = []
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
        while not wait.ended.wait(_SLICE_S):
            if interrupted():
                raise dist.DistBackendError(INTERRUPTED)
        if wait.error is not None:
            raise wait.error
        return wait.value


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
