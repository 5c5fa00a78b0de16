"""Which changes of Python mean something, for ``ci/mutation.py``."""

from __future__ import annotations

import ast


def meaning(text: str) -> str:
    """A dump of a module's syntax without what never runs: annotations, and imports for them.

    Without thresholds as well (``regime``), as in C++: the way to a result depends on them, the result does not.
    """
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            # Fields of a dataclass keep that they are fields; their types are read by nobody.
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = [ast.Pass()]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "regime":
            node.args = []
    return ast.dump(tree)


def runs_on_import(text: str, line: int) -> bool:
    """Whether a line is in no function's body: one test, the first that imports the module, is said to run it."""
    try:
        functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.Lambda)]
    except SyntaxError:
        return False
    bodies = [node.body if isinstance(node.body, list) else [node.body] for node in functions]
    return not any(body[0].lineno <= line <= (body[-1].end_lineno or line) for body in bodies)
