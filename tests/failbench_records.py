"""Records of runs that never were, for tests of what looks at records."""

from __future__ import annotations

from typing import Any

from benchmarks.failbench.cell import NO_FAULT, Cell
from benchmarks.failbench.record import Evidence, InjectedFault, Outcome, Record


def made(cell: str, **values: Any) -> Record:
    """The record of a run of 30 steps of 0.1 s with a fault at step 12, unless told otherwise."""
    which = Cell.parse(cell)
    disturbed = which.trace != NO_FAULT
    defaults: dict[str, Any] = {
        "cell": which,
        "seed": 0,
        "preset": "tiny",
        "world_size": 8,
        "outcome": Outcome.RECOVERED if disturbed else Outcome.UNDISTURBED,
        "evidence": Evidence.MEASURED,
        "steps": 30,
        "step_seconds_before": (0.1,) * 10,
        "losses": tuple(2.0 - 0.01 * step for step in range(30)),
        "weights_sha256": "0" * 64,
        "world_after": 8,
        "detect_timeout_seconds": 1.0,
        "state_bytes_per_rank": 1000,
    }
    if disturbed:
        fault = InjectedFault(kind="kill", rank=3, step=12, planned_s=1.2, actual_s=1.205)
        defaults |= {
            "faults": (fault,),
            "step_seconds_after": (0.1,) * 10,
            "detect_seconds": (0.02,),
            "recover_seconds": (0.5,),
            "throughput_before": 80.0,
            "throughput_after": 80.0,
        }
    return Record(**{**defaults, **values})


def halted(architecture: str, trace: str = "F1", **values: Any) -> Record:
    """Without a mechanism."""
    ended = {
        "steps": 12,
        "step_seconds_after": (),
        "recover_seconds": (),
        "throughput_after": None,
        "weights_sha256": None,
    }
    return made(f"{architecture}/FT9/{trace}", outcome=Outcome.HALTED, **{**ended, **values})


def continued(architecture: str, **values: Any) -> Record:
    """Without a mechanism, and without the lost rank."""
    return made(
        f"{architecture}/FT9/F1", outcome=Outcome.CONTINUED, **{"world_after": 7, "weights_sha256": "1" * 64, **values}
    )


# Mechanism on A2 -> step with it, stall of a save, interval, restore, emergency save; they relate as the paper's do
PAPER_LIKE: dict[str, dict[str, Any]] = {
    "FT1": {"step": 0.1005, "save": 0.005, "every": 10, "restore": 0.155},
    "FT2": {"step": 0.1038, "save": 0.038, "every": 10, "restore": 0.017},
    "FT3": {"step": 0.1010, "save": 0.010, "every": 10, "restore": 0.160},
    "FT4": {"step": 0.1000, "save": None, "every": None, "restore": 0.900, "emergency": 0.885},
    "FT5": {"step": 0.4723, "save": 0.372, "every": 1, "restore": 0.017},
    "FT6": {"step": 0.1060, "save": 0.060, "every": 10, "restore": 0.018},
}


def like(mechanism: str, trace: str = "F1", **values: Any) -> Record:
    """A recovery on A2 whose figures relate as the paper's do."""
    figures = PAPER_LIKE[mechanism]
    taken = {
        "step_seconds_before": (figures["step"],) * 10,
        "save_seconds": (figures["save"],) * 2 if figures["save"] else (),
        "save_interval_steps": figures["every"],
        "restore_seconds": (figures["restore"],),
        "emergency_seconds": (figures["emergency"],) if "emergency" in figures else (),
        "reform_seconds": (2.0,),
        "respawn_seconds": (0.5,),
        "lost_steps": 5,
        "lost_seconds": 0.5,
    }
    return made(f"A2/{mechanism}/{trace}", **{**taken, **values})


def paper_like() -> list[Record]:
    """Records in which every finding of the paper holds, with two seeds."""
    records = []
    for seed in (0, 1):
        same = {"seed": seed}
        records += [halted(name, **same) for name in ("A1", "A2", "A3", "A4", "A5", "A7")]
        records += [continued(name, **same) for name in ("A1-async", "A6")]
        records += [made(f"{name}/FT9/none", **same) for name in ("A1-async", "A2", "A6")]
        records += [like(mechanism, **same) for mechanism in PAPER_LIKE]
        records += [hang(timeout, **same) for timeout in (1.0, 2.0)]
        records.append(made("A5/FT2/F1", save_seconds=(0.06,), save_interval_steps=1, **same))
        records.append(halted("A3", "F2", **same) if seed else made("A6/FT1/F2", **same))
        records.append(made("A3/FT1/F2", outcome=Outcome.HALTED, **same))
        records[-1 - records[::-1].index(continued("A6", **same))] = continued("A6", throughput_after=94.3, **same)
    return records


def hang(timeout: float, **values: Any) -> Record:
    """A2 with a stopped rank, noticed when the timeout had passed."""
    detected = {"detect_timeout_seconds": timeout, "detect_seconds": (timeout + 0.03,)}
    return halted("A2", "hang", **{**detected, **values})
