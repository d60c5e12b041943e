"""Turns a test module of Lightning into one that runs on CPU processes, and with another strategy if one is given."""

from __future__ import annotations

import ast
import re

STRATEGY = "ModelParallelStrategy"

_ON_CPU = {"cuda": "cpu", "gpu": "cpu"}
_GPU_CONDITIONS = {"min_cuda_gpus", "bf16_cuda", "standalone"}
_PARALLELIZES = re.compile(r"_parallelize_(?!with_)")
_SUBSTITUTES = "tests.upstream.substitutes"


def translate(source: str, *, substitute: str | None) -> str:
    """The module's source with everything that asks for GPUs taken out; what the tests assert stays.

    Args:
        source: Of the test module.
        substitute: Class of :mod:`tests.upstream.substitutes` that stands for the strategy; ``None`` keeps Lightning's.
    """
    tree = _OnCpu().visit(ast.parse(source))
    if substitute is not None:
        tree = _WithSubstitute(substitute).visit(tree)
    return ast.unparse(ast.fix_missing_locations(tree))


class _OnCpu(ast.NodeTransformer):
    """Devices become the CPU, and the conditions of ``RunIf`` that only a machine with GPUs meets are dropped."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant(_ON_CPU.get(node.value, node.value)) if isinstance(node.value, str) else node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        called = ast.unparse(node.func)
        if called == "RunIf":
            node.keywords = [keyword for keyword in node.keywords if keyword.arg not in _GPU_CONDITIONS]
        elif called == "mock.patch":
            _accept_more_arguments(node.args)
        elif called == "torch.device" and _is_cpu(node.args[0]):
            del node.args[1:]  # a process has one CPU device, whatever its rank
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.keyword:
        self.generic_visit(node)
        if node.arg == "accelerator":
            node.value = ast.Constant("cpu")
        return node


def _accept_more_arguments(patched: list[ast.expr]) -> None:
    """A function that stands for a strategy's method takes what any strategy passes, not only Lightning's."""
    for function in patched:
        if isinstance(function, ast.Lambda):
            function.args.vararg = ast.arg("further")


def _is_cpu(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == "cpu"


class _WithSubstitute(ast.NodeTransformer):
    """The strategy's name means the substitute, and what parallelizes a model shards it over the substitute's mesh."""

    def __init__(self, substitute: str) -> None:
        self._substitute = substitute

    def visit_ImportFrom(self, node: ast.ImportFrom) -> list[ast.stmt] | ast.ImportFrom:
        others = [name for name in node.names if name.name != STRATEGY]
        if len(others) == len(node.names):
            return node
        instead = _import(self._substitute, STRATEGY)
        return [ast.ImportFrom(node.module, others, node.level), instead] if others else [instead]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        if _PARALLELIZES.match(node.name):
            arguments = ", ".join(argument.arg for argument in node.args.args)
            node.body = [_import("shard_layers"), *ast.parse(f"return shard_layers({arguments})").body]
        return node


def _import(name: str, known_as: str | None = None) -> ast.stmt:
    return ast.ImportFrom(_SUBSTITUTES, [ast.alias(name, known_as)], 0)
