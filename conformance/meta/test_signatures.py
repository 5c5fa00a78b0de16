"""An argument that is accepted and does nothing is an error: no public function has one.

Looks at the source of both implementations. A parameter counts as used when it is read; one that is only stored in an
attribute counts when the attribute is read anywhere. ``del`` is no use, and neither is a store that nobody reads. An
argument that a Protocol names counts when one of its implementations reads it.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

_PACKAGES = ("twinproof", "refimpl", "fastimpl")
# What somebody else's interface hands over, and an implementation may do without; each with the reason.
_OF_AN_INTERFACE: dict[str, str] = {
    "twinproof/checkpoint/dcp.py: HuggingFaceStorageReader.set_up_storage_reader(is_coordinator=)": "torch's API",
    "twinproof/pipeline/modules.py: Pooled.forward(weights=)": "autograd hands its gradient to them",
    "twinproof/pipeline/schedules.py: TrainPipelineFusedSparseDist.__init__(defer_dp_lookup=)": "True always holds",
    "refimpl/offload.py: Blocking.to_device(for_good=)": "each tensor has memory of its own",
    "refimpl/optimizers.py: sgd(states=)": "the signature of every update; this one has no state",
    "fastimpl/pipeline/stages.py: StreamedBatch.__init__(host_batch=)": "kept alive until its copy is over",
}


def _sources() -> Iterator[tuple[str, ast.Module]]:
    for package in _PACKAGES:
        root = Path(str(importlib.import_module(package).__file__)).parent
        for path in sorted(root.rglob("*.py")):
            yield f"{package}/{path.relative_to(root)}", ast.parse(path.read_text(encoding="utf-8"))


def _is_abstract(function: ast.FunctionDef) -> bool:
    body = [n for n in function.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
    return all(isinstance(node, (ast.Raise, ast.Pass)) for node in body)


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        inner = node.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_") else []
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for function in [node, *inner]:
            if isinstance(function, ast.FunctionDef):
                is_public = not function.name.startswith("_") or function.name == "__init__"
                if is_public and not _is_abstract(function):
                    yield prefix + function.name, function


def _stored_in(function: ast.FunctionDef, name: str) -> set[str] | None:
    """None when the parameter is read; otherwise the attributes that only hold it."""
    attributes: set[str] = set()
    stores: set[int] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
            for target, value in list(pairs):
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    pairs += list(zip(target.elts, value.elts, strict=False))
            for target, value in pairs:
                if isinstance(target, ast.Attribute) and isinstance(value, ast.Name) and value.id == name:
                    attributes.add(target.attr)
                    stores.add(id(value))
    reads = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]
    return None if any(id(read) not in stores for read in reads) else attributes


def _is_interface(node: ast.AST) -> bool:
    """Whether a class is a Protocol or abstract."""
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in getattr(node, "bases", [])]
    return any(isinstance(base, ast.Name) and base.id in ("Protocol", "ABC") for base in bases)


def _read_of_interfaces(sources: list[tuple[str, ast.Module]]) -> set[tuple[str, str]]:
    """(method, argument) that an interface of ours names, and at least one method of that name reads."""
    classes = [node for _, tree in sources for node in tree.body if isinstance(node, ast.ClassDef)]
    methods = [(node, each) for node in classes for each in node.body if isinstance(each, ast.FunctionDef)]
    named = {(each.name, arg.arg) for node, each in methods if _is_interface(node) for arg in each.args.args}
    return {
        (each.name, arg.arg)
        for _, each in methods
        for arg in each.args.args
        if (each.name, arg.arg) in named and not _is_abstract(each) and _stored_in(each, arg.arg) is None
    }


def unused_arguments() -> list[str]:
    """``file: function(argument=)`` for each that does nothing."""
    sources = list(_sources())
    read = {
        node.attr
        for _, tree in sources
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    found, shared = [], _read_of_interfaces(sources)
    for place, tree in sources:
        for name, function in _functions(tree):
            arguments = function.args
            for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
                if argument.arg in ("self", "cls") or argument.arg.startswith("_"):
                    continue
                if (name.rpartition(".")[2], argument.arg) in shared:
                    continue
                stored = _stored_in(function, argument.arg)
                if stored is not None and not stored & read:
                    found.append(f"{place}: {name}({argument.arg}=)")
    return found


def test_no_argument_does_nothing() -> None:
    found = unused_arguments()
    assert [line for line in found if line not in _OF_AN_INTERFACE] == []
    assert [line for line in _OF_AN_INTERFACE if line not in found] == []


def test_the_check_sees_what_it_is_for() -> None:
    source = """
class Thing:
    def __init__(self, used, stored, dropped, deleted, kept):
        del deleted
        self._used, self._stored = used, stored
        self.kept = kept
        print(used)
"""
    function = next(f for _, f in _functions(ast.parse(source)))
    results = {name: _stored_in(function, name) for name in ("used", "stored", "dropped", "deleted", "kept")}
    assert results == {"used": None, "stored": {"_stored"}, "dropped": set(), "deleted": set(), "kept": {"kept"}}
