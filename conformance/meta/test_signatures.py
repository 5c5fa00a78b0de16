"""An argument that is accepted and does nothing is an error: no public function has one.

Looks at the source of both implementations. A parameter counts as used when it is read; one that is only stored in an
attribute counts when the attribute is read anywhere. ``del`` is no use, and neither is a store that nobody reads. An
argument that a Protocol names counts when one of its implementations reads it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from conformance.harness.requirements import STEMS

_PACKAGES = ("twinproof", "refimpl", "fastimpl")
# What somebody else's interface hands over, and an implementation may do without; each with the reason.
_OF_AN_INTERFACE: dict[str, str] = {
    "twinproof/checkpoint/dcp.py: HuggingFaceStorageReader.set_up_storage_reader(is_coordinator=)": "torch's API",
    "twinproof/pipeline/modules.py: Pooled.forward(weights=)": "autograd hands its gradient to them",
    "twinproof/pipeline/tracing.py: Tracer.is_leaf_module(module_qualified_name=)": "torch.fx gives it",
    "twinproof/pipeline/sharding.py: LateBuckets.failure(first=)": "a check's answer; the rule of buckets names the id",
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


# What takes any arguments at the public surface, or has no signature; each with the reason.
_OF_ANY_ARGUMENTS: dict[str, str] = {
    "kvstore.save": "writer_options are those of HuggingFaceStorageWriter",
    "kvstore.KVStore.tell_written": "names of tables, as many as were written",
    "pipeline.TableShard": "nobody calls it: TableShard.make does",
    "checkpoint.StateDictAdapter": "a Protocol is not called",
    "checkpoint.HuggingFaceStorageReader.read_metadata": "torch's API",
    "checkpoint.HuggingFaceStorageReader.set_up_storage_reader": "torch's API",
    "checkpoint.HuggingFaceStorageWriter.set_up_storage_writer": "torch's API",
    "checkpoint.QuantizedHuggingFaceStorageReader.read_metadata": "torch's API",
    "checkpoint.QuantizedHuggingFaceStorageReader.set_up_storage_reader": "torch's API",
}
_ANY: set[Any] = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def _public_callables(component: ModuleType) -> Iterator[tuple[str, Any]]:
    """Classes and functions of ``__all__``, and the methods that are ours."""
    for name in vars(component)["__all__"]:
        value = getattr(component, name)
        if not callable(value):
            continue
        yield name, value
        for attribute in dir(value) if inspect.isclass(value) else ():
            found = inspect.getattr_static(value, attribute)
            method = getattr(found, "__func__", found)
            is_ours = inspect.isfunction(method) and method.__module__.partition(".")[0] in _PACKAGES
            if is_ours and not attribute.startswith("_"):
                yield f"{name}.{attribute}", method


def shapeless(component: ModuleType, stem: str) -> list[str]:
    """``stem.name`` of each public callable whose signature says nothing of its arguments."""
    found = []
    for name, value in _public_callables(component):
        try:
            kinds: set[Any] = {parameter.kind for parameter in inspect.signature(value).parameters.values()}
        except ValueError:
            kinds = _ANY
        if kinds & _ANY:
            found.append(f"{stem}.{name}")
    return found


def test_public_signatures_are_real() -> None:
    for package in ("refimpl", "fastimpl"):
        found = [line for stem in STEMS for line in shapeless(importlib.import_module(f"{package}.{stem}"), stem)]
        assert [line for line in found if line not in _OF_ANY_ARGUMENTS] == [], package
        assert [line for line in _OF_ANY_ARGUMENTS if line not in found] == [], package


def test_both_implementations_take_the_same_arguments() -> None:
    def shapes(package: str, stem: str) -> dict[str, list[tuple[Any, ...]]]:
        names = dict(_public_callables(importlib.import_module(f"{package}.{stem}")))
        known = {name: value for name, value in names.items() if f"{stem}.{name}" not in _OF_ANY_ARGUMENTS}
        found = {name: inspect.signature(value).parameters.values() for name, value in known.items()}
        return {name: [(p.name, p.kind, p.default) for p in each] for name, each in found.items()}

    for stem in STEMS:
        reference, fast = shapes("refimpl", stem), shapes("fastimpl", stem)
        assert {name: fast.get(name) for name in reference} == reference, stem


def test_a_shapeless_function_is_seen() -> None:
    def passes_on(*args: Any, **options: Any) -> None:
        """Says nothing of what it takes."""

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    class Made(metaclass=Meta):
        def method(self, **options: Any) -> None:
            """Neither does this."""

    Made.method.__module__ = "refimpl.made"
    component = ModuleType("component")
    vars(component).update({"passes_on": passes_on, "Made": Made, "__all__": ["passes_on", "Made"]})
    assert shapeless(component, "kvstore") == ["kvstore.passes_on", "kvstore.Made", "kvstore.Made.method"]
