"""Helps the tests of the files that touch private attributes of a framework: each must name all that it touches."""

from __future__ import annotations

import ast
import inspect
from types import ModuleType
from typing import Any


def private_names(module: ModuleType) -> set[str]:
    """Every private name that the module's source imports, or reads or writes on anything but ``self`` and ``cls``."""
    names: set[str] = set()
    own = _defined(module)
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Attribute) and not _is_own(node.value):
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr"):
            names.update(arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))
    return {name for name in names if name.startswith("_") and not name.startswith("__")} - own


def _defined(module: ModuleType) -> set[str]:
    """Private names of functions, methods and attributes that the module itself defines."""
    own: set[str] = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            own.add(node.attr)
    return own


def _is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def require(adapter: ModuleType, framework: str, owner: str, present: Any, *names: str) -> None:
    """Fail if ``present`` (a list of names, or an object) lacks one of the names that the adapter touches."""
    known = present if isinstance(present, list) else dir(present)
    missing = [name for name in names if name not in known]
    assert not missing, (
        f"{framework} has moved {', '.join(f'{owner}.{name}' for name in missing)}: adapt {adapter.__name__}, which is"
        " the only file that touches it, and then widen the versions it says it was checked against"
    )


def require_checked(adapter: ModuleType, framework: str, version: str, checked: tuple[str, ...]) -> None:
    """Fail if the installed version is none that the adapter was checked against."""
    assert ".".join(version.split(".")[:2]) in checked, (
        f"{framework} {version} is installed, and {adapter.__name__} was checked against {checked}: if all its other"
        " tests pass, add the new version"
    )
