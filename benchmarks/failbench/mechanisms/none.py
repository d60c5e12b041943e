"""FT9: no mechanism."""

from __future__ import annotations

from benchmarks.failbench.mechanisms.mechanism import Mechanism


class NoMechanism(Mechanism):
    """The control: it saves nothing and restores nothing, so an architecture shows what it does by itself."""

    recovers = False
