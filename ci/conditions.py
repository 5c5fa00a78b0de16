"""The judge of ``ci/conditions``: which condition of the library's Python never holds, or always, under the suite?

    python ci/conditions.py prepare TREE ROOM     changes a copy of the tree, so that it notes what happens
    python ci/conditions.py judge TREE ROOM ... [--record | --table]

In the copy each operand of an ``if``, ``while``, ``and``, ``or``, conditional expression and filter notes whether it
was true, and each branch, loop, handler and ``raise`` that it was reached: in whatever process or thread, of one that
is killed too. An operand that was true alone can be forgotten and nobody would see it; so can a check whose ``raise``
was never reached. Of two numbers that are compared by their order it is noted whether they were ever equal: where they
were not, ``<`` may as well be ``<=``. A function notes that it was called, and of each argument that may be left out
whether it was its default: one that always was may as well be passed over, one that never was may have any default.

``ci/conditions.json`` lists by room what no test decides yet, and with its reason what nobody can decide: what is not
in it fails, and so does an entry that is decided by now. ``--record`` writes anew what is open, and refuses a room of
which more is open than before. A reason is written by hand, and holds for each place of its text.

Left out are functions that others compile from their source, constants, and the last operand of an ``and`` or ``or``
that is a value. Of an object that is no plain value only its being there is noted: asking it for its truth may cost a
wait for a device.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LISTED = ROOT / "ci" / "conditions.json"
SITES, NOTES = "sites.json", "notes"
_TEXT_MAX = 120
_SIGNS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_NOTED = '''"""Notes what is true and what is reached, by process: see ci/conditions.py."""

import operator
import os

# As they are now: tests put others in their place, which fail.
_open, _write, _close = os.open, os.write, os.close
_FOLDER = {folder!r}
_SIGNS = {{"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}}
_PLAIN = (bool, type(None), int, str, list, dict, tuple, set, frozenset, float)
_process, _known, _kept = 0, set(), []


def note(what):
    global _process, _known, _kept
    if _process != os.getpid():
        _process, _known, _kept = os.getpid(), set(), []
    if what not in _known:
        _known.add(what)
        _kept.append(what)
    if not _kept:
        return
    # Nothing stays open: a process may be killed, and tests count descriptors.
    try:
        file = _open(f"{{_FOLDER}}/{{_process}}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except PermissionError:
        return  # A test is another user meanwhile: it is written once that is over.
    try:
        while _kept:
            _write(file, f"{{_kept.pop()}}\\n".encode())
    except IndexError:
        pass  # Another thread has written it.
    finally:
        _close(file)


def operand(number, value):
    note(f"{{number}} {{bool(value) if type(value) in _PLAIN else True}}")
    return value


def given(number, value, default):
    note(f"{{number}} {{value is default or (type(value) is type(default) and value == default)}}")


def ordered(numbers, signs, *values):
    for number, sign, one, other in zip(numbers, signs, values, values[1:]):
        if type(one) in (int, float) and type(other) in (int, float):
            note(f"{{number}} {{'equal' if one == other else 'apart'}}")
        result = _SIGNS[sign](one, other)
        # The last decides, as what it is: a tensor has no truth of its own.
        if number != numbers[-1] and not result:
            break
    return result
'''


@dataclass(frozen=True)
class Site:
    """A place in the sources: ``kind`` is "operand", "compared", "default", or what is reached there."""

    file: str
    line: int
    kind: str
    text: str


class Notes(ast.NodeTransformer):
    """Lets a module note its operands and branches; ``sites`` gets one for each."""

    def __init__(self, file: str, sites: list[Site]) -> None:
        self._file, self._sites = file, sites
        self._within = ""

    def _site(self, node: ast.AST, kind: str, text: str) -> ast.Constant:
        self._sites.append(Site(self._file, getattr(node, "lineno", 0), kind, text[:_TEXT_MAX]))
        return ast.Constant(len(self._sites) - 1)

    def _reached(self, node: ast.AST, kind: str, text: str) -> ast.Expr:
        return ast.Expr(ast.Call(ast.Name("_note", ast.Load()), [self._site(node, kind, text)], []))

    def _condition(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.BoolOp):
            return ast.BoolOp(node.op, [self._condition(value) for value in node.values])
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ast.UnaryOp(node.op, self._condition(node.operand))
        if isinstance(node, ast.Constant) or _binds(node):
            return node
        number = self._site(node, "operand", ast.unparse(node))
        return ast.Call(ast.Name("_operand", ast.Load()), [number, self.visit(node)], [])

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        before, self._within = self._within, f"{self._within}{node.name}."
        self.generic_visit(node)
        self._within = before
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        if any("jit" in ast.unparse(each) or "fx.wrap" in ast.unparse(each) for each in node.decorator_list):
            return node
        noted: list[ast.stmt] = []
        if not _is_declared_alone(node):
            noted = [self._reached(node, "called", self._within + node.name), *self._given(node)]
        self.generic_visit(node)
        at = 1 if ast.get_docstring(node, clean=False) is not None else 0
        node.body[at:at] = noted
        return node

    def _given(self, node: ast.FunctionDef) -> Iterable[ast.stmt]:
        given = node.args
        placed = [*given.posonlyargs, *given.args]
        first = len(placed) - len(given.defaults)
        pairs = [
            *zip(placed[first:], given.defaults, strict=True),
            *zip(given.kwonlyargs, given.kw_defaults, strict=True),
        ]
        for argument, default in pairs:
            if isinstance(default, ast.Constant):
                number = self._site(node, "default", f"{self._within}{node.name}({argument.arg}={default.value!r})")
                values: list[ast.expr] = [number, ast.Name(argument.arg, ast.Load()), ast.Constant(default.value)]
                yield ast.Expr(ast.Call(ast.Name("_given", ast.Load()), values, []))

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        # A value, not a test: its last operand decides nothing.
        *first, last = node.values
        return ast.BoolOp(node.op, [*map(self._condition, first), self.visit(last)])

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        signs = [_SIGNS.get(type(each), "") for each in node.ops]
        texts = [ast.unparse(each) for each in (node.left, *node.comparators)]
        self.generic_visit(node)
        if not all(signs):
            return node
        pairs = zip(texts, signs, texts[1:], strict=False)
        numbers: list[ast.expr] = [self._site(node, "compared", " ".join(pair)) for pair in pairs]
        names: list[ast.expr] = [ast.Constant(sign) for sign in signs]
        given = [ast.Tuple(numbers, ast.Load()), ast.Tuple(names, ast.Load()), node.left, *node.comparators]
        return ast.Call(ast.Name("_ordered", ast.Load()), given, [])

    def visit_IfExp(self, node: ast.IfExp) -> ast.IfExp:
        return ast.IfExp(self._condition(node.test), self.visit(node.body), self.visit(node.orelse))

    def visit_If(self, node: ast.If) -> ast.If:
        text = ast.unparse(node.test)
        if "TYPE_CHECKING" in text:
            return node
        reached = [self._reached(node, f"{kind}, if", text) for kind in ("true", "false")]
        test = self._condition(node.test)
        body, other = ([self.visit(each) for each in block] for block in (node.body, node.orelse))
        return ast.If(test, [reached[0], *_flat(body)], [reached[1], *_flat(other)])

    def visit_While(self, node: ast.While) -> ast.While:
        node.test = self._condition(node.test)
        node.body, node.orelse = ([*_flat([self.visit(each) for each in block])] for block in (node.body, node.orelse))
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.comprehension:
        node.iter, node.ifs = self.visit(node.iter), [self._condition(each) for each in node.ifs]
        return node

    def visit_For(self, node: ast.For) -> ast.For:
        reached = self._reached(node, "for", ast.unparse(node.iter))
        self.generic_visit(node)
        node.body = [reached, *node.body]
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.ExceptHandler:
        reached = self._reached(node, "except", ast.unparse(node.type) if node.type else "")
        self.generic_visit(node)
        node.body = [reached, *node.body]
        return node

    def visit_Raise(self, node: ast.Raise) -> list[ast.stmt]:
        return [self._reached(node, "raise", ast.unparse(node)), node]


def _is_declared_alone(node: ast.FunctionDef) -> bool:
    # A protocol's, or one that only classes below it have.
    *_, last = node.body
    says = isinstance(last, ast.Expr) and isinstance(last.value, ast.Constant)
    return says or (isinstance(last, ast.Raise) and "NotImplementedError" in ast.unparse(last))


def _binds(node: ast.AST) -> bool:
    # What ``:=`` binds in an argument of a call would be bound all the same; in a filter it would not.
    return any(isinstance(each, ast.NamedExpr) for each in ast.walk(node))


def _flat(statements: Iterable[ast.stmt | list[ast.stmt]]) -> list[ast.stmt]:
    return [each for one in statements for each in (one if isinstance(one, list) else [one])]


def noting(text: str, file: str, sites: list[Site]) -> str:
    """The module's text that notes; ``sites`` gets one for each number in it."""
    module = Notes(file, sites).visit(ast.parse(text))
    names = [ast.alias(name, f"_{name}") for name in ("note", "operand", "ordered", "given")]
    at = 0
    for statement in module.body:
        is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not is_docstring and not (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
            break
        at += 1
    module.body.insert(at, ast.ImportFrom("twinproof._noted", names, 0))
    return ast.unparse(ast.fix_missing_locations(module)) + "\n"


def prepare(tree: Path, room: str) -> list[Site]:
    """Change the Python of one room in a copy of the tree; what it notes comes into ``TREE/notes``."""
    sites: list[Site] = []
    for layer in ("twinproof", "fastimpl"):
        for path in sorted((tree / layer / room).rglob("*.py")):
            file = path.relative_to(tree).as_posix()
            path.write_text(noting(path.read_text(encoding="utf-8"), file, sites), encoding="utf-8")
    (tree / NOTES).mkdir()
    (tree / "twinproof" / "_noted.py").write_text(_NOTED.format(folder=str(tree / NOTES)), encoding="utf-8")
    (tree / SITES).write_text(json.dumps([asdict(site) for site in sites]), encoding="utf-8")
    return sites


@dataclass(frozen=True)
class Listed:
    """What is known of a room: what is ``open``, and the reason of what ``nobody_can`` decide here."""

    open: list[str] = field(default_factory=list)
    nobody_can: dict[str, str] = field(default_factory=dict)

    def without_reason(self, found: Sequence[str]) -> list[str]:
        """What of it is open."""
        return [each for each in found if each not in self.nobody_can]


def undecided(sites: Sequence[Site], notes: set[str]) -> list[str]:
    """What was true alone, false alone, or never reached, by file and text, so that an edit elsewhere moves nothing."""
    found = []
    for number, site in enumerate(sites):
        if site.kind == "compared":
            # Of what is no number nothing is noted, nor of what is never compared: its operands say so.
            missing = "never equal" if f"{number} apart" in notes and f"{number} equal" not in notes else ""
        elif site.kind == "default":
            seen = [value for value in ("True", "False") if f"{number} {value}" in notes]
            missing = {"True": "always the default", "False": "never the default"}[seen[0]] if len(seen) == 1 else ""
        elif site.kind != "operand":
            missing = "" if str(number) in notes else f"never, {site.kind}"
        else:
            seen = [value for value in ("True", "False") if f"{number} {value}" in notes]
            missing = "" if len(seen) == 2 else f"always {seen[0].lower()}" if seen else "never asked"
        if missing:
            found.append(f"{site.file}: {missing}: {site.text}")
    return sorted(found)


def read(tree: Path) -> list[str]:
    """``undecided`` of a tree whose suite has run. Raises SystemExit where nothing was noted."""
    sites = [Site(**each) for each in json.loads((tree / SITES).read_text(encoding="utf-8"))]
    notes = {line for path in (tree / NOTES).iterdir() for line in path.read_text(encoding="utf-8").splitlines()}
    if not notes:
        raise SystemExit(f"conditions: nothing was noted in {tree}")
    return undecided(sites, notes)


def judge(found: Sequence[str], listed: Listed) -> list[str]:
    """What is wrong with the list: what stands in one of both alone, and reasons that say nothing."""
    left = Counter(listed.without_reason(found))
    new, old = left - Counter(listed.open), Counter(listed.open) - left
    stale = [*old.elements(), *(each for each in listed.nobody_can if each not in found)]
    wrong = [f"no test decides it: {each}" for each in new.elements()]
    wrong += [f"no reason is given: {each}" for each, reason in listed.nobody_can.items() if not reason.strip()]
    return wrong + [f"decided by now, take it out: {each}" for each in stale]


def read_listed() -> dict[str, Listed]:
    """The file's rooms."""
    rooms = json.loads(LISTED.read_text(encoding="utf-8")) if LISTED.exists() else {}
    return {room: Listed(**each) for room, each in rooms.items()}


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="ci/conditions", description=__doc__)
    parser.add_argument("what", choices=("prepare", "judge"))
    parser.add_argument("tree", type=Path)
    parser.add_argument("room", choices=("checkpoint", "kvstore", "offload", "pipeline"))
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--record", action="store_true", help="write anew what is open; it may not become more")
    way.add_argument("--table", action="store_true", help="print what is undecided, and judge nothing")
    options = parser.parse_args(arguments)
    if options.what == "prepare":
        print(f"{options.room}: {len(prepare(options.tree, options.room))} places")
        return 0
    found = read(options.tree)
    if options.table:
        print("\n".join(found))
        return 0
    rooms = read_listed()
    listed = rooms.get(options.room, Listed())
    if options.record:
        left = listed.without_reason(found)
        if options.room in rooms and len(left) > len(listed.open):
            raise SystemExit(f"conditions: {options.room}: {len(listed.open)} were open, now {len(left)}")
        rooms[options.room] = replace(listed, open=left)
        kept = {room: asdict(each) for room, each in rooms.items()}
        LISTED.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        return 0
    wrong = judge(found, listed)
    left_count = len(listed.without_reason(found))
    print(
        "\n".join([*wrong, f"{options.room}: {len(found)} undecided, {left_count} of them open; wrong: {len(wrong)}"])
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
