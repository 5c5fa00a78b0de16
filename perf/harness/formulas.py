"""Bounds written as arithmetic on sizes, so that the cost formula a gate checks can be read in the gate."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

from twinproof.errors import FormatError

__all__ = ["evaluate_bound", "names_used"]

_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def names_used(bound: float | str | None, where: str) -> set[str]:
    """The names in a bound. Raises FormatError for anything but numbers, names and the four operations."""
    if not isinstance(bound, str):
        return set()
    names: set[str] = set()
    try:
        stack = [ast.parse(bound, mode="eval").body]
    except (SyntaxError, ValueError) as error:
        raise FormatError("not a formula", got=bound, expected="an expression of Python", where=where) from error
    while stack:
        node = stack.pop()
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            stack += [node.left, node.right]
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif not (isinstance(node, ast.Constant) and type(node.value) in (int, float)):
            raise FormatError("not a formula", got=bound, expected="numbers, names, + - * / and brackets", where=where)
    return names


def evaluate_bound(bound: float | str, sizes: Mapping[str, float]) -> float:
    """The number that a bound means for these sizes; the bound has been checked by :func:`names_used`."""

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp):
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Name):
            return sizes[node.id]
        assert isinstance(node, ast.Constant)
        return float(node.value)  # type: ignore[arg-type]

    return value(ast.parse(bound, mode="eval").body) if isinstance(bound, str) else float(bound)
