"""One rank's goodput as a file of OpenMetrics text, which Prometheus' node exporter passes on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


class MetricsFile:
    """The file ``accelpact-rank<rank>.prom``, replaced as a whole each time.

    The node exporter reads every ``*.prom`` of its ``--collector.textfile.directory`` at each scrape. A reader never
    sees half a file: it is written beside and renamed.

    Args:
        folder: Where; made if missing.
        rank: Global rank.
    """

    def __init__(self, folder: Path, *, rank: int) -> None:
        self.path = folder / f"accelpact-rank{rank}.prom"

    @staticmethod
    def require() -> None:
        """Check that it can be written.

        Raises:
            ModuleNotFoundError: without prometheus-client.
        """
        if find_spec("prometheus_client") is None:
            raise ModuleNotFoundError(
                "metrics_dir needs prometheus-client, which is not installed: pip install"
                " 'lightning-accelpact[metrics]', or leave metrics_dir None"
            )

    def write(self, record: Mapping[str, Any], updates: int) -> None:
        """Replace the file.

        Args:
            record: Of :meth:`~.account.GoodputAccount.record`.
            updates: Committed since the beginning of the run, as far as is known.

        Raises:
            OSError: if it cannot be written.
        """
        from prometheus_client import CollectorRegistry
        from prometheus_client.openmetrics.exposition import generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(record, updates))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(f".{os.getpid()}.tmp")  # not *.prom, which would be read
        beside.write_bytes(generate_latest(registry))
        beside.replace(self.path)


class _Families:
    """A collector of the families of one rank."""

    def __init__(self, record: Mapping[str, Any], updates: int) -> None:
        self._record = record
        self._updates = updates

    def collect(self) -> Iterable[Metric]:
        """The families."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        record, rank = self._record, str(self._record["rank"])
        seconds = CounterMetricFamily(
            "accelpact_time_seconds", "Seconds of this attempt by what they were spent on.", labels=["rank", "class"]
        )
        for name, amount in record["totals"].items():
            seconds.add_metric([rank, name], amount)
        incidents = CounterMetricFamily(
            "accelpact_incidents",
            "Incidents of this attempt by action and outcome.",
            labels=["rank", "action", "outcome"],
        )
        for (action, outcome), count in _counts(record["incidents"]).items():
            incidents.add_metric([rank, action, outcome], count)
        elapsed = sum(record["totals"].values())
        gauges = {
            "accelpact_goodput_ratio": ("Productive share of this attempt.",
                                        record["totals"]["productive"] / elapsed if elapsed > 0 else 0.0),
            "accelpact_committed_updates": ("Updates committed since the beginning of the run.", self._updates),
            "accelpact_update_seconds": ("Productive seconds of a typical update.", record["update_s"]),
            "accelpact_written_timestamp_seconds": ("Unix time at which this was written.", time.time()),
        }  # fmt: skip
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=["rank"])
            gauge.add_metric([rank], value)
            yield gauge
        yield seconds
        yield incidents


def _counts(incidents: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], int]:
    counts: dict[tuple[str, str], int] = {}
    for incident in incidents:
        key = (incident["action"], incident["outcome"])
        counts[key] = counts.get(key, 0) + 1
    return counts
