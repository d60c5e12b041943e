"""Faults that nobody raises in Python, on two nodes: what becomes of the run, and how soon.

``python -m benchmarks.faults --json``: 4 ranks on Gloo in two network namespaces, one run for each fault in each phase of
an update. Needs root. The meaning of each column is in ``docs/benchmarks.md``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.arguments import show
from benchmarks.lab import Lab, enter_node, why_not
from benchmarks.lossy import lose_packets
from benchmarks.training import Regressor, Workload
from lightning_accelpact.recovery import session
from lightning_accelpact.recovery.digest import state_digest
from lightning_accelpact.recovery.fault import Fault, FaultPlan, FaultPoint
from lightning_accelpact.recovery.policy import FAIL_STOP_EXIT_CODE
from lightning_accelpact.strategy import ResilientHSDPStrategy

NODES, SHARD = 2, 2
STRUCK_UPDATE = 3
UPDATES = 8
HEARTBEAT_DEADLINE, REPAIR_BUDGET, COLLECTIVE_TIMEOUT, REBUILD_TIMEOUT = 3.0, 15.0, 12.0, 3.0
_PATIENCE = 75.0  # after this a run counts as hung

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["lightning.pytorch", "benchmarks.training", "benchmarks.lab"])

PHASES = ("forward", "backward", "vote", "boundary", "validation")


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A run that is under way.

    Args:
        lab: The two nodes.
        pids: The ranks' processes; the last one, on the second node, is the victim.
    """

    lab: Lab
    pids: list[int]


Act = Callable[[Scene], None]
_FOREVER = 3600.0


def _cut(seconds: float, **how: Any) -> Act:
    def act(scene: Scene) -> None:
        scene.lab.cut(**how)
        if seconds < _FOREVER:
            time.sleep(seconds)
            scene.lab.mend(how.get("network", "data"))

    return act


def _stop(seconds: float) -> Act:
    def act(scene: Scene) -> None:
        os.kill(scene.pids[-1], signal.SIGSTOP)
        if seconds < _FOREVER:
            time.sleep(seconds)
            try:
                os.kill(scene.pids[-1], signal.SIGCONT)
            except ProcessLookupError:
                pass  # given up meanwhile

    return act


def _both(scene: Scene) -> None:
    scene.lab.cut("data")
    scene.lab.cut("control")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of fault.

    Args:
        act: Does it, from outside; ``None`` if the victim does it to itself.
        own: What the victim does to itself instead.
        expected: What may become of the run: ``bit_exact``, ``fail_stop``.
        harmless: Whether nothing is lost, so that a repair would be a false alarm.
    """

    act: Act | None = None
    own: Callable[[], object] | None = None
    expected: tuple[str, ...] = ("bit_exact",)
    harmless: bool = False


KINDS: dict[str, Kind] = {
    "link cut 2 s": Kind(act=_cut(2.0)),
    "link cut 10 s": Kind(act=_cut(10.0), expected=("bit_exact", "fail_stop")),
    "link cut for ever": Kind(act=_cut(_FOREVER), expected=("fail_stop",)),
    "one direction blocked 2 s": Kind(act=_cut(2.0, nodes=(1,))),
    "one direction blocked for ever": Kind(act=_cut(_FOREVER, nodes=(1,)), expected=("fail_stop",)),
    "data sockets destroyed": Kind(act=lambda scene: scene.lab.destroy_sockets("data")),
    "control sockets destroyed": Kind(
        act=lambda scene: scene.lab.destroy_sockets("control"), expected=("bit_exact", "fail_stop")
    ),
    "both destroyed": Kind(
        act=lambda scene: [scene.lab.destroy_sockets(network) for network in ("data", "control")] and None,
        expected=("bit_exact", "fail_stop"),
    ),
    "both links cut for ever": Kind(act=_both, expected=("fail_stop",)),
    "killed": Kind(act=lambda scene: os.kill(scene.pids[-1], signal.SIGKILL), expected=("fail_stop",)),
    "stopped 1 s": Kind(act=_stop(1.0), harmless=True),
    "stopped 5 s": Kind(act=_stop(5.0), expected=("fail_stop",)),
    "stopped for ever": Kind(act=_stop(_FOREVER), expected=("fail_stop",)),
    "slow": Kind(own=lambda: time.sleep(2.0), harmless=True),
    "lock held 5 s": Kind(own=lambda: ctypes.PyDLL(None).sleep(5), harmless=True),
    "5 % of packets lost": Kind(own=lambda: lose_packets(0.05), harmless=True),
}


# -- a rank


class Validated(Regressor):
    """The measured model, with a validation after every fourth update."""

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.head(self.blocks(self.embed(inputs))), targets)
        self.log("val_loss", loss, sync_dist=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.ones(32, 16), torch.ones(32, 4)), batch_size=4)


class Trigger(pl.Callback):
    """Tells the outside when the victim has come to its phase, and waits there until it has been done.

    Args:
        folder: Where to tell.
        phase: One of ``PHASES``.
        own: What the victim does to itself instead of waiting.
    """

    def __init__(self, folder: Path, phase: str, own: Callable[[], object] | None) -> None:
        self._folder = folder
        self._phase = phase
        self._own = own
        self._done = False
        self.committed: list[float] = []

    def setup(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        trainer.strategy.machine.faults.strike = lambda fault: self._strike(trainer)

    def on_train_batch_end(self, *_: Any) -> None:
        self.committed.append(time.time())

    def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._phase == "validation" and trainer.global_rank == trainer.world_size - 1 and not trainer.sanity_checking:
            self._strike(trainer)

    def _strike(self, trainer: pl.Trainer) -> None:
        if self._done:
            return
        self._done = True
        (self._folder / "struck").write_text(str(time.time()))
        trainer.strategy.machine.faults.struck_at = time.time()
        if self._own is not None:
            self._own()
            return
        deadline = time.monotonic() + 20
        while not (self._folder / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.002)


def train(folder: Path, phase: str, kind: str | None) -> dict[str, Any]:
    """The job of one rank."""
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    points = {} if kind is None or phase == "validation" else {"point": FaultPoint(phase), "update": STRUCK_UPDATE}
    ranks = int(os.environ["WORLD_SIZE"])
    plan = FaultPlan([Fault(rank=ranks - 1, **points)] if points else [])
    trigger = Trigger(folder, phase if kind else "", KINDS[kind].own if kind else None)
    module = Validated(Workload(updates=UPDATES, layers=4, width=32))
    trainer = pl.Trainer(
        accelerator="cpu", devices=ranks // NODES, num_nodes=NODES, max_steps=UPDATES, gradient_clip_val=1.0,
        val_check_interval=4, limit_val_batches=2, num_sanity_val_steps=0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[trigger],
        strategy=ResilientHSDPStrategy(
            replicate=ranks // SHARD, shard=SHARD, faults=plan, goodput=False, repair_budget=REPAIR_BUDGET, collective_timeout=COLLECTIVE_TIMEOUT,
            rebuild_timeout=REBUILD_TIMEOUT, heartbeat_deadline=HEARTBEAT_DEADLINE, max_repairs_per_update=20,
        ),
    )  # fmt: skip
    try:
        trainer.fit(module)
    finally:
        (folder / f"incidents{os.environ['RANK']}").write_text(
            json.dumps([incident.to_dict() for incident in trainer.strategy.incidents])
        )
        (folder / f"committed{os.environ['RANK']}").write_text(json.dumps(trigger.committed))
        (folder / f"ended{os.environ['RANK']}").write_text(str(time.time()))
    return {"digest": state_digest(module, trainer.optimizers)}


def _rank_main(environment: dict[str, str], node: str, folder: str, phase: str, kind: str | None) -> None:
    os.environ.update(environment)
    output = os.open(f"{folder}/output{environment['RANK']}", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    try:
        result = enter_node(node, train, Path(folder), phase, kind)
        Path(folder, f"result{environment['RANK']}").write_text(json.dumps(result))
    finally:
        session.close()  # a forked process runs no exit handlers


# -- a run


def run_cell(lab: Lab, phase: str, kind: str | None, folder: Path, world_size: int) -> dict[str, Any]:
    """One run, with one fault or none, and what became of it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    addresses = {"MASTER_ADDR": lab.address(0, "control"), "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    ranks = [_start(lab, rank, addresses, phase, kind, folder) for rank in range(world_size)]
    try:
        if kind is not None and KINDS[kind].own is None:
            _act_when_told(Scene(lab=lab, pids=[rank.pid for rank in ranks]), KINDS[kind].act, folder, ranks)
        deadline = time.monotonic() + _PATIENCE
        for rank in ranks:
            rank.join(max(0.1, deadline - time.monotonic()))
    finally:
        hung = [number for number, rank in enumerate(ranks) if rank.exitcode is None]
        for rank in ranks:
            if rank.exitcode is None:
                rank.kill()
                rank.join()
        for network in ("data", "control"):
            lab.mend(network)
    return {"phase": phase, "kind": kind, "exit_codes": [rank.exitcode for rank in ranks], "hung": hung}


def _start(
    lab: Lab, rank: int, addresses: dict[str, str], phase: str, kind: str | None, folder: Path
) -> BaseProcess:
    node, local_rank = divmod(rank, int(addresses["WORLD_SIZE"]) // NODES)
    environment = {
        **addresses, "RANK": str(rank), "LOCAL_RANK": str(local_rank), "NODE_RANK": str(node),
        "GLOO_SOCKET_IFNAME": "data", "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }  # fmt: skip
    process = _context.Process(target=_rank_main, args=(environment, lab.name(node), str(folder), phase, kind))
    process.start()
    return process


def _act_when_told(scene: Scene, act: Act, folder: Path, ranks: Sequence[BaseProcess]) -> None:
    deadline = time.monotonic() + 60
    while not (folder / "struck").exists():
        if time.monotonic() > deadline or not all(rank.is_alive() for rank in ranks):
            return
        time.sleep(0.002)
    (folder / "struck").write_text(str(time.time()))
    (folder / "go").touch()
    act(scene)


def judge(cell: dict[str, Any], folder: Path, digests: list[str]) -> dict[str, Any]:
    """Add the outcome and the times to a run."""
    kind, codes = KINDS[cell["kind"]], cell["exit_codes"]
    found = {name: [_read(folder, name, rank) for rank in range(len(codes))] for name in ("result", "incidents", "ended")}
    survivors = [code for code in codes if code != -signal.SIGKILL]
    if cell["hung"]:
        outcome = "hung"
    elif all(code == 0 for code in codes):
        outcome = "bit_exact" if [result["digest"] for result in found["result"]] == digests else "wrong"
    else:
        outcome = "fail_stop" if set(survivors) == {FAIL_STOP_EXIT_CODE} else "wrong"
    incidents = [incident for records in found["incidents"] for incident in records or []]
    struck = float((folder / "struck").read_text()) if (folder / "struck").exists() else None
    seen = [incident["time"] - struck for incident in incidents] if struck else []
    commits = [times for rank in range(len(codes)) if (times := _read(folder, "committed", rank))]
    later = [min((time for time in times if time > struck), default=None) for times in commits] if struck else []
    ended = [end - struck for end in found["ended"] if end is not None] if struck else []
    return {
        **cell,
        "outcome": outcome,
        "as_expected": outcome in kind.expected and struck is not None,
        "false_alarm": kind.harmless and (outcome != "bit_exact" or bool(incidents)),
        "detect_s": round(max(seen), 3) if seen else None,
        "next_commit_s": round(max(later) - struck, 3) if later and None not in later else None,
        "end_s": round(max(ended), 3) if ended and outcome == "fail_stop" else None,
        "repairs": max((incident["number"] for incident in incidents), default=0),
        "redone_micro_batches": sum(incident["redone_micro_batches"] for incident in incidents),
    }


def _read(folder: Path, name: str, rank: int) -> Any:
    file = folder / f"{name}{rank}"
    return json.loads(file.read_text()) if file.exists() and file.stat().st_size else None


def measure(
    *, kinds: Iterable[str], phases: Iterable[str], ranks: int = 4, keep: str | None = None, progress: bool = True
) -> dict[str, Any]:
    """Run every fault in every phase, and count."""
    cells = [(kind, phase) for kind in kinds for phase in phases]
    rows = []
    with Lab() as lab, tempfile.TemporaryDirectory() as scratch:
        root = Path(keep or scratch)
        digests = _undisturbed(lab, root, ranks)
        for number, (kind, phase) in enumerate(track(cells, disable=not progress, console=Console(stderr=True))):
            folder = root / f"{number}"
            folder.mkdir(parents=True)
            rows.append(judge(run_cell(lab, phase, kind, folder, ranks), folder, digests))
    count = {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in ("bit_exact", "fail_stop", "hung", "wrong")}
    return {
        "ranks": ranks,
        "cells": len(rows),
        **count,
        "false_alarms": sum(row["false_alarm"] for row in rows),
        "unexpected": sum(not row["as_expected"] for row in rows),
        "rows": rows,
    }


def _undisturbed(lab: Lab, root: Path, ranks: int) -> list[str]:
    folder = root / "undisturbed"
    folder.mkdir(parents=True)
    cell = run_cell(lab, "", None, folder, ranks)
    if any(cell["exit_codes"]):
        raise RuntimeError(f"the run without a fault failed: {cell}\n{(folder / 'output0').read_text()[-2000:]}")
    return [_read(folder, "result", rank)["digest"] for rank in range(ranks)]


def render(figures: dict[str, Any]) -> Table:
    """The rows as a table for people."""
    title = ", ".join(f"{value} {name}" for name, value in figures.items() if name != "rows")
    table = Table("fault", "phase", "outcome", "detect s", "next commit s", "end s", "repairs", "redone", title=title)
    for row in figures["rows"]:
        mark = "" if row["as_expected"] and not row["false_alarm"] else " (!)"
        cells = [row[name] for name in ("detect_s", "next_commit_s", "end_s", "repairs", "redone_micro_batches")]
        shown = ["" if cell is None else str(cell) for cell in cells]
        table.add_row(row["kind"], row["phase"], row["outcome"] + mark, *shown)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if a run hung, ended wrong, or otherwise than it may, or a repair was a false alarm."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__.partition("\n")[0])
    parser.add_argument("--kind", action="append", choices=sorted(KINDS), help="only this fault; may be repeated")
    parser.add_argument("--phase", action="append", choices=PHASES, help="only this phase; may be repeated")
    parser.add_argument("--ranks", type=int, default=4, help="processes, a multiple of 4 (default 4)")
    parser.add_argument("--keep", metavar="FOLDER", help="keep what the ranks wrote, for a look at it")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    if reason := why_not():
        parser.error(reason)
    if options.ranks < 4 or options.ranks % 4:
        parser.error(f"--ranks {options.ranks} must be a multiple of 4: two nodes, and sharding groups of two")
    figures = measure(kinds=options.kind or KINDS, phases=options.phase or PHASES, ranks=options.ranks, keep=options.keep)
    show(figures, render(figures), options.json)
    return int(bool(figures["hung"] + figures["wrong"] + figures["false_alarms"] + figures["unexpected"]))


if __name__ == "__main__":
    raise SystemExit(main())
