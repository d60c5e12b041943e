"""A fit with all that Lightning has, and faults wherever it communicates: nothing that anybody can see differs."""

from __future__ import annotations

import csv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jobs_everything
import lightning.pytorch as pl
import pytest
import torch
from cluster import run_ranks, values
from jobs_everything import Strike

from lightning_accelpact.recovery.fault import Fault, FaultKind, FaultPoint

Results = list[dict[str, Any]]

# Those that strike outside of an update
KINDS = [FaultKind.EXCEPTION, FaultKind.SOCKETS]
# Where it strikes, and in which operation of that name
PLACES: dict[str, list[tuple[str, int]]] = {
    "a barrier between updates": [("train between updates", 2)],
    "a barrier inside an update": [("train between micro-batches", 1)],
    "metric sync": [("train metric sync", 3)],
    "validation forward": [("validate block", 1), ("validate block", 7)],  # in the middle of an update; between two
    "validation metric sync": [("validate metric sync", 1)],
    "checkpoint save": [("validate plan", 1), ("train save", 0)],
    "early-stopping reduce": [("validate stopping", 1)],
    "teardown": [("train on_train_end", 0), ("train on_fit_end", 0)],
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Results]]:
    """The run of a configuration without faults, on every rank, and its folder."""
    known: dict[str, tuple[Path, Results]] = {}

    def run(**options: Any) -> tuple[Path, Results]:
        key = repr(sorted(options.items()))
        if key not in known:
            folder = tmp_path_factory.mktemp("uninterrupted")
            known[key] = folder, fit(folder, **options)
            assert not any(result["incidents"] for result in known[key][1])
        return known[key]

    return run


def fit(folder: Path, **options: Any) -> Results:
    """Run the fit on four ranks."""
    return values(run_ranks(jobs_everything.fit_with, 4, {"folder": str(folder), **options}, timeout=150))


def assert_same(results: Results, expected: Results) -> None:
    """Everything that must not depend on faults is the same on every rank."""
    for rank, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        for key, value in wanted["compared"].items():
            assert result["compared"][key] == value, f"rank {rank}: {key} differs"


def assert_recovered(results: Results, strikes: list[Strike], also: int = 0) -> None:
    """Every fault has struck its victim, and every rank has recovered from each, and from so many others."""
    for rank, result in enumerate(results):
        assert len(result["struck"]) == sum(strike.rank == rank for strike in strikes)
        assert all(incident["outcome"] == "recovered" for incident in result["incidents"])
    assert len(results[0]["incidents"]) == len(strikes) + also


def strikes_at(places: list[tuple[str, int]], kind: FaultKind, victim: int) -> list[Strike]:
    """One fault at each of these places."""
    return [Strike(place=place, nth=nth, kind=kind, rank=victim) for place, nth in places]


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
def test_faults_everywhere_change_nothing(kind: FaultKind, victim: int, uninterrupted: Any, tmp_path: Path) -> None:
    strikes = strikes_at([place for places in PLACES.values() for place in places], kind, victim)
    results = fit(tmp_path, strikes=strikes)
    assert_recovered(results, strikes)
    assert_same(results, uninterrupted()[1])


@pytest.mark.parametrize("place", PLACES)
def test_a_fault_at_one_place_changes_nothing(place: str, uninterrupted: Any, tmp_path: Path) -> None:
    number = list(PLACES).index(place)
    strikes = strikes_at(PLACES[place][:1], KINDS[number % 2], [0, 3][number // 2 % 2])
    results = fit(tmp_path, strikes=strikes)
    assert_recovered(results, strikes)
    assert_same(results, uninterrupted()[1])


def test_an_operation_that_only_the_others_have_finished_changes_nothing(uninterrupted: Any, tmp_path: Path) -> None:
    """The victim has done its part, and not said so: all do it again."""
    places = ["train metric sync", "validate forward", "validate save", "train save", "train gather"]
    strikes = [Strike(place=place, late=True, kind=FaultKind.EXCEPTION, rank=1) for place in places]
    results = fit(tmp_path, strikes=strikes)
    assert_recovered(results, strikes)
    assert_same(results, uninterrupted()[1])


@pytest.mark.parametrize("seed", range(5))
def test_connections_cut_at_random_times_change_nothing(seed: int, uninterrupted: Any, tmp_path: Path) -> None:
    results = fit(tmp_path, cuts=seed)
    cuts = [place.split()[0] for result in results for place in result["struck"]]
    assert {"setup", "validation", "checkpoint", "random"} == set(cuts)
    assert_same(results, uninterrupted()[1])


def test_a_checkpoint_of_a_run_with_faults_resumes_like_one_without(uninterrupted: Any, tmp_path: Path) -> None:
    """Both are resumed from where they were in the middle of an epoch; once with a fault while they are read."""
    folder, _ = uninterrupted()
    strikes = [Strike(place="validate plan"), Strike(place="train save", rank=3, late=True)]
    faults = [Fault(point=FaultPoint.BACKWARD, update=2, rank=3), Fault(point=FaultPoint.VOTE, update=4, rank=0)]
    with_faults = fit(tmp_path / "faulty", strikes=strikes, faults=faults)
    assert with_faults[0]["incidents"]
    resumed = [
        fit(tmp_path / name, resume=str(written / "every" / "step=6.ckpt"), strikes=reading)
        for name, written, reading in [
            ("a", folder, []),
            ("b", tmp_path / "faulty", []),
            ("c", tmp_path / "faulty", [Strike(place="train load", rank=2)]),
        ]
    ]
    assert resumed[0][0]["compared"]["global_step"] == 8 != resumed[0][0]["compared"]["updates"]
    assert resumed[2][2]["struck"]
    assert_same(resumed[1], resumed[0])
    assert_same(resumed[2], resumed[0])


def test_a_loader_with_state_resumes_where_it_was(uninterrupted: Any, tmp_path: Path) -> None:
    options = VARIANTS["a loader with state, compiled as a whole"]
    folder, _ = uninterrupted(**options)
    strikes = [Strike(place="train save", rank=3, late=True)]
    faulty = fit(tmp_path / "faulty", strikes=strikes, faults=FAULTS, **options)
    assert len(faulty[3]["struck"]) == 1
    assert [result["pending"] for result in faulty] == [[]] * 4
    plain, other = (
        fit(tmp_path / name, resume=str(written / "every" / "step=6.ckpt"), strikes=reading, **options)
        for name, written, reading in [("a", folder, []), ("b", tmp_path / "faulty", [Strike(place="train load")])]
    )
    assert plain[0]["compared"]["given"] == [(1, position) for position in range(4, 8)]
    assert other[0]["struck"]
    assert_same(other, plain)


def test_goodput_in_the_logger_changes_nothing_else(uninterrupted: Any, tmp_path: Path) -> None:
    """Compared with a run that logs none. Two faults in gatherings between updates, one in that at the end."""
    strikes = [
        Strike(place="train goodput", nth=2, rank=0, kind=FaultKind.EXCEPTION, late=True),
        Strike(place="train goodput", nth=6, rank=3),
        Strike(place="train goodput", nth=16, rank=1),
    ]
    faults = [Fault(point=FaultPoint.BACKWARD, update=1, rank=2)]
    results = fit(tmp_path, strikes=strikes, faults=faults, goodput_every=1)
    assert results[0]["operations"].count("train goodput") == 2 * (8 + 1)
    assert_recovered(results, strikes, also=1)
    assert_same(results, uninterrupted()[1])
    with (tmp_path / "csv" / "version_0" / "metrics.csv").open() as file:
        logged = [row for row in csv.DictReader(file) if row["goodput"]]
    assert [int(row["step"]) for row in logged] == list(range(9))
    counted = [float(row["goodput/incidents"]) for row in logged]  # as each gathering began
    # A link that rank 3 or 1 loses in a gathering may be repaired before rank 0 begins its own part of it.
    assert counted[:3] + counted[4:8] == [0, 1, 2, 3, 3, 3, 3]
    assert counted[3] in (2, 3) and counted[8] in (3, 4)
    assert all(0 < float(row["goodput"]) < 1 for row in logged)


VARIANTS: dict[str, dict[str, Any]] = {
    "scheduled accumulation, clipping by value, workers": {
        "scheduled_accumulation": {0: 2, 1: 3},
        "module_options": {"workers": 1},
        "trainer_options": {"gradient_clip_algorithm": "value", "limit_train_batches": 7, "profiler": "simple"},
    },
    "bf16": {"trainer_options": {"precision": "bf16-mixed"}},
    "compiled blocks": {"module_options": {"compiled": "blocks"}},
    "a stream, a stop after some steps, a profile of every call": {
        "module_options": {"data": "stream"},
        "trainer_options": {"val_check_interval": 3, "max_steps": 6, "profiler": "advanced"},
    },
    "several loaders, persistent workers, a stop by time": {
        "module_options": {"data": "several", "workers": 1, "persistent": True},
        "callbacks": jobs_everything.clockwork,
    },
    "epochs that end within a window, loaders made anew, PyTorch's profiler": {
        "module_options": {"workers": 1},
        "trainer_options": {
            "limit_train_batches": 5, "val_check_interval": 3, "reload_dataloaders_every_n_epochs": 1,
            "profiler": "pytorch",
        },
    },
    "a loader with state, compiled as a whole": {"module_options": {"data": "with state", "compiled": "whole"}},
    "full checkpoints, one batch over and over": {
        "save_distributed_checkpoint": False,
        "trainer_options": {"overfit_batches": 4, "val_check_interval": 1.0},
    },
}
MORE_PLACES = {"several loaders, persistent workers, a stop by time": [("train timer", 2)]}
FAULTS = [
    Fault(point=FaultPoint.BACKWARD, update=0, rank=3, micro_batch=1),
    Fault(point=FaultPoint.FORWARD, update=2, rank=0, kind=FaultKind.EXCEPTION),
    Fault(point=FaultPoint.VOTE, update=3, rank=3, kind=FaultKind.EXCEPTION),
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_else_a_run_may_have_changes_nothing(variant: str, uninterrupted: Any, tmp_path: Path) -> None:
    options = VARIANTS[variant]
    places = [("validate block", 1), ("train metric sync", 1), ("train model state", 0)]
    strikes = strikes_at(places + MORE_PLACES.get(variant, []), FaultKind.SOCKETS, 1)
    results = fit(tmp_path, faults=FAULTS, strikes=strikes, **options)
    assert [result["pending"] for result in results] == [[]] * 4
    assert len(results[1]["struck"]) == len(strikes)
    assert_same(results, uninterrupted(**options)[1])


@pytest.mark.parametrize("name", ["StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging"])
def test_averages_of_whole_models_are_refused(name: str, tmp_path: Path) -> None:
    options = {"folder": str(tmp_path), "callbacks": partial(jobs_everything.averaging, name)}
    for result in run_ranks(jobs_everything.fit_with, 2, options, timeout=60):
        assert result.exit_code == 1
        assert f"MisconfigurationException: {name} averages into a whole copy of the model" in result.error


def test_a_wrapper_by_torch_compile_is_refused() -> None:
    """By Lightning itself; ``module.compile()``, in place, is what a variant above has."""
    trainer = pl.Trainer(accelerator="cpu", strategy="accelpact_hsdp", logger=False, enable_checkpointing=False)
    with pytest.raises(RuntimeError, match="compiled model is incompatible .* avoid passing in compiled model"):
        trainer.fit(torch.compile(jobs_everything.Everything(), backend="eager"))
