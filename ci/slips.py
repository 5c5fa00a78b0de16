"""Slips of whole statements, for ``ci/mutation.py``: what rules that change one expression never write.

A statement is left out, two neighbours change places, a keyword argument is not passed on, a condition always holds or
never does, an operand of a condition is forgotten, 0 or nothing is taken for None, a copy is not made or an order not
brought about. A function returns early where it has found nothing, or an object remembers what it found the first time:
shortcuts that somebody adds. Only what has an effect is left out or moved: what binds a name for the first time would
end in a NameError, which everybody sees.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

PREFIX = "slip/"
_JUMPS = (ast.Return, ast.Raise, ast.Break, ast.Continue)
# What gives its only argument, or its object, again: in another order, or where a change of it is not seen.
_SAME_CALLS = ("sorted", "list", "tuple", "set", "dict", "frozenset")
_SAME_METHODS = ("clone", "contiguous", "detach", "copy", "deepcopy")
_DECLARATIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Global)


@dataclass(frozen=True)
class Slip:
    """One change of a module: what stands from ``start`` to ``end``, bytes of UTF-8, becomes ``text``."""

    operator: str
    line: int
    start: int
    end: int
    text: str


class _Source:
    """A module's bytes, and where its nodes stand in them."""

    def __init__(self, text: str) -> None:
        self.content = text.encode()
        self._starts = [0]
        for line in self.content.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.stmt | ast.expr | ast.keyword)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = self._starts[node.lineno - 1] + node.col_offset
        return begin, self._starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        begin, end = self.span(node)
        return self.content[begin:end].decode()

    def slip(self, operator: str, node: ast.stmt | ast.expr, text: str) -> Slip:
        return Slip(PREFIX + operator, node.lineno, *self.span(node), text)


def slips_of(text: str) -> Iterator[Slip]:
    """All slips of a module, in an order that its text fixes."""
    source = _Source(text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for block in _blocks(node):
                yield from _of_block(source, block, _bound_twice(node))
            yield from _of_results(source, node)
            for inner in _own(node):
                yield from _of_conditions(source, inner)
                if isinstance(inner, ast.Call):
                    yield from _of_call(source, inner)


def with_slip(text: str, operator: str, occurrence: int) -> str:
    """The module with the slip that is the ``occurrence``-th of its operator."""
    slip = [each for each in slips_of(text) if each.operator == operator][occurrence]
    content = text.encode()
    return (content[: slip.start] + slip.text.encode() + content[slip.end :]).decode()


def _own(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function's body, without those of functions inside, which have a turn of their own."""
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node = waiting.pop(0)
        if not isinstance(node, _DECLARATIONS):
            yield node
            waiting += ast.iter_child_nodes(node)


def _blocks(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[list[ast.stmt]]:
    yield function.body
    for node in _own(function):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block:
                yield block


def _bound_twice(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Parameters, and names that the function binds more than once: without one of these they still mean something."""
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    names = [argument.arg for argument in every]
    names += [node.id for node in _own(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return {name for name in names if names.count(name) > 1}


def _of_block(source: _Source, block: list[ast.stmt], bound_twice: set[str]) -> Iterator[Slip]:
    for statement in block:
        if _may_go(statement, bound_twice):
            yield source.slip("leave-out", statement, "pass")
        if isinstance(statement, ast.With) and all(item.optional_vars is None for item in statement.items):
            begin, _ = source.span(statement)
            # The colon that ends the line of ``with`` stays.
            _, end = source.span(statement.items[-1].context_expr)
            closing = len(source.content[end:].split(b":", 1)[0])
            yield Slip(f"{PREFIX}no-context", statement.lineno, begin, end + closing, "if True")
    for first, second in itertools.pairwise(block):
        if _may_change_places(first, second):
            begin, _ = source.span(first)
            _, end = source.span(second)
            between = source.content[source.span(first)[1] : source.span(second)[0]].decode()
            text = source.text(second) + between + source.text(first)
            yield Slip(f"{PREFIX}swap", first.lineno, begin, end, text)


def _may_go(statement: ast.stmt, bound_twice: set[str]) -> bool:
    if isinstance(statement, ast.Expr):
        return not isinstance(statement.value, ast.Constant | ast.Yield | ast.YieldFrom)
    if isinstance(statement, ast.Assign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return all(not isinstance(each, ast.Name) or each.id in bound_twice for each in targets)
    return isinstance(statement, ast.Raise | ast.Delete | ast.Continue | ast.Break)


def _may_change_places(first: ast.stmt, second: ast.stmt) -> bool:
    """Whether both have an effect, and neither binds a name that the other reads."""
    if isinstance(first, (*_JUMPS, *_DECLARATIONS)) or isinstance(second, (*_JUMPS, *_DECLARATIONS)):
        return False
    return all(map(_has_effect, (first, second))) and not (
        _names(first, ast.Store) & _names(second, ast.Load) or _names(second, ast.Store) & _names(first, ast.Load)
    )


def _has_effect(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return not isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.Assign):
        return isinstance(statement.value, ast.Call) or not isinstance(statement.targets[0], ast.Name)
    return not isinstance(statement, ast.AnnAssign | ast.Assert | ast.Pass)


def _names(statement: ast.stmt, context: type[ast.expr_context]) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, context)}


def _of_results(source: _Source, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Slip]:
    """A shortcut behind each name that the function's own block binds, and a memory of what a method asked for."""
    nodes = [*_own(function)]
    returns_value = any(isinstance(node, ast.Return) and node.value is not None for node in nodes)
    is_method = bool(function.args.args) and function.args.args[0].arg == "self"
    for statement, following in itertools.zip_longest(function.body, function.body[1:]):
        if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
            continue
        name, value = statement.targets[0].id, statement.value
        ends = isinstance(following, ast.Return) and following.value is not None
        is_result = ends and ast.unparse(following) == f"return {name}"
        if following is not None and not is_result and not isinstance(value, ast.Constant) and not _is_full(value):
            # The truth of a tensor may cost a wait for a device, or mean nothing.
            empty = f'not ({name}.numel() if hasattr({name}, "numel") else {name})'
            result = f" {name}" if returns_value else ""
            text = f"{source.text(statement)}\n{' ' * statement.col_offset}if {empty}: return{result}"
            yield source.slip("shortcut", statement, text)
        if is_method and any(isinstance(node, ast.Call) for node in ast.walk(value)):
            kept = f'self.__dict__.setdefault("kept_{statement.lineno}", {source.text(value)})'
            yield source.slip("remember", value, kept)


def _is_full(value: ast.expr) -> bool:
    """Whether a value is written with something in it, so that nobody finds it empty."""
    written = isinstance(value, ast.Tuple | ast.List | ast.Set)
    return written and any(not isinstance(each, ast.Starred) for each in value.elts)


def _of_conditions(source: _Source, node: ast.AST) -> Iterator[Slip]:
    if isinstance(node, ast.If | ast.IfExp):
        # A ``while`` that never ends tells nothing: whoever runs it hangs.
        yield source.slip("always", node.test, "True")
        yield source.slip("never", node.test, "False")
    if isinstance(node, ast.comprehension):
        for condition in node.ifs:
            yield source.slip("always", condition, "True")
    if isinstance(node, ast.Compare) and ast.unparse(node).endswith((" is None", " is not None")):
        negation = "not " if isinstance(node.ops[0], ast.Is) else ""
        yield source.slip("falsy", node, f"({negation}({source.text(node.left)}))")
    if isinstance(node, ast.BoolOp):
        for left_out in node.values:
            kept = [value for value in node.values if value is not left_out]
            joined = (" and " if isinstance(node.op, ast.And) else " or ").join(f"({source.text(x)})" for x in kept)
            yield source.slip("operand", node, f"({joined})")


def _of_call(source: _Source, call: ast.Call) -> Iterator[Slip]:
    """The call without what it does, and without each keyword argument, the comma before or behind it too."""
    if isinstance(call.func, ast.Name) and call.func.id in _SAME_CALLS and len(call.args) == 1 and not call.keywords:
        yield source.slip("same", call, f"({source.text(call.args[0])})")
    if isinstance(call.func, ast.Attribute) and call.func.attr in _SAME_METHODS:
        # ``copy.copy(x)`` is a function of its argument, ``x.copy()`` a method.
        kept = call.args[0] if call.args else call.func.value
        yield source.slip("same", call, f"({source.text(kept)})")
    words = [*call.args, *call.keywords]
    for position, word in enumerate(words):
        # That of zip is an assertion, which nobody sees while it holds.
        is_strict = isinstance(call.func, ast.Name) and call.func.id == "zip"
        if isinstance(word, ast.keyword) and word.arg is not None and not is_strict:
            begin, end = source.span(word)
            if position > 0:
                begin = source.span(words[position - 1])[1]
            elif len(words) > 1:
                end = source.span(words[1])[0]
            line = source.content[:begin].count(b"\n") + 1 if position == 0 else word.value.lineno
            yield Slip(f"{PREFIX}keyword", line, begin, end, "")
