"""The short form of the qualification, which a run does by itself on a new stack: one process, forks, some seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

from lightning_accelpact.qualification.outcome import die_with_parent
from lightning_accelpact.qualification.qualify import SHORT, Form, devices_here, failed, qualify
from lightning_accelpact.qualification.world import LocalWorld, strip_launcher
from lightning_accelpact.recovery.envelope import Entry
from lightning_accelpact.recovery.stack import Stack

_DEADLINE_S = 150.0


def short_form(stack: Stack, *, device_type: str) -> Entry:
    """Qualify a stack from within a run, in a process of its own: this one has threads, and may hold a device.

    Args:
        stack: This process's.
        device_type: Type of the devices.

    Returns:
        The entry; one without actions, which says why, if the process has hung or died.
    """
    task = json.dumps({"stack": stack.to_dict(), "device_type": device_type})
    process = subprocess.Popen(
        [sys.executable, "-m", "lightning_accelpact.qualification.short", task],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=strip_launcher(os.environ),
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=_DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return failed(stack, SHORT, f"hung: still there after {_DEADLINE_S:g} s, and killed then")
    if process.returncode:
        return failed(stack, SHORT, f"ended with exit code {process.returncode}: {errors.strip().splitlines()[-1:]}")
    return Entry.from_dict(json.loads(output.splitlines()[-1]))


def _main(task: dict[str, Any]) -> None:
    die_with_parent()
    stack, device_type = Stack.from_dict(task["stack"]), task["device_type"]
    form = Form.short(stack.backend)
    entry = qualify(stack, device_type, make_world=LocalWorld, devices=devices_here(device_type), form=form)
    print(json.dumps(entry.to_dict()))


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
