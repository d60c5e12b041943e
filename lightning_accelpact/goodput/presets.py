"""Published failure figures and workloads, with their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lightning_accelpact.goodput.failures import FailureClass, Failures
from lightning_accelpact.goodput.ranges import Range

# Unexpected interruptions of Llama 3 405B by root cause. The counts, since the percentages beside them do not add up.
LLAMA_3_COUNTS: Mapping[str, int] = MappingProxyType(
    {
        "faulty GPU": 148, "GPU HBM3 memory": 72, "software bug": 54, "network switch or cable": 35,
        "unplanned host maintenance": 32, "GPU SRAM memory": 19, "GPU system processor": 17, "NIC": 7,
        "NCCL watchdog timeout": 7, "silent data corruption": 6, "GPU thermal interface and sensor": 6, "SSD": 3,
        "power supply": 3, "server chassis": 2, "IO expansion board": 2, "dependency": 2, "CPU": 2, "system memory": 2,
    }
)  # fmt: skip
LLAMA_3_DAYS = 54
LLAMA_3_GPUS = 16_384

# After these no process is lost (a NIC may also take its node along: counted here, the papers do the same)
_NETWORK = ("network switch or cable", "NIC", "NCCL watchdog timeout")
# After these no rank's state can be trusted, or every rank meets the same error again
_JOB = ("software bug", "dependency", "silent data corruption")


def _llama_3_shares() -> dict[FailureClass, float]:
    total = sum(LLAMA_3_COUNTS.values())
    network = sum(LLAMA_3_COUNTS[cause] for cause in _NETWORK) / total
    job = sum(LLAMA_3_COUNTS[cause] for cause in _JOB) / total
    return {FailureClass.NETWORK: network, FailureClass.NODE: 1 - network - job, FailureClass.JOB: job}


LLAMA_3 = Failures(
    name="llama3",
    source="Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 GPUs (arXiv 2407.21783, Table 5; classes"
    " assigned here by cause)",
    per_gpu_day=sum(LLAMA_3_COUNTS.values()) / LLAMA_3_DAYS / LLAMA_3_GPUS,
    shares=_llama_3_shares(),
)

_RSC = "arXiv 2410.21680, nodes of 8 GPUs; its classes are not comparable, so Llama 3's shares are assumed"
RSC_1 = Failures(
    name="rsc1",
    # 7.9 h between failures at 1,024 GPUs is 23.7 per 1,000 node-days: users' jobs also fail otherwise
    source=f"Meta RSC-1: 6.50 failures per 1,000 node-days; up to the 7.9 h measured at 1,024 GPUs ({_RSC})",
    per_gpu_day=Range(low=6.50e-3 / 8, likely=6.50e-3 / 8, high=24 / 7.9 / 1024),
    shares=LLAMA_3.shares,
)
RSC_2 = Failures(
    name="rsc2",
    source=f"Meta RSC-2: 2.34 failures per 1,000 node-days ({_RSC})",
    per_gpu_day=2.34e-3 / 8,
    shares=LLAMA_3.shares,
)
INFINITE_HBD = Failures(
    name="infinitehbd",
    source="InfiniteHBD's published trace: 584 faults of 400 servers in 349 days, in bursts; 8 GPUs a server and"
    " Llama 3's shares are assumed",
    per_gpu_day=584 / 400 / 349 / 8,
    shares=LLAMA_3.shares,
    variation=1.48,
)
FAILURES: Mapping[str, Failures] = MappingProxyType({one.name: one for one in (LLAMA_3, RSC_1, RSC_2, INFINITE_HBD)})


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A published training job.

    Args:
        name: What it is called.
        source: Where the figures are from.
        gpus: How many it runs on.
        replica_gpus: GPUs that hold one replica of the state.
        update_s: Seconds per update.
        state_gb: Size of a checkpoint of the whole state, in GB (1e9 bytes).
        checkpoint_gb_s: What all ranks together write, in GB a second.
    """

    name: str
    source: str
    gpus: int
    replica_gpus: int
    update_s: float
    state_gb: float
    checkpoint_gb_s: float


PAPER_16 = Workload(
    name="paper16",
    source="the AccelPact paper's Mistral-7B on 16 GPUs: 220 s an update, 43.6 GB a node, each of which holds a replica"
    " and writes it at 1.70 GB/s",
    gpus=16,
    replica_gpus=4,
    update_s=220.0,
    state_gb=43.6,
    checkpoint_gb_s=1.70,
)
LLAMA_3_405B = Workload(
    name="llama3-405b",
    source="Llama 3 405B (arXiv 2407.21783): 16 Mi tokens an update at 400 TFLOP/s a GPU (6 x 405e9 FLOP a token), storage"
    " that sustains 2 TB/s; 16 bytes of state a parameter and replicas of 128 GPUs are assumed",
    gpus=LLAMA_3_GPUS,
    replica_gpus=128,
    update_s=6 * 405e9 * 2**24 / (400e12 * LLAMA_3_GPUS),
    state_gb=405 * 16,
    checkpoint_gb_s=2000.0,
)
WORKLOADS: Mapping[str, Workload] = MappingProxyType({one.name: one for one in (PAPER_16, LLAMA_3_405B)})

# The paper's own measurements: 16 GPUs, NCCL
PAPER_REPAIR_S = Range(low=0.672, likely=0.77, high=0.930)
PAPER_GUARD = Range(low=-0.00412, likely=0.002, high=0.002)
# Share of communication failures that strike between two updates, where the paper's method can act
PAPER_BOUNDARY = Range(low=0.02, likely=0.06, high=0.10)
