"""A checkout of Lightning's sources, and the copy of its tests that is run."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.upstream.translation import translate

_SUITES = {"tests_fabric": "FabricSubstitute", "tests_pytorch": "TrainerSubstitute"}
_MODULES = ("strategies/test_model_parallel.py", "strategies/test_model_parallel_integration.py")
_SUPPORT = ("__init__.py", "conftest.py", "helpers", "strategies/__init__.py")


class NoCheckout(Exception):
    """The folder is not a checkout of Lightning; the message says what is missing."""


class Checkout:
    """A checkout of Lightning's repository.

    Args:
        root: Its folder.

    Raises:
        NoCheckout: if a file is missing that the tests need.
    """

    modules = tuple(f"{suite}/{module}" for suite in _SUITES for module in _MODULES)

    def __init__(self, root: Path) -> None:
        self._root = root
        needed = ["pyproject.toml", "src/version.info", *(f"tests/{module}" for module in self.modules)]
        if missing := [name for name in needed if not (root / name).is_file()]:
            raise NoCheckout(
                f"{root} is not a checkout of Lightning's sources with the tests of ModelParallelStrategy: {missing[0]}"
                " is missing. Get one with: git clone --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning"
            )

    @property
    def version(self) -> str:
        """The version that the sources say they are."""
        return (self._root / "src" / "version.info").read_text().strip()

    def copy_tests(self, target: Path, *, substituted: bool) -> None:
        """Copy the tests and what they import, translated to run on CPU processes.

        Args:
            target: The folder that will hold them; made.
            substituted: Whether our strategies stand for Lightning's.
        """
        _copy(self._root / "pyproject.toml", target / "pyproject.toml")  # Lightning's settings for pytest
        for suite, substitute in _SUITES.items():
            for name in _SUPPORT:
                _copy(self._root / "tests" / suite / name, target / suite / name)
            for module in _MODULES:
                source = (self._root / "tests" / suite / module).read_text()
                translated = translate(source, substitute=substitute if substituted else None)
                (target / suite / module).write_text(translated)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)
