"""What Gloo throws in a thread of its own, where nobody catches it: C++ then ends the process.

Gloo's event loop answers a notification with a write in the same thread (``Pair::handleRemotePendingRecv``). If the
connection fails right then, with anything but a reset (it was destroyed or aborted by the kernel, or timed out), the
error leaves the thread (``Pair::sendAsyncMode``). Whoever waits for the collective has been told by then, so the process
can go on without that thread: it is parked for ever, with its group, which a repair replaces.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from typing import Any

log = logging.getLogger("accelpact")

_GLOO_ERROR = b"N4gloo11IoExceptionE"  # gloo::IoException
_Handler = ctypes.CFUNCTYPE(None)
_installed: list[Any] = []  # kept alive
_parked: list[int] = []


def parked_threads() -> int:
    """How many of Gloo's threads have been parked so far."""
    return len(_parked)


def park_gloo_threads() -> None:
    """From now on park a thread that Gloo's errors would leave, instead of ending the process. Once per process."""
    if _installed:
        return
    try:
        runtime = ctypes.CDLL("libstdc++.so.6")
        set_terminate = runtime._ZSt13set_terminatePFvvE
        current_type = getattr(runtime, "__cxa_current_exception_type")
    except (OSError, AttributeError) as error:
        log.warning("a destroyed connection may end a process on Gloo: the C++ runtime cannot be asked (%s)", error)
        return
    set_terminate.restype = current_type.restype = ctypes.c_void_p
    set_terminate.argtypes, current_type.argtypes = [_Handler], []

    def handler() -> None:
        if _name(current_type()) == _GLOO_ERROR:
            _parked.append(threading.get_native_id())
            threading.Event().wait()  # its caller's locks are held, and returning would abort
        previous()

    kept = _Handler(handler)
    previous = _Handler(set_terminate(kept))
    _installed.extend([kept, previous])


def _name(type_info: int | None) -> bytes:
    """The mangled name in a ``std::type_info``: what follows its table of virtual functions."""
    if not type_info:
        return b""
    pointer = ctypes.c_char_p.from_address(type_info + ctypes.sizeof(ctypes.c_void_p))
    return (pointer.value or b"").lstrip(b"*")
