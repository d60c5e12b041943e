"""The ways to survive failures that are compared. What they are assumed to cost is in docs/goodput.md."""

from __future__ import annotations

from lightning_accelpact.goodput.failures import FailureClass
from lightning_accelpact.goodput.method import Handling, Method
from lightning_accelpact.goodput.plan_inputs import PlanInputs

# By how much native cached-process staging slows training down while it writes (the AccelPact paper: 17.96 %)
_ASYNC_SLOWDOWN = 0.1796
# A restart inside of the processes with NVRx, and torchft's answer to a lost link and to a lost process: as measured on
# one machine (NVRx 0.4.1 with a collective timeout of 10 s; torchft 0.2.0 with its defaults)
_IN_JOB_RESTART_S = 12.0
_TORCHFT_LINK_S = 0.1
_TORCHFT_LOSS_S = 5.0
# After this AccelPact counts a silent rank as lost (its default)
_HEARTBEAT_S = 3.0
# The paper's bound for a safe rejection
_REJECT_S = 0.1
# A fault strikes an update in its middle, on average
_HALF_UPDATE = 0.5


def methods(inputs: PlanInputs) -> list[Method]:
    """All of them, at the likely values of the inputs; the cold restart is the first.

    All but the asynchronous one write synchronous checkpoints, so that they differ in their recovery alone.
    """
    one = inputs.at_likely()
    return [
        Method(
            name="cold restart",
            note="the whole job again from its last checkpoint",
            checkpoint_s=_write_s(one),
            handling=_cold(one),
        ),
        _async_checkpoint(one),
        Method(
            name="in-job restart",
            note="NVRx: processes stay, state is reloaded",
            checkpoint_s=_write_s(one),
            handling=_restarts(_IN_JOB_RESTART_S + _write_s(one)),
        ),
        _torchft(one),
        _paper(one),
        _ours(one, "AccelPact", "repairs links anywhere, bit for bit; a lost process restarts the job", {}),
        _ours(one, "AccelPact + HEAL", "as designed: also replaces lost processes, bit for bit", _heal(one)),
    ]


def _async_checkpoint(one: PlanInputs) -> Method:
    write_s = _write_s(one)
    return Method(
        name="async checkpoint",
        note="staged to the host, written while training goes on 18 % slower",
        checkpoint_s=_per_gpu_gb(one) / one.staging_gb_s + _ASYNC_SLOWDOWN * write_s,
        lag_s=write_s,
        shortest_interval_s=write_s,
        handling=_cold(one),
    )


def _torchft(one: PlanInputs) -> Method:
    """The other replicas go on while a lost one is replaced."""
    link = Handling(in_memory=1.0, repair_s=_TORCHFT_LINK_S, repeated_s=_half_update(one))
    loss_s = _TORCHFT_LOSS_S + _rejoin_s(one) / _replicas(one)
    loss = Handling(in_memory=1.0, repair_s=loss_s, repeated_s=_half_update(one))
    survived = {FailureClass.NETWORK: link, FailureClass.NODE: loss} if _replicas(one) > 1 else {}
    return Method(
        name="torchft-like",
        note="replicas leave and join; a failure drops a batch, results differ",
        checkpoint_s=_write_s(one),
        handling={**_cold(one), **survived},
    )


def _paper(one: PlanInputs) -> Method:
    boundary = Handling(
        in_memory=one.boundary_share, repair_s=one.repair_s, restart_s=_REJECT_S + one.relaunch_s + _write_s(one)
    )
    return Method(
        name="paper's L1",
        note="repairs links between two updates alone",
        checkpoint_s=_write_s(one),
        overhead=one.paper_guard,
        handling={**_cold(one), FailureClass.NETWORK: boundary},
    )


def _ours(one: PlanInputs, name: str, note: str, healed: dict[FailureClass, Handling]) -> Method:
    link = Handling(in_memory=1.0, repair_s=one.repair_s, repeated_s=_half_update(one))
    restarts = _restarts(_HEARTBEAT_S + one.relaunch_s + _write_s(one))
    return Method(
        name=name,
        note=note,
        checkpoint_s=_write_s(one),
        overhead=one.guard_s / one.update_s,
        handling={**restarts, FailureClass.NETWORK: link, **healed},
    )


def _heal(one: PlanInputs) -> dict[FailureClass, Handling]:
    """All ranks wait for the replacement."""
    heal = Handling(in_memory=1.0, repair_s=_HEARTBEAT_S + _rejoin_s(one), repeated_s=_half_update(one))
    return {FailureClass.NODE: heal} if _replicas(one) > 1 else {}


def _cold(one: PlanInputs) -> dict[FailureClass, Handling]:
    reload_s = one.relaunch_s + _write_s(one)
    hang = Handling(restart_s=one.hang_s + reload_s)
    return {**_restarts(one.notice_s + reload_s), FailureClass.NETWORK: hang}


def _restarts(seconds: float) -> dict[FailureClass, Handling]:
    """Every failure ends in a restart that takes so long."""
    return dict.fromkeys(FailureClass, Handling(restart_s=seconds))


def _write_s(one: PlanInputs) -> float:
    """To write a checkpoint, and to read it."""
    return one.state_gb / one.checkpoint_gb_s


def _per_gpu_gb(one: PlanInputs) -> float:
    return one.state_gb / one.replica_gpus


def _rejoin_s(one: PlanInputs) -> float:
    """Until a replacement has joined and taken its state over."""
    return one.replace_s + _per_gpu_gb(one) / one.transfer_gb_s


def _replicas(one: PlanInputs) -> int:
    return one.gpus // one.replica_gpus


def _half_update(one: PlanInputs) -> float:
    return _HALF_UPDATE * one.update_s
