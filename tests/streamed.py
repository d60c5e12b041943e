"""A double of a backend with streams, on Gloo: an all-reduce goes on after its call, and is late."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import jobs
import torch

from lightning_accelpact.recovery import c10d
from lightning_accelpact.recovery.c10d import Collective
from lightning_accelpact.recovery.communicator import CommunicatorLost, GlooLinks
from lightning_accelpact.recovery.session import Session

DELAY_S = 0.02


class Late:
    """An all-reduce under way: until it has ended, and is late enough, its result is not a number."""

    def __init__(self, collective: Collective) -> None:
        self._outputs = collective.outputs
        self._results = [tensor.clone() for tensor in collective.inputs]
        for output in self._outputs:
            output.data.fill_(torch.nan)
        self._due = time.monotonic() + DELAY_S
        self._work = collective.begin(c10d.current(collective.group), self._results, self._results)
        self._written = False

    def is_completed(self) -> bool:
        ended = time.monotonic() >= self._due and self._work.is_completed()
        if ended and not self._written and self.is_success():
            self._written = True
            for output, result in zip(self._outputs, self._results, strict=True):
                output.data.copy_(result)
        return ended

    def is_success(self) -> bool:
        return self._work.is_completed() and self._work.exception() is None


class StreamedGlooLinks(GlooLinks):
    """Gloo's links; only what FSDP would read on the host is finished when its call returns."""

    synchronous = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._woken = False
        c10d.make_waits_interruptible(lambda: self._down or self._woken)

    @property
    def down(self) -> bool:
        return self._down

    def watch(self) -> None:
        super().watch()
        self._woken = False

    def wake(self) -> None:
        self._woken = True

    def check(self) -> None:
        if not self.healthy():
            raise CommunicatorLost("a link is down")

    def settle(self) -> None:
        if self._woken:
            raise CommunicatorLost("the wait was interrupted")

    def begin(self, collective: Collective) -> Late:
        return Late(collective)

    def mark(self) -> Callable[[], bool]:
        return lambda: True


@contextmanager
def streamed_links() -> Iterator[None]:
    """Sessions opened inside have the double's links."""

    def links(session: Session, backend: str, endpoint: Any, rebuild_timeout: Any, silence: float) -> GlooLinks:
        return StreamedGlooLinks(ignored_ports=(endpoint.port,), silence=silence)

    with patch.object(Session, "_links", links):
        yield


def fit_with(options: dict[str, Any]) -> dict[str, Any]:
    """:func:`jobs.fit` on the double."""
    with streamed_links():
        return jobs.fit_with(options)
