"""A member's connection to the coordinator."""

from __future__ import annotations

import queue
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.failbench.messages import Confirmed, Form, Heard, Leave, Proceed, Warn
from benchmarks.failbench.world import shut_links


class Control:
    """Listens in a thread, so that it can wake a main thread that waits for a lost peer.

    Args:
        connection: To the coordinator.
        store_port: Of the store, whose connections are never shut.
        patience_s: How long to wait for an order, seconds.
    """

    def __init__(self, connection: Connection, *, store_port: int, patience_s: float) -> None:
        self._connection = connection
        self._store_port = store_port
        self._patience = patience_s
        self._sending = threading.Lock()
        self._orders: queue.Queue[Any] = queue.Queue()
        self._proceed = threading.Event()
        self._generation = -1
        self.left_at: float | None = None
        self.warning: Warn | None = None
        threading.Thread(target=self._listen, daemon=True).start()

    def tell(self, message: Any) -> None:
        """Send to the coordinator; from any thread."""
        with self._sending:
            self._connection.send(message)

    def order(self) -> Any:
        """The next order.

        Raises:
            queue.Empty: if none comes in time.
        """
        return self._orders.get(timeout=self._patience)

    def await_proceed(self) -> None:
        """Wait until all members know of this one's warning.

        Raises:
            TimeoutError: if the coordinator does not say so in time.
        """
        if not self._proceed.wait(self._patience):
            raise TimeoutError(f"not all members confirmed the warning within {self._patience:g} s")
        self._proceed.clear()

    def _listen(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                return  # the coordinator is gone; the main thread's patience ends the process
            if isinstance(message, Form):
                self._generation, self.left_at, self.warning = message.generation, None, None
            if isinstance(message, Warn):
                self.warning = self.warning or message  # a save that is due already serves the next fault, too
                self.tell(Confirmed())
            elif isinstance(message, Proceed):
                self._proceed.set()
            else:
                self._orders.put(message)
            if isinstance(message, Leave) and message.generation == self._generation:
                self.left_at = time.monotonic()
                self.tell(Heard(message.generation))
                shut_links(self._store_port)
