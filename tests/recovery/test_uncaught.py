"""An error that leaves a thread of Gloo's own, thrown for real: the process goes on; with any other error it does not."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import ctypes, signal, sys, threading, time
import torch
from lightning_accelpact.recovery import uncaught

uncaught.park_gloo_threads()
uncaught.park_gloo_threads()
runtime = ctypes.CDLL("libstdc++.so.6")
allocate = getattr(runtime, "__cxa_allocate_exception")
allocate.restype, allocate.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
throw = getattr(runtime, "__cxa_throw")
throw.argtypes = [ctypes.c_void_p] * 3
name = ctypes.create_string_buffer(sys.argv[1].encode())
known = (ctypes.c_void_p * 3).in_dll(runtime, "_ZTISt9bad_alloc")
likeness = (ctypes.c_void_p * 3)(known[0], ctypes.addressof(name), known[2])  # a std::type_info with another name
number = ctypes.addressof(ctypes.c_void_p.in_dll(runtime, "_ZTIi"))
thrown = number if sys.argv[1] == "int" else ctypes.addressof(likeness)
threading.Thread(target=lambda: throw(allocate(64), thrown, None), daemon=True).start()
until = time.monotonic() + 20
while not uncaught.parked_threads() and time.monotonic() < until:
    time.sleep(0.01)
print("alive,", uncaught.parked_threads(), "parked", flush=True)
"""


def thrown(name: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", SCRIPT, name], check=False, capture_output=True, text=True, timeout=120)


def test_a_thread_that_an_error_of_gloo_leaves_is_parked() -> None:
    result = thrown("N4gloo11IoExceptionE")
    assert (result.returncode, result.stdout) == (0, "alive, 1 parked\n"), result.stderr


def test_any_other_error_ends_the_process() -> None:
    result = thrown("int")
    assert (result.returncode, result.stdout) == (-6, ""), result.stderr
    assert "terminate called after throwing an instance of 'int'" in result.stderr
