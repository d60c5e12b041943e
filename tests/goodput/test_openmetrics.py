"""The file for the node exporter, read back by Prometheus' own parsers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as classic

from lightning_accelpact.goodput import GoodputAccount, GoodputOptions, Ledger, TimeClass
from lightning_accelpact.goodput.openmetrics import MetricsFile

RECORD = {
    "rank": 3, "world_size": 4, "totals": {"productive": 6.0, "guard": 2.0, "other": 0.0}, "update_s": 0.75,
    "incidents": [{"action": "redo", "outcome": "recovered"}] * 2 + [{"action": "restart", "outcome": "fail_stop"}],
}  # fmt: skip


def samples(text: str, parse: object) -> dict[tuple[str, ...], float]:
    return {
        (
            sample.name,
            *(sample.labels[name] for name in ("rank", "class", "action") if name in sample.labels),
        ): sample.value
        for family in parse(text)
        for sample in family.samples
    }


@pytest.mark.parametrize("parse", [openmetrics, classic])
def test_both_of_prometheus_parsers_read_it(tmp_path: Path, parse: object) -> None:
    """The node exporter reads the older text format, of which these files are also valid."""
    file = MetricsFile(tmp_path / "new", rank=3)
    file.write(RECORD, 17)
    found = samples(file.path.read_text(), parse)
    assert found["accelpact_time_seconds_total", "3", "productive"] == 6
    assert found["accelpact_incidents_total", "3", "redo"] == 2
    assert found["accelpact_incidents_total", "3", "restart"] == 1
    assert found["accelpact_goodput_ratio", "3"] == 0.75
    assert found["accelpact_committed_updates", "3"] == 17


def test_it_is_replaced_as_a_whole(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path, rank=3)
    for updates in (1, 2):
        file.write(RECORD, updates)
        assert [path.name for path in tmp_path.iterdir()] == ["accelpact-rank3.prom"]
        assert file.path.read_bytes().endswith(b"# EOF\n")
    assert samples(file.path.read_text(), openmetrics)["accelpact_committed_updates", "3"] == 2


def test_an_account_keeps_it_up_to_date(tmp_path: Path) -> None:
    account = GoodputAccount(Ledger(base=TimeClass.PRODUCTIVE), GoodputOptions(metrics_dir=tmp_path), rank=1)
    account.begin(0)
    account.time_update(5)
    found = samples((tmp_path / "accelpact-rank1.prom").read_text(), openmetrics)
    assert found["accelpact_committed_updates", "1"] == 5


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    account = GoodputAccount(Ledger(), GoodputOptions(metrics_dir=tmp_path / "file"))
    account.begin(0)
    with pytest.warns(UserWarning, match=r"could not write .*accelpact-rank0\.prom"):
        account.time_update(1)


def test_without_prometheus_client_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setattr("lightning_accelpact.goodput.openmetrics.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"metrics_dir needs prometheus-client.*pip install"):
        GoodputOptions(metrics_dir=tmp_path)
