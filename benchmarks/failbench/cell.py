"""A cell of the matrix: which architecture, with which mechanism, under which trace of faults."""

from __future__ import annotations

from dataclasses import dataclass

# Rows and columns of the paper's Table II, and the traces of section V-B. `A1` is the synchronous parameter server;
# `A1-async`, which section VI measures besides, is a row of its own and not part of the 7 x 9 table.
PAPER_ARCHITECTURES = ("A1", "A2", "A3", "A4", "A5", "A6", "A7")
PAPER_MECHANISMS = ("FT1", "FT2", "FT3", "FT4", "FT5", "FT6", "FT7", "FT8", "FT9")
PAPER_TRACES = ("F1", "F2", "F3")

NO_MECHANISM = "FT9"
NO_FAULT = "none"
# Name -> what happens
TRACES = {
    "F1": "one rank is killed",
    "F2": "ranks r and r + 2 are killed at once",
    "F3": "three ranks are killed, one after the other",
    "hang": "one rank is stopped, and stays so",
    "preempt": "one rank is warned, and killed after a while",
    NO_FAULT: "nothing: the matched run",
}


@dataclass(frozen=True, order=True)
class Cell:
    """What one run measures.

    Args:
        architecture: Name in the registry, such as ``A2``.
        mechanism: Name in the registry, such as ``FT1``.
        trace: One of :data:`TRACES`; ``none`` is the matched run without a fault.
    """

    architecture: str
    mechanism: str
    trace: str

    def __post_init__(self) -> None:
        if self.trace not in TRACES:
            raise ValueError(f"trace={self.trace!r} must be one of {', '.join(TRACES)}")

    def __str__(self) -> str:
        return f"{self.architecture}/{self.mechanism}/{self.trace}"

    @classmethod
    def parse(cls, text: str) -> Cell:
        """The cell of a text such as ``A2/FT1/F1``.

        Raises:
            ValueError: if it has other than three parts, or no such trace.
        """
        parts = text.split("/")
        if len(parts) != 3:
            raise ValueError(f"a cell is ARCHITECTURE/MECHANISM/TRACE such as A2/FT1/F1, got {text!r}")
        return cls(*parts)

    @property
    def undisturbed(self) -> Cell:
        """The same without a fault."""
        return Cell(self.architecture, self.mechanism, NO_FAULT)

    @property
    def baseline(self) -> Cell:
        """Without a mechanism and without a fault."""
        return Cell(self.architecture, NO_MECHANISM, NO_FAULT)
