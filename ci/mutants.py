"""Mutants of the sources, for ``ci/mutation.py``: cosmic-ray's and slips of Python, universalmutator's of C++."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cpp_code import NOT_MUTATED, is_sensible, tokens_of
from python_code import meaning
from slips import PREFIX, slips_of, with_slip

_RULES = ["universal.rules", "c_like.rules", "cpp.rules"]


@dataclass(frozen=True)
class Mutant:
    """One change of one file: ``occurrence`` is the place among those that its operator may change there.

    Of C++, ``operator`` is ``"line"`` and ``after`` the whole line.
    """

    component: str
    file: str
    line: int
    operator: str
    occurrence: int
    before: str
    after: str = ""

    @property
    def key(self) -> str:
        """What tells it from all others of the same text."""
        return f"{self.file}:{self.operator}:{self.occurrence}:{self.before}:{self.after}"


def drawn(mutants: Iterable[Mutant], seed: int) -> list[Mutant]:
    """All mutants in an order that the seed fixes, and that a new mutant elsewhere does not change."""
    return sorted(mutants, key=lambda mutant: hashlib.sha256(f"{seed}:{mutant.key}".encode()).digest())


def python_mutants(component: str, root: Path) -> Iterator[Mutant]:
    """Where cosmic-ray's operators and slips may change a component's Python, without the changed text."""
    tools, trees = importlib.import_module("cosmic_ray.plugins"), importlib.import_module("cosmic_ray.ast")
    operators = {name: tools.get_operator(name) for name in tools.operator_names()}
    operators = {name: kind() for name, kind in operators.items() if not kind.arguments()}
    files = [path for layer in ("twinproof", "fastimpl") for path in sorted((root / layer / component).glob("*.py"))]
    for path in files:
        text = path.read_text(encoding="utf-8")
        lines, tree = text.splitlines(), trees.get_ast(text)
        for name, operator in operators.items():
            places = (start[0] for node in trees.ast_nodes(tree) for start, _ in operator.mutation_positions(node))
            for occurrence, line in enumerate(places):
                file = path.relative_to(root).as_posix()
                yield Mutant(component, file, line, name, occurrence, lines[line - 1].strip())
        counts: Counter[str] = Counter()
        for slip in slips_of(text):
            file, before = path.relative_to(root).as_posix(), lines[slip.line - 1].strip()
            yield Mutant(component, file, slip.line, slip.operator, counts[slip.operator], before)
            counts[slip.operator] += 1


def native_mutants(component: str, root: Path) -> Iterator[Mutant]:
    """The lines that universalmutator would write into a component's C++ and CUDA headers, each once."""
    maker = importlib.import_module("universalmutator.mutator")
    for path in sorted((root / "fastimpl" / "csrc" / component).glob("*.h")):
        source = path.read_text(encoding="utf-8").splitlines(keepends=True)
        with contextlib.redirect_stdout(io.StringIO()):
            made = maker.mutants_regexp(source, ruleFiles=_RULES, ignorePatterns=[*NOT_MUTATED])
        file, seen = path.relative_to(root).as_posix(), set()
        for line, after, *_ in made:
            before = source[line - 1]
            if (line, tokens_of(after)) in seen or not is_sensible(before, after):
                continue
            seen.add((line, tokens_of(after)))
            yield Mutant(component, file, line, "line", len(seen), before.strip(), after)


def changed(mutant: Mutant, text: str) -> str | None:
    """The file with the mutant in it; None where the change has no meaning."""
    if mutant.operator == "line":
        lines = text.splitlines(keepends=True)
        lines[mutant.line - 1] = mutant.after
        return "".join(lines)
    after: object
    if mutant.operator.startswith(PREFIX):
        after = with_slip(text, mutant.operator, mutant.occurrence)
    else:
        tools, making = importlib.import_module("cosmic_ray.plugins"), importlib.import_module("cosmic_ray.mutating")
        after = making.mutate_code(text, tools.get_operator(mutant.operator)(), mutant.occurrence)
    if after is None:
        return None
    try:
        return str(after) if meaning(after) != meaning(text) else None
    except SyntaxError:
        return None
