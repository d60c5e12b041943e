"""The HTML page: what it says, and what it looks like in a real browser."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from browser import count, screenshot
from written import write_run

from lightning_accelpact.cli import main
from lightning_accelpact.goodput import TimeClass
from lightning_accelpact.goodput.page import GROUPS, MAX_PIECES, MAX_RANKS, by_group, render_page, span, thinned
from lightning_accelpact.goodput.run import read_runs

# The page's and the productive time's colour, the reader preferring light or dark
LIGHT, DARK = ("#f6f7f9", "#2a9d6f"), ("#12161c", "#37b583")


class Parsed(HTMLParser):
    """The words that are shown, and whatever a browser would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.loaded: list[str] = []
        self._hidden = False
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._hidden = tag in ("style", "script")
        self.loaded += [
            f"{tag} {name}={value}" for name, value in attributes if name in ("src", "href", "srcset", "data")
        ]
        self.loaded += [tag] if tag in ("script", "link", "iframe", "img", "object") else []

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False

    def handle_data(self, text: str) -> None:
        self.words += [] if self._hidden else text.split()

    @property
    def text(self) -> str:
        return " ".join(self.words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "with-faults", restart_s=30.0)
    write_run(folder / "without", faults=(), killed_after=120, seed=2)
    return folder


def page_of(*folders: Path) -> str:
    runs = read_runs(folders)
    return render_page(runs, [run.summary() for run in runs])


def test_it_says_what_the_summary_says(folder: Path) -> None:
    text = Parsed(page_of(folder / "with-faults")).text
    (run,) = read_runs([folder / "with-faults"])
    summary = run.summary()
    assert f"{summary.goodput:.1%}".replace("%", " %") in text
    for expected in (
        "120 updates in 3.0 min",
        "4 ranks, 2 attempts",
        "3 of 3 incidents recovered in memory",
        "replayed updates",
        "rank 3",
        "backward redo recovered",
        "30.0 s to relaunch and reload",
    ):
        assert expected in text
    assert "Comparison" not in text
    for cls, seconds in summary.totals.items():
        assert (cls.value.replace("_", " ") + f" {seconds:,.2f}" in text) == (seconds > 0)


def test_several_runs_are_compared(folder: Path) -> None:
    text = Parsed(page_of(folder / "with-faults", folder / "without")).text
    table = text[text.index("Comparison") : text.index("goodput 120 updates in")]
    assert table.index("with-faults 7") < table.index("without 8")
    assert "for the guard; nothing to recover" in text


def test_nothing_is_loaded(folder: Path) -> None:
    page = page_of(folder / "with-faults")
    assert Parsed(page).loaded == []
    assert not re.search(r"https?:|url\(|@import|<script", page)


def test_names_from_outside_are_escaped(tmp_path: Path) -> None:
    write_run(tmp_path / "<script>alert(1)<", ranks=1, updates=2, killed_after=2, faults=())
    assert "<script" not in page_of(tmp_path / "<script>alert(1)<")


def test_every_class_has_a_group() -> None:
    assert sorted(cls for classes in GROUPS.values() for cls in classes) == sorted(TimeClass)


def test_the_pieces_of_a_rank_cover_its_time(folder: Path) -> None:
    (run,) = read_runs([folder / "with-faults"])
    for rank in run.ranks:
        for attempt in rank.attempts:
            pieces = thinned(attempt)
            assert len(pieces) <= MAX_PIECES + 1
            assert sum(end - start for start, end, _ in pieces) == pytest.approx(attempt.end - attempt.start)
            assert sum(sum(spent.values()) for *_, spent in pieces) == pytest.approx(sum(attempt.totals.values()))


def test_long_runs_and_many_ranks_make_no_larger_page(tmp_path: Path) -> None:
    write_run(tmp_path / "long", ranks=1, updates=1500, killed_after=1500, faults=())
    ((attempt,),) = (rank.attempts for rank in read_runs([tmp_path / "long"])[0].ranks)
    assert len(attempt.samples) > 1500 and len(thinned(attempt)) <= MAX_PIECES
    write_run(tmp_path / "wide", ranks=MAX_RANKS + 3, updates=2, killed_after=2, faults=())
    assert f"The first {MAX_RANKS} of {MAX_RANKS + 3} ranks are shown." in Parsed(page_of(tmp_path / "wide")).text


def test_groups_without_time_are_left_out() -> None:
    assert by_group({TimeClass.GUARD: 1.0, TimeClass.DETECTION: 0.5, TimeClass.REDONE_WORK: 0.25}) == {
        "guard": 1.0, "recovery in memory": 0.75,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.00 s"), (0.00123, "1.2 ms"), (0.0301, "30 ms"), (1.234, "1.23 s"), (59.96, "60.0 s"), (600, "10.0 min"),
     (-7300, "-2.0 h"), (200_000, "2.3 d")],
)  # fmt: skip
def test_spans(seconds: float, text: str) -> None:
    assert span(seconds) == text


# -- in a browser


@pytest.fixture(scope="module")
def shown(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., np.ndarray]:
    page = folder / "page.html"
    assert main(["report", str(folder / "with-faults"), str(folder / "without"), "--html", str(page), "--json"]) == 0
    pictures = tmp_path_factory.mktemp("pictures")
    return lambda **options: screenshot(page, pictures / "page.png", **options)


@pytest.mark.parametrize(("dark", "colours"), [(False, LIGHT), (True, DARK)])
def test_light_and_dark(shown: Callable[..., np.ndarray], dark: bool, colours: tuple[str, str]) -> None:
    picture = shown(width=1100, height=1200, dark=dark)
    page, productive = colours
    assert picture.shape == (1200, 1100, 3)
    assert count(picture, page) > 0.1 * picture[..., 0].size
    # The bars, and four ranks of the timeline
    assert count(picture, productive) > 40_000
    assert count(picture, (LIGHT if dark else DARK)[1]) == 0


@pytest.mark.parametrize("width", [500, 1100])
def test_nothing_sticks_out_of_the_window(shown: Callable[..., np.ndarray], width: int) -> None:
    """The margin at the right is empty down to the end: wide tables scroll in themselves."""
    picture = shown(width=width, height=3000)
    assert count(picture[:, -8:], LIGHT[0]) == picture[:, -8:, 0].size
    assert count(picture, LIGHT[1]) > 10_000
