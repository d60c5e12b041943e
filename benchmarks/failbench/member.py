"""A member: one process of the training, from its start to its end or loss."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.failbench import registry
from benchmarks.failbench.architectures.architecture import Architecture
from benchmarks.failbench.cell import Cell
from benchmarks.failbench.control import Control
from benchmarks.failbench.injector import Injector
from benchmarks.failbench.messages import (
    Done,
    Failed,
    Form,
    Leave,
    Left,
    LostPeer,
    Ready,
    Restored,
    StepLog,
    Stop,
    Warned,
)
from benchmarks.failbench.preset import Preset
from benchmarks.failbench.record import InjectedFault
from benchmarks.failbench.world import World, leave_groups, shut_links
from lightning_accelpact.recovery.uncaught import park_gloo_threads


@dataclass(frozen=True, kw_only=True)
class Seat:
    """What a member has to know when it starts.

    Args:
        member: Its number.
        cell: What is measured.
        preset: Sizes.
        seed: Of everything random.
        faults: That have not struck yet.
        offset_s: How far into their step they strike, seconds.
        store_port: Of the coordinator's store.
        folder: On a disk that all share.
    """

    member: int
    cell: Cell
    preset: Preset
    seed: int
    faults: tuple[InjectedFault, ...]
    offset_s: float
    store_port: int
    folder: Path


def main(seat: Seat, connection: Connection) -> None:
    """Run a member; the entry of its process, which this ends."""
    torch.set_num_threads(1)
    park_gloo_threads()  # a peer that is killed must not end this process, too
    control = Control(connection, store_port=seat.store_port, patience_s=seat.preset.deadline_s)
    try:
        Member(seat, control).run()
    except Exception:  # whatever it is, the coordinator has to know, or it would wait for this member
        control.tell(Failed(traceback.format_exc()))
    os._exit(0)  # the destructors of groups whose peers are gone may wait for them


class Member:
    """Takes part in one formation after the other.

    Args:
        seat: What to do.
        control: Connection to the coordinator.
    """

    def __init__(self, seat: Seat, control: Control) -> None:
        self._seat = seat
        self._control = control
        self._architecture = registry.architecture(seat.cell.architecture)
        mechanism = registry.mechanism(seat.cell.mechanism)
        self._mechanism = mechanism(member=seat.member, interval=seat.preset.interval, folder=seat.folder)
        self._store = dist.TCPStore("127.0.0.1", seat.store_port, is_master=False)
        self._injector = Injector(
            seat.faults,
            member=seat.member,
            last_step=seat.preset.steps - 1,
            offset_s=seat.offset_s,
            store=self._store,
            announce=control.tell,
        )
        self._log: list[StepLog] = []
        self._emergency: list[float] = []

    def run(self) -> None:
        """Until the coordinator says stop.

        Raises:
            queue.Empty: if it says nothing in time.
        """
        self._control.tell(Ready(time.monotonic()))
        form: Form | None = None
        answered = -1
        while not isinstance(order := self._control.order(), Stop):
            if isinstance(order, Form):
                form = order
                if self._seat.member in form.members:
                    error = self._train_until_loss(form)
                    if error is not None:
                        answered = form.generation
                        self._leave(form, error)
            elif isinstance(order, Leave) and form is not None and answered < order.generation:
                answered = order.generation
                self._leave(form, "")

    def _train_until_loss(self, form: Form) -> str | None:
        """Train to the end, or until a peer is lost: then the error that told so."""
        try:
            self._train(form)
        except (RuntimeError, TimeoutError):
            if form.generation == 0 and not hasattr(self._mechanism, "architecture"):
                raise  # nobody has been struck yet
            return traceback.format_exc()
        return None

    def _train(self, form: Form) -> None:
        seat, mechanism = self._seat, self._mechanism
        architecture = self._take_part(form)
        for step in range(architecture.state().step, seat.preset.steps):
            begin = time.monotonic()
            if self._injector.at(step) and mechanism.needs_warning:
                self._control.tell(Warned(step))
                self._control.await_proceed()
            loss = architecture.step()
            done = time.monotonic()
            saved = mechanism.after_step(step + 1)
            end = time.monotonic()
            self._log.append(StepLog(step, begin, end, loss, architecture.batch, end - done if saved else 0.0))
            self._heed_warning(step + 1)
        architecture.finish()
        mechanism.close()
        state = architecture.state()
        self._control.tell(
            Done(form.generation, state.weights_sha256(), state.bytes, tuple(self._log), tuple(self._emergency))
        )

    def _take_part(self, form: Form) -> Architecture:
        """Form groups, make the model, restore."""
        seat, mechanism = self._seat, self._mechanism
        world = World(form.members, seat.member, form.generation, seat.preset.detect_timeout_s)
        world.form(self._store)
        on_loss = self._on_loss(world) if self._architecture.degrades and not mechanism.recovers else None
        architecture = self._architecture(
            world, seat.preset, seat.seed, batch=self._batch() if mechanism.keeps_batch else None, on_loss=on_loss
        )
        mechanism.attach(architecture)
        formed = time.monotonic()
        reason, fresh, restored = "", False, formed
        if form.reports:
            plan = mechanism.plan(self._architecture, form.members, form.reports)
            reason, fresh = plan.reason, plan.fresh
            if not fresh:
                mechanism.restore(plan)
            architecture.synchronize()
            restored = time.monotonic()
            mechanism.protect()
        step = architecture.state().step
        self._control.tell(Restored(form.generation, formed, restored, step, reason, fresh))
        return architecture

    def _batch(self) -> int:
        """What the whole world shared at the start."""
        preset, architecture = self._seat.preset, self._architecture
        return architecture.workload(preset, self._seat.seed).batch * architecture.contributors(preset.ranks)

    def _on_loss(self, world: World) -> Callable[[int], None]:
        return lambda rank: self._control.tell(LostPeer(world.members[rank], time.monotonic()))

    def _heed_warning(self, step: int) -> None:
        warning = self._control.warning
        if warning is None or step < warning.step:
            return
        self._control.warning = None
        began = time.monotonic()
        self._mechanism.save()
        self._emergency.append(time.monotonic() - began)
        self._mechanism.hold(warning.victims)

    def _leave(self, form: Form, error: str) -> None:
        """Leave the groups, so that peers who wait for this one know, too, and report."""
        now = time.monotonic()
        notice = self._control.left_at
        shut_links(self._seat.store_port)
        leave_groups()
        noticed = bool(error) and (notice is None or now < notice)
        known = now if notice is None else min(now, notice)
        holds = hasattr(self._mechanism, "architecture")  # else its first groups did not come about
        report = self._mechanism.report() if holds else None
        size = self._mechanism.architecture.state().bytes if holds else 0
        self._control.tell(
            Left(form.generation, known, noticed, error, report, size, tuple(self._log), tuple(self._emergency))
        )
