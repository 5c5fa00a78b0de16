"""The stages of a step, the batches on their way through them, and what stands in a model for its sharded modules.

The stages are the seam between a pipeline and what it runs on. Dense gradients that nobody reduces among the ranks are
refused before the first update, or averaged where the pipeline is asked for it: no model trains apart.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import logging
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from twinproof.errors import ConfigError, PipelineError, check_flags, check_kind
from twinproof.optimizers import trained_params
from twinproof.pipeline.batches import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from twinproof.pipeline.config import untraceable
from twinproof.pipeline.jagged import with_items, with_tensors
from twinproof.pipeline.sharding import Awaitable
from twinproof.pipeline.tracing import (
    IN_PLACE,
    Reads,
    Tracer,
    alone,
    assigned,
    caller_regions,
    drawn_apart,
    draws,
    in_regions_of,
    is_other_part,
    is_sharded,
    left_as_they_were,
    memory_of,
    read_by,
    regions_of,
)

__all__ = [
    "LOOKUP_STREAMS",
    "Attachment",
    "BatchContext",
    "Call",
    "DenseGradients",
    "FromBatch",
    "Options",
    "Placed",
    "Prepared",
    "Stages",
    "Traces",
    "check_asked",
    "check_overrides",
    "check_placement",
    "cut_off",
    "find_calls",
    "is_dtensor",
    "looked_up",
    "move_batch",
    "outdated",
    "refuse",
    "unwrapped",
    "without_graph",
]

logger = logging.getLogger("twinproof.pipeline")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_TAKES = (getattr, operator.getitem)
_INSIDE = {"DistributedDataParallel": "module", "DistributedModelParallel": "module", "OptimizedModule": "_orig_mod"}


def _layers(model: Any) -> Iterator[Any]:
    """A model, and what is inside of each wrapper, data-parallel or of ``torch.compile``."""
    yield model
    while name := next((_INSIDE[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in _INSIDE), ""):
        model = getattr(model, name)
        yield model


def unwrapped(model: Any) -> Any:
    """The model inside of wrappers: they call it, and add nothing to trace."""
    return list(_layers(model))[-1]


class Call:
    """One sharded module, and how its arguments come from a batch.

    ``arguments(values)`` gives (positional, keyword) arguments, by the model's own operations; ``postprocs`` are the
    modules that it calls on the way; ``formula`` is equal for equal ways from a batch to the arguments.
    """

    def __init__(
        self,
        name: str,
        module: Any,
        arguments: Callable[[FromBatch], Arguments],
        postprocs: Mapping[str, torch.nn.Module],
        formula: tuple[Any, ...],
    ) -> None:
        self.name, self.module, self.arguments, self.postprocs = name, module, arguments, dict(postprocs)
        self.formula = (name, *formula)
        # Whether more is done on the way than to take a part of the batch.
        self.computes = any(step[0] != "placeholder" and step[1] not in _TAKES for step in formula[:-1])

    @property
    def way(self) -> tuple[Any, ...]:
        """Equal where the same modules, themselves, are called with the same."""
        return self.formula, self.module, self.postprocs

    def is_late(self, optimizer: torch.optim.Optimizer, trained: set[int]) -> bool:
        """Whether the optimizer updates what the lookup reads: data-parallel tables, processors, tied weights."""
        listed = getattr(self.module, "listed_parameters", self.module.parameters)
        read = {id(param) for param in listed()}
        if read and not trained:  # The first module that reads anything lists what is trained, for all of a step.
            trained.update(id(param) for param in trained_params(optimizer))
        return not read.isdisjoint(trained)


def _evaluated(argument: Any, value: Callable[[torch.fx.Node], Any]) -> Any:
    """What a node is given, as the model gives it: lists and dictionaries of a graph are of fx's own types."""
    if isinstance(argument, torch.fx.Node):
        return value(argument)
    if isinstance(argument, (list, tuple)):
        parts = [_evaluated(part, value) for part in argument]
        # A tuple that has names is a call of its class in a graph.
        return parts if isinstance(argument, list) else tuple(parts)
    if isinstance(argument, dict):
        return {key: _evaluated(part, value) for key, part in argument.items()}
    if isinstance(argument, slice):
        return slice(*(_evaluated(part, value) for part in (argument.start, argument.stop, argument.step)))
    return argument


class FromBatch:
    """Evaluates nodes of a graph from a batch; raises LookupError for what needs more than the batch.

    Attributes:
        results: of the modules that were called on the way to sharded ones, by name; each was called once.
        asked: what each of them was called with.
    """

    def __init__(self, batch: Callable[[], Any], postprocs: Mapping[str, torch.nn.Module]) -> None:
        self._batch, self._values, self._postprocs = batch, dict[torch.fx.Node, Any](), postprocs
        self.results: dict[str, Any] = {}
        self.asked: dict[str, Arguments] = {}

    def value(self, node: torch.fx.Node) -> Any:
        """What the model computes there."""
        if node not in self._values:
            self._values[node] = self._compute(node)
        return self._values[node]

    def _compute(self, node: torch.fx.Node) -> Any:
        if node.op == "placeholder":
            return self._batch()
        positional, named = _evaluated((node.args, node.kwargs), self.value)
        with in_regions_of(node):
            return self._called(node, positional, named)

    def _called(self, node: torch.fx.Node, positional: Any, named: Any) -> Any:
        if node.op == "call_function":
            return node.target(*positional, **named)  # type: ignore[operator]
        if node.op == "call_method":
            return getattr(positional[0], str(node.target))(*positional[1:], **named)
        if str(node.target) in self._postprocs:
            # Its own forward, for the pipeline's stands in for it on the module.
            module = self._postprocs[str(node.target)]
            forward = vars(module).get("forward")
            forward = forward.replaced if isinstance(forward, Prepared) else forward
            forward = functools.partial(type(module).forward, module) if forward is None else forward
            self.asked[str(node.target)] = tuple(positional), dict(named)
            self.results[str(node.target)] = forward(*positional, **named)
            return self.results[str(node.target)]
        raise LookupError(node.target)


def _postprocs_of(graph: torch.fx.Graph, modules: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Modules that may run ahead of the model: without parameters that are trained or dropout, and called once."""
    names = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    return {
        name: modules[name]
        for name in names
        if names.count(name) == 1
        and not is_sharded(modules[name])
        and not any(param.requires_grad for param in modules[name].parameters())
        and not any(isinstance(part, torch.nn.modules.dropout._DropoutNd) for part in modules[name].modules())
    }


def _on_the_way(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes that a node's inputs are computed from."""
    found, left = dict[torch.fx.Node, None](), list(node.all_input_nodes)
    while left:
        each = left.pop()
        if each not in found:
            found[each] = None
            left += each.all_input_nodes
    return list(found)


def _needs_more(node: torch.fx.Node, postprocs: Mapping[str, Any]) -> bool:
    """Whether a node needs more than the batch: another argument, a parameter, a module that must not run ahead."""
    batch = next(iter(node.graph.nodes))
    return not all(
        each is batch
        or each.op in ("call_function", "call_method")
        or (each.op == "call_module" and str(each.target) in postprocs)
        for each in _on_the_way(node)
    )


def _changes(node: torch.fx.Node) -> list[torch.fx.Node]:
    """What a node changes in place, as far as it can be told: whatever a call is given whose result nobody uses."""
    target: Any = node.target
    first = [part for part in node.args[:1] if isinstance(part, torch.fx.Node)]
    if node.op == "call_method":
        return first if target.endswith("_") and not target.endswith("__") else []
    name, out = getattr(target, "__name__", ""), node.kwargs.get("out")
    is_own = isinstance(target, FunctionType) and target.__module__.partition(".")[0] != "torch"
    if not node.users and target is not assigned and (node.op == "call_module" or is_own):
        return list(node.all_input_nodes)
    is_named_so = name.endswith("_") and not name.endswith("__")
    changed = first if is_named_so or target is assigned or target in IN_PLACE.values() else []
    return [*changed, *([out] if isinstance(out, torch.fx.Node) else [])]


def _numbered(graph: torch.fx.Graph) -> dict[torch.fx.Node, int]:
    """A number for each node, equal for nodes that compute the same of the same."""
    numbers, seen = dict[torch.fx.Node, int](), dict[Any, int]()
    for node in graph.nodes:
        arguments = repr(torch.fx.node.map_arg((node.args, node.kwargs), lambda each: f"%{numbers[each]}"))
        numbers[node] = seen.setdefault((node.op, node.target, arguments), len(seen))
    return numbers


def _changed_before(node: torch.fx.Node, numbers: Mapping[torch.fx.Node, int], sharded: Iterable[str]) -> bool:
    """Whether the forward changes in place, before, what a node's arguments are made of; ``numbers``: ``_numbered``.

    Ahead of the model such a change would be missed, or made twice. ``sharded`` modules change nothing.
    """
    way = _on_the_way(node)
    # Of what is only selected from, another part may be changed: of a list of ids, of a batch.
    whole = {
        numbers[part]
        for user in (node, *way)
        if user.op != "call_function" or user.target not in _TAKES
        for part in user.all_input_nodes
    }
    known = {numbers[part] for part in way}
    for each in itertools.takewhile(lambda each: each is not node, node.graph.nodes):
        changes = _changes(each) if each.op != "call_module" or each.target not in sharded else []
        # An attribute that was assigned is what is selected from then on.
        is_known = each.target is not assigned and any(numbers[changed] in known for changed in changes)
        parts = (part for changed in changes for part in (changed, *_on_the_way(changed)))
        if is_known or any(numbers[part] in whole for part in parts):
            return True
    return False


def _formula_of(node: torch.fx.Node) -> tuple[Any, ...]:
    """What a node's arguments are computed from and how; names of nodes, which other nodes decide too, are no part."""
    numbers: dict[torch.fx.Node, int] = {}
    steps: list[Any] = []

    def number(each: torch.fx.Node) -> str:
        if each not in numbers:
            arguments = repr(torch.fx.node.map_arg((each.args, each.kwargs), number))
            numbers[each] = len(steps)
            steps.append((each.op, "" if each.op == "placeholder" else each.target, arguments, regions_of(each)))
        return f"%{numbers[each]}"

    arguments = repr(torch.fx.node.map_arg((node.args, node.kwargs), number))
    return (*steps, arguments)


def find_calls(
    model: torch.nn.Module, *, pipeline_postproc: bool = False, known: Sequence[Call] = (), reads: Reads | None = None
) -> list[Call]:
    """The sharded modules of a model of one argument, in the order of their calls.

    Further arguments have their defaults, for a pipeline calls the model with the batch alone.

    A module whose arguments need more than the batch, or are changed in place or drawn at random, is left to the model,
    with a line in the log. With ``pipeline_postproc`` modules between the batch and a sharded one run ahead with its
    exchange, once a batch, if nothing in them is trained. ``known`` are those of another mode: a trace that fails
    behind the same calls is taken for theirs. ``reads`` gets what the trace goes by.

    Raises:
        ConfigError: a model that cannot be traced, or that calls a sharded module twice.
    """
    inner, failure = unwrapped(model), None
    if not any(is_sharded(module) for module in inner.modules()):
        return []
    has_device = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    tracer, devices = Tracer(reads), [torch.cuda.current_device()] if has_device else []
    looked_into = [module for name, module in inner.named_modules() if not tracer.is_leaf_module(module, name)]
    try:
        # A forward that draws by itself draws in a trace, too.
        noted = contextlib.nullcontext() if reads is None else reads.noted()
        with alone(), drawn_apart(devices), left_as_they_were(looked_into), noted, tracer.regions_noted():
            try:
                graph = tracer.trace(inner)
            except Exception as error:
                graph, failure = tracer.graph, untraceable(inner, error)
                failure.__cause__ = error
    finally:
        # A function of torch's that calls itself keeps the tracer, and with it the model, until a garbage collection.
        tracer.root, tracer.tensor_attrs, tracer.submodule_paths = torch.nn.Module(), {}, None
        tracer.reads = None
    calls = _calls_in(graph, inner, pipeline_postproc=pipeline_postproc) if known or failure is None else []
    try:
        if failure is not None and (not calls or [call.formula for call in calls] != [call.formula for call in known]):
            raise failure
    finally:
        # Its traceback has this frame, which would keep it, and with it the model.
        del failure
    return calls


def _calls_in(graph: torch.fx.Graph, inner: torch.nn.Module, *, pipeline_postproc: bool) -> list[Call]:
    modules, calls = dict(inner.named_modules()), dict[str, Call]()
    postprocs = _postprocs_of(graph, modules) if pipeline_postproc else {}
    sharded = {name for name, module in modules.items() if is_sharded(module)}
    numbers, left = _numbered(graph), set[str]()
    for node in graph.nodes:
        if node.op != "call_module" or node.target not in sharded:
            continue
        name, why = str(node.target), ""
        if _needs_more(node, postprocs):
            why = "its input is more than the batch"
        elif _changed_before(node, numbers, sharded):
            why = "the forward changes its input in place"
        elif any(map(draws, _on_the_way(node))):
            why = "its input is drawn at random"
        # What is prepared belongs to one call: in whichever order, no other one may find it, or find nothing.
        if name in calls or (name in left and not why):
            message, expected = "a sharded module is called twice in one forward", "one call of each"
            raise ConfigError(message, got=name, expected=expected, where=type(inner).__name__)
        if why:
            logger.warning("%s is not pipelined: %s", name, why)
            left.add(name)
            continue
        used = {str(each.target) for each in _on_the_way(node) if each.op == "call_module"}
        mine = {target: postprocs[target] for target in postprocs if target in used}
        calls[name] = Call(name, modules[name], _arguments_of(node), mine, _formula_of(node))
    return list(calls.values())


def _arguments_of(node: torch.fx.Node) -> Callable[[FromBatch], Arguments]:
    def arguments(values: FromBatch) -> Arguments:
        found: Arguments = _evaluated((node.args, node.kwargs), values.value)
        return found

    return arguments


class Traces:
    """The sharded modules of a model as its forward calls them in the mode of the moment: a trace fixes ``if`` s.

    Attributes:
        calls: as of the last ``follow``.

    Raises:
        ConfigError: see ``find_calls``.
    """

    def __init__(self, model: torch.nn.Module, *, pipeline_postproc: bool) -> None:
        self._model, self._pipeline_postproc = model, pipeline_postproc
        self.calls: list[Call] = []
        self._reads, self.calls = self._traced()
        self._found = {self._modes(): (self._reads, self.calls)}
        self._seen = self._modes(), self._modes_ahead()

    def _traced(self) -> tuple[Reads, list[Call]]:
        """A trace of now, and what it goes by."""
        # What is looked into; what is not decides nothing on the way to a sharded module.
        inner, is_leaf = unwrapped(self._model), Tracer().is_leaf_module
        self._open = [module for name, module in inner.named_modules() if not is_leaf(module, name)]
        reads, postproc = Reads(self._open), self._pipeline_postproc
        return reads, find_calls(self._model, pipeline_postproc=postproc, known=self.calls, reads=reads)

    def has_hooks(self) -> bool:
        """Whether somebody hooked a module on the way, or all modules, who may change what is called with what.

        Or has put a forward on the model itself: a trace follows that of its class.
        """
        everywhere: Any = torch.nn.modules.module
        if everywhere._global_forward_pre_hooks or everywhere._global_forward_hooks:
            return True
        on_the_way = {module for call in self.calls for module in (call.module, *call.postprocs.values())}
        modules = (*self._open, *_layers(self._model), *on_the_way)
        is_hooked = any(each._forward_pre_hooks or each._forward_hooks for each in modules)
        return is_hooked or "forward" in vars(unwrapped(self._model))

    def _modes(self) -> tuple[bool, ...]:
        return tuple(module.training for module in self._open)

    def _modes_ahead(self) -> tuple[bool, ...]:
        """Of the modules that run ahead."""
        ahead = (module for call in self.calls for module in call.postprocs.values())
        return tuple(each.training for module in ahead for each in module.modules())

    def follow(self, check: Callable[[list[Call]], None], agree: Callable[[int], int]) -> bool:
        """Whether what is computed ahead is another thing in the mode of now, or by what is read now.

        ``check`` may refuse its calls. ``agree``, the least of all ranks' words, is asked where plain values decide. A
        mode is traced once, and again where what it goes by has changed.
        """
        modes, modes_ahead = self._modes(), self._modes_ahead()
        is_same, asks = self._reads.are_same() and (modes, modes_ahead) == self._seen, self._reads.has_values
        if agree(int(is_same)) if asks else is_same:
            return False
        if modes not in self._found or not self._found[modes][0].are_same():
            reads, calls = self._traced()
            check(calls)
            modes = self._modes()
            self._found[modes] = reads, calls
        (self._reads, found), before = self._found[modes], self.calls
        is_other = [call.way for call in found] != [call.way for call in before]
        is_other |= modes_ahead != self._seen[1]
        if asks:
            is_other = not agree(int(not is_other))
        self.calls = found if is_other else before
        self._seen = modes, self._modes_ahead()
        return is_other


class Attachment:
    """The modules' ``forward`` replaced by one that hands out what was prepared; ``close()`` puts them back.

    Args:
        calls: whose modules.
        result_of: module name, what it is called with -> the prepared result; called once for each forward of the
            module. Modules hold it, so that it holds no pipeline.

    One that is dropped is closed: modules of a pipeline that has gone are nobody's.
    """

    def __init__(self, calls: list[Call], result_of: Callable[[str, Arguments], Any]) -> None:
        self._prepared: dict[str, Prepared] = {}
        self._driven: dict[str, Any] = {call.name: call.module for call in calls}
        self._ahead = {name for call in calls for name in call.postprocs}
        for call in calls:
            self._driven |= call.postprocs
        for name, module in self._driven.items():
            prepared = Prepared(module, name, result_of, vars(module).get("forward"))
            module.forward = self._prepared[name] = prepared

    def __del__(self) -> None:
        self.close()

    def is_overlaid(self) -> bool:
        """Whether somebody has changed the forward of a module that runs ahead: what was made ahead is another's.

        Or whether another pipeline has taken a module over, and perhaps given it back.
        """
        now = {name: vars(module).get("forward") for name, module in self._driven.items()}
        others = {name for name, forward in now.items() if forward is not self._prepared[name]}
        return any(name in self._ahead or now[name] is None or isinstance(now[name], Prepared) for name in others)

    def close(self) -> None:
        """Twice is harmless. What somebody put on a module meanwhile stays, and reaches the module's own forward."""
        for name, prepared in self._prepared.items():
            module = self._driven[name]
            prepared.close()
            if vars(module).get("forward") is prepared:
                del module.forward
                if prepared.replaced is not None:
                    # Somebody's own, as a hook of another library: it is the user's, and not ours to drop.
                    module.forward = prepared.replaced
        self._prepared = {}


class Prepared:
    """Stands in for a driven module's forward. A copy of the module, which no pipeline drives, has its own forward.

    It does not hold its module, which holds it: a model that is dropped is gone at once, with its tables.

    Attributes:
        replaced: the forward that the module itself had, None where it has its class's only. What another pipeline
            put there is none of the module's.
    """

    def __init__(
        self,
        module: Any,
        name: str,
        result_of: Callable[[str, Arguments], Any] | None,
        before: Callable[..., Any] | None = None,
    ) -> None:
        self._module, self._name, self._result_of = weakref.ref(module), name, result_of
        own = before.replaced if isinstance(before, Prepared) else before
        self.replaced: Callable[..., Any] | None = own

    def close(self) -> None:
        """Be the module's own forward from now on, for whoever still calls it."""
        self._result_of = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._result_of is None:
            return self._own()(*args, **kwargs)
        try:
            return self._result_of(self._name, (args, kwargs))
        except KeyError:
            raise PipelineError(
                "a module of a pipeline was called when nothing was prepared for it",
                got="a call",
                expected="detach() before the model is called directly, and the module once in a forward",
                where=self._name,
            ) from None

    def __reduce__(self) -> Any:
        # Not the pipeline with its batches, which would come along with what is called here.
        if self.replaced is not None:
            return _itself, (self.replaced,)
        return _plain, (self._driven(), self._name)

    def _driven(self) -> Any:
        module = self._module()
        if module is None:
            raise PipelineError("the module of this forward has gone", got=None, expected="a module", where=self._name)
        return module

    def _own(self) -> Callable[..., Any]:
        return self.replaced or functools.partial(type(self._driven()).forward, self._driven())


def check_asked(name: str, ahead: Arguments, given: Arguments, batch: Any, *, is_hooked: bool) -> None:
    """Demand that a module is called with what was computed ahead. Raises PipelineError.

    Of a model without hooks only what is taken from the batch is compared, which costs nothing where it is the same.
    """
    if not is_hooked and is_other_part(ahead, given, functools.cache(lambda: memory_of(batch))):
        raise PipelineError(
            "the forward takes another part of the batch than torch.fx has seen",
            got="a branch on what the batch is: isinstance, is, hasattr",
            expected="a function behind torch.fx.wrap that branches, or attributes that every batch has",
            where=name,
        )
    if is_hooked and not _same(ahead, given):
        raise PipelineError(
            "a hook or a forward of the model's own changed what a module is called with whose result was made ahead",
            got="other arguments than the forward's",
            expected="a loader, or the model's own forward, that makes the change; or hooks that only look",
            where=name,
        )


def _same(one: Any, other: Any) -> bool:
    """Whether two arguments are equal; what is of another library is told apart by its type alone."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and bool(torch.equal(one, other))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (KeyedJaggedTensor, JaggedTensor)):
        parts = ("keys", "values", "weights_or_none", "lengths")
        return all(_same(getattr(one, part)(), getattr(other, part)()) for part in parts if hasattr(one, part))
    return not isinstance(one, (int, float, str, bool)) or one == other


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


def _plain(module: Any, name: str) -> Prepared:
    """A copied module's own forward, which does not hold it either."""
    return Prepared(module, name, None)


def is_dtensor(param: torch.Tensor) -> bool:
    """Whether it is one of torch's distributed tensors."""
    # Without the module nobody can have made one.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(param, module.DTensor)


def _by_fsdp(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """What ``FullyShardedDataParallel`` reduces: all but what it was told to ignore."""
    ignored = {id(param) for param in getattr(module, "_ignored_params", ())}
    yield from (param for param in module.parameters() if id(param) not in ignored)


def _by_replicate(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """What torch's composable ``replicate`` reduces, which it lists in its first forward; none where it was not used.

    Parameters of the newer one, made of FSDP's parts, are DTensors.
    """
    contract = sys.modules.get("torch.distributed._composable.contract")
    states = {} if contract is None else vars(module).get(contract.STATE_KEY, {})
    for state in (each for each in states.values() if hasattr(each, "_param_list")):
        if state.has_initialized:
            yield from state._param_list
        else:
            ignored = {id(param) for each in state._init_args[1] for param in each.parameters()}
            yield from (param for param in module.parameters() if id(param) not in ignored)


def _wrapped(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters that a data-parallel wrapper in the model reduces; each kind can be told to leave some out."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            ignored = set(module.parameters_to_ignore)
            yield from (param for name, param in module.module.named_parameters() if name not in ignored)
        elif fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            yield from _by_fsdp(module)
        else:
            yield from _by_replicate(module)


def _has_hook(param: torch.Tensor) -> bool:
    return bool(param._backward_hooks) or bool(getattr(param, "_post_accumulate_grad_hooks", None))


def _trained(params: Iterable[torch.Tensor]) -> list[tuple[int, bool]]:
    return [(id(param), param.requires_grad) for param in params]


class DenseGradients:
    """The dense parameters that an optimizer updates, of one model.

    Args:
        model: in which sharded modules reduce by themselves.
        optimizer: whose parameters count.
        foreign: whether parameters count that the model does not have, as where a custom forward is called.

    Attributes:
        params: those that no wrapper reduces, in the optimizer's order.
        names: of each.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Any, *, foreign: bool) -> None:
        names = {id(param): name for name, param in model.named_parameters()}
        sharded = {id(param) for module in model.modules() if is_sharded(module) for param in module.parameters()}
        wrapped = {id(param) for param in _wrapped(model)} | sharded
        self.params: list[torch.Tensor] = []
        # What is known by its id is held, so that nothing else can have it.
        self._optimizer, self._listed = optimizer, trained_params(optimizer)
        self._seen = _trained(self._listed)
        for param in self._listed:
            mine = id(param) in names or (foreign and type(param) is torch.nn.Parameter)
            if mine and param.requires_grad and id(param) not in wrapped and not is_dtensor(param):
                self.params.append(param)
        self.names = [names.get(id(param), "a parameter that is not the model's") for param in self.params]

    def is_current(self) -> bool:
        """Whether the optimizer has the parameters that it had, and trains those of them that it did."""
        return self._seen == _trained(trained_params(self._optimizer))

    def check(self) -> None:
        """Raises ConfigError if nothing is seen to reduce the gradient of a parameter."""
        alone = [name for name, param in zip(self.names, self.params, strict=True) if not _has_hook(param)]
        if alone:
            raise ConfigError(
                "nobody reduces the dense gradients of several ranks, which would train apart",
                got=alone,
                expected="DistributedDataParallel, fully_shard, a gradient hook, or reduce_dense_gradients=True; "
                "reduce_dense_gradients=False where they are reduced in a way that cannot be seen",
                where="reduce_dense_gradients",
            )

    def reduce(self, process_group: Any, world_size: int) -> None:
        """The mean over ranks, in place. A parameter without gradient counts as 0, and has none if no rank has one."""
        if not self.params:
            return
        # More than all ranks have where any is refused, so that all refuse it and nobody waits.
        grads_of = (param.grad for param in self.params)
        found = [0 if grad is None else 1 if grad.layout is torch.strided else world_size + 1 for grad in grads_of]
        present = torch.tensor(found, dtype=torch.int64, device=self.params[0].device)
        dist.all_reduce(present, group=process_group)
        counts: list[int] = present.tolist()
        sparse = [name for name, count in zip(self.names, counts, strict=True) if count > world_size]
        if sparse:
            raise ConfigError(
                "sparse gradients are not reduced",
                got=sparse,
                expected="dense gradients",
                where="reduce_dense_gradients",
            )
        used = [param for param, count in zip(self.params, counts, strict=True) if count]
        for params in _alike(used):
            grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
            flat = torch.cat([grad.reshape(-1) for grad in grads]).div_(world_size)
            dist.all_reduce(flat, group=process_group)
            parts = torch.split(flat, [param.numel() for param in params])
            for param, grad, part in zip(params, grads, parts, strict=True):
                param.grad = grad.copy_(part.view(grad.shape))


def _alike(params: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Parameters by dtype and device, in order."""
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for param in params:
        groups.setdefault((param.dtype, param.device), []).append(param)
    yield from groups.values()


LOOKUP_STREAMS = ("data_dist", "new", "current")

REASONS = {
    "apply_jit": "modules are not scripted: script the model's own before the pipeline is made",
    "free_features_storage_early": "a batch's storage is needed again after a loader's error, detach() or an edit",
    "clear_data_dist_inputs": "what an exchange was given is freed by itself when its lookup is over",
}


# What torchrec's progress() calls, or makes its forwards of, and ours has no place for.
NOT_CALLED = (
    "_connect",
    "_copy_batch_to_gpu",
    "_grad_swap",
    "_mlp_forward",
    "_mlp_optimizer_step",
    "_pipeline_model",
    "_pipelined_forward_type",
    "_progress_prefetch",
    "_set_module_context",
    "_validate_optimizer",
)


@dataclass(frozen=True)
class Placed:
    """Where lookups run: the stream, behind the start of the next exchange or not, and before the optimizer or not.

    ``priority``: of a stream of their own, as torch's. ``max_blocks``: of their grids, or None. Raises ConfigError.
    """

    stream: str = "data_dist"
    after_dist: bool = False
    before_optimizer: bool = False
    priority: int = 0
    max_blocks: int | None = None

    def __post_init__(self) -> None:
        if type(self.priority) is not int or (self.priority != 0 and self.stream != "new"):
            expected = 'an integer, and 0 unless emb_lookup_stream is "new"'
            got = (self.priority, self.stream)
            raise ConfigError("not a priority", got=got, expected=expected, where="emb_lookup_stream_priority")
        if self.max_blocks is not None and (type(self.max_blocks) is not int or self.max_blocks < 1):
            raise ConfigError("not a grid", got=self.max_blocks, expected=">= 1", where="emb_lookup_max_blocks")


@dataclass(frozen=True)
class Options:
    """What all schedules understand; each class's constructor says which of it is asked for by which name.

    Attributes:
        sync_interval_batches: every how many batches a ``DMPCollection`` averages its replicas; None is never.
        enqueues_behind_forward: whether the last batch ahead is pulled behind the forward, not before it.
        copies_in_place: whether copies on the device are allocated by the caller's stream.
        placed: where lookups run; those that belong to the forward run where it does.
        looks_up_before_update: whether a batch may be looked up before the update of the one before it.

    Raises:
        ConfigError: ``apply_jit`` and the two behind it, which have no meaning here; an interval below 1; a
            ``custom_model_fwd`` that cannot be called.
    """

    execute_all_batches: bool = True
    custom_model_fwd: Callable[[Any], tuple[torch.Tensor, Any]] | None = None
    process_group: Any = None
    engine: Any = None
    reduce_dense_gradients: bool | None = None
    context_type: Any = None
    pipeline_postproc: bool = False
    sync_interval_batches: int | None = None
    enqueues_behind_forward: bool = False
    copies_in_place: bool = False
    strict: bool = False
    placed: Placed = Placed("current")
    looks_up_before_update: bool = False
    apply_jit: bool = False
    free_features_storage_early: bool = False
    clear_data_dist_inputs: bool = False

    def __post_init__(self) -> None:
        if self.custom_model_fwd is not None:
            check_kind(self.custom_model_fwd, Callable, "custom_model_fwd", "a function of the batch, or None")
        check_flags(
            execute_all_batches=self.execute_all_batches,
            reduce_dense_gradients=self.reduce_dense_gradients,
            pipeline_postproc=self.pipeline_postproc,
            enqueue_batch_after_forward=self.enqueues_behind_forward,
            enable_inplace_copy_batch=self.copies_in_place,
            strict=self.strict,
            apply_jit=self.apply_jit,
            free_features_storage_early=self.free_features_storage_early,
            clear_data_dist_inputs=self.clear_data_dist_inputs,
        )
        refuse(
            apply_jit=self.apply_jit,
            free_features_storage_early=self.free_features_storage_early,
            clear_data_dist_inputs=self.clear_data_dist_inputs,
        )
        interval = self.sync_interval_batches
        if interval is not None and (type(interval) is not int or interval < 1):
            where = "dmp_collection_sync_interval_batches"
            raise ConfigError("not a number of batches", got=interval, expected=">= 1, or None", where=where)


def refuse(**given: bool) -> None:
    """Raises ConfigError, with the reason, for an argument of torchrec's that is asked for and has no meaning here."""
    for name, value in given.items():
        if value:
            raise ConfigError(f"{name}: {REASONS[name]}", got=value, expected=False, where=name)


def check_placement(
    emb_lookup_stream: str,
    use_emb_lookup_stream: bool | None,
    after_dist: bool,
    before_optimizer: bool,
    after_opt: bool | None,
) -> Placed:
    """Where lookups run; two names of torchrec PR 2916 are taken too. Raises ConfigError for what contradicts."""
    check_flags(
        use_emb_lookup_stream=use_emb_lookup_stream,
        embedding_lookup_after_data_dist=after_dist,
        embedding_lookup_before_optimizer=before_optimizer,
        embedding_lookup_after_opt=after_opt,
    )
    if emb_lookup_stream not in LOOKUP_STREAMS:
        raise ConfigError(
            "not a lookup stream", got=emb_lookup_stream, expected=LOOKUP_STREAMS, where="emb_lookup_stream"
        )
    before = before_optimizer or after_opt is False
    if (before_optimizer and after_opt) or (before and after_dist):
        placements = {
            "embedding_lookup_before_optimizer": before_optimizer,
            "embedding_lookup_after_data_dist": after_dist,
            "embedding_lookup_after_opt": after_opt,
        }
        raise ConfigError(
            "placements of the lookup that contradict", got=placements, expected="at most one place", where="lookup"
        )
    if use_emb_lookup_stream is None:
        return Placed(emb_lookup_stream, after_dist, before)
    stream = "new" if use_emb_lookup_stream else "data_dist"
    # The default cannot be told from a stream that was asked for, any other can.
    if emb_lookup_stream not in ("data_dist", stream):
        streams = {"emb_lookup_stream": emb_lookup_stream, "use_emb_lookup_stream": use_emb_lookup_stream}
        raise ConfigError("lookup streams that contradict", got=streams, expected=stream, where="emb_lookup_stream")
    return Placed(stream, after_dist, before)


def check_overrides(kind: type) -> None:
    """Raises ConfigError for a subclass with methods of torchrec's pipelines that nothing here would call."""
    for each in kind.__mro__:
        if "_schedule" in vars(each):
            # An implementation's own class; what is above it belongs to the project.
            return
        overridden = [name for name in NOT_CALLED if name in vars(each)]
        if overridden:
            message = "methods that no stage of this pipeline calls"
            raise ConfigError(message, got=overridden, expected="none of them", where=each.__qualname__)


def move_batch(
    batch: Any, move: Callable[[torch.Tensor], torch.Tensor], device: torch.device, copy_stream: Any = None
) -> Any:
    """The batch with each tensor moved; what is none of ours and has a ``to`` of its own is asked to go.

    Raises:
        ConfigError: a ``to`` that takes no ``data_copy_stream``, where it is told one.
    """
    if isinstance(batch, torch.Tensor):
        return move(batch)
    if isinstance(batch, KeyedJaggedTensor):
        return batch._map(move)
    if isinstance(batch, (JaggedTensor, KeyedTensor)):
        return with_tensors(batch, move)
    if hasattr(batch, "to"):
        return _asked_to_go(batch, device, copy_stream)
    if isinstance(batch, (dict, list)):
        return with_items(batch, lambda part: move_batch(part, move, device, copy_stream))
    if isinstance(batch, tuple):
        parts = [move_batch(part, move, device, copy_stream) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        # Its constructor may take other fields, and has done its work.
        moved = copy.copy(batch)
        for field in dataclasses.fields(batch):
            # Also where it is frozen.
            object.__setattr__(moved, field.name, move_batch(getattr(batch, field.name), move, device, copy_stream))
        return moved
    return batch


def _asked_to_go(batch: Any, device: torch.device, copy_stream: Any) -> Any:
    if copy_stream is None:
        return batch.to(device, non_blocking=True)
    if "data_copy_stream" not in inspect.signature(batch.to).parameters:
        raise ConfigError(
            "a batch whose to() takes no data_copy_stream",
            got=type(batch).__name__,
            expected="to(device, non_blocking, data_copy_stream)",
            where="enable_inplace_copy_batch",
        )
    return batch.to(device, non_blocking=True, data_copy_stream=copy_stream)


class BatchContext:
    """One batch on its way; also the context that stages are given with it, unless the pipeline has a context_type.

    Attributes:
        batch: on the device.
        index: how many batches came before it since the pipeline was made or reset.
        contexts, dists, inputs, results: by module name, as far as they have come.
        asked: what the arguments of each module were that runs ahead.
        prepared: what modules on the way to sharded ones gave, by name.
        read: those modules, and what each of them reads, as it was behind its call; see ``tracing.read_by``.
        regions: ``tracing.caller_regions`` as something was computed ahead; None where nothing was.
        started, exchanged: whether the stages of its exchange of sizes, and of ids, were called in their places.
        was_sent, was_received: whether they did something, for whoever calls them by hand too.
        failure: what its exchange of ids raised, which is raised when it is this batch's turn.
        with_grad: whether a backward would find the lookups; None before them.
        pairs: SemiSync's lookups and what the forward sees of them, (looked up, leaf) each.
    """

    def __init__(self, batch: Any) -> None:
        self.batch, self.index = batch, 0
        self.lent: Any = None  # It and its tensors, where they may be the loader's.
        self.given_context: Any = None
        self.failure: Exception | None = None
        self.with_grad: bool | None = None
        self.started = self.exchanged = self.was_sent = self.was_received = False
        self.contexts: dict[str, Any] = {}
        self.dists: dict[str, Any] = {}
        self.inputs: dict[str, Any] = {}
        self.results: dict[str, Any] = {}
        self.prepared: dict[str, Any] = {}
        self.read: list[tuple[torch.nn.Module, list[Any]]] = []
        self.regions: Any = None
        self.asked: dict[str, Arguments] = {}
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def context(self) -> Any:
        """What stages are given with the batch."""
        return self if self.given_context is None else self.given_context

    @property
    def postproc_fwd_results(self) -> dict[str, Any]:
        """Torchrec's name for what is prepared."""
        return self.prepared

    @contextlib.contextmanager
    def reading(self, calls: Iterable[Call], modules: Iterable[torch.nn.Module]) -> Iterator[None]:
        """Note what modules that run ahead read: behind their calls, which may count, and where one of them raises."""
        self.regions = caller_regions() if any(call.computes for call in calls) else None
        try:
            yield
        finally:
            self.read = [(module, read_by(module)) for module in modules]

    def is_cast_so(self) -> bool:
        """Whether the caller is in the regions of autocast in which something was computed ahead for the batch."""
        return self.regions is None or self.regions == caller_regions()

    def is_read_so(self) -> bool:
        """Whether what ran ahead for the batch would read the same now, and compute it so."""
        return self.is_cast_so() and all(read == read_by(module) for module, read in self.read)

    def forget(self) -> None:
        """Nothing was sent or looked up."""
        for some in (self.contexts, self.dists, self.inputs, self.results, self.prepared, self.asked):
            some.clear()
        self.read, self.regions = [], None
        self.pairs = []
        self.started = self.exchanged = self.was_sent = self.was_received = False
        self.failure = self.with_grad = None


def outdated(batches: Iterable[BatchContext], agree: Callable[[int], int]) -> list[BatchContext]:
    """The batches for which modules ran ahead, if what these read was written since, on any rank; else none.

    ``agree``: the least of all ranks' words. It is asked where modules ran ahead, which all ranks have alike, and where
    the caller has entered or left a region of autocast, which all ranks do.
    """
    sent = [batch for batch in batches if batch.read or not batch.is_cast_so()]
    return [] if not sent or agree(int(all(batch.is_read_so() for batch in sent))) else sent


# Of an implementation, which may know more of a batch on its way.
Batch = TypeVar("Batch", bound=BatchContext)


class Stages(Protocol[Batch]):
    """How the stages of a batch run: at once, or on streams with an event for every edge between them.

    H copies a batch to the device, S exchanges sizes and I ids, L looks up and O sends pooled columns, F and B are
    forward and backward, T updates the tables inside of B, and P is the dense optimizer. This is the seam because it is
    all that an overlap is made of: the pipeline says what a stage does and hands it over as ``work``, the schedule says
    which stage is issued when, and this says where the work runs and what it waits for. An implementation is made of
    (device, options), and knows nothing else of its pipeline.
    """

    def copy(self, batch: Any) -> Batch:
        """H: the batch of a loader, on the device."""

    def adopt(self, batch: Any) -> Batch:
        """In place of H: a batch that somebody else moved to the device."""

    def send(self, batch: Batch, work: Callable[[], None]) -> None:
        """S: ``work`` starts the exchange of each module, which is in ``batch.dists`` then."""

    def receive(self, work: Callable[[], None]) -> None:
        """I: ``work`` ends the exchange of sizes, and so starts that of ids."""

    def look_up(self, batch: Batch, calls: list[Call], late: list[Call]) -> None:
        """L and O of these modules, into ``batch.results``; the optimizer updates what those in ``late`` read."""

    def wait_for_lookup(self, batch: Batch) -> None:
        """The caller's stream runs behind the batch's lookups."""

    def forward(self, batch: Batch, work: Callable[[], Any]) -> Any:
        """F: what ``work`` returns."""

    def backward(self, work: Callable[[], None]) -> None:
        """B, with T inside."""

    def tables_updated(self, calls: list[Call]) -> None:
        """T is over, and so is what follows it, such as an average of replicas."""

    def optimize(self, late: list[Call], work: Callable[[], None]) -> None:
        """P; ``late`` are the modules that read what it updates."""


def looked_up(module: Any, ctx: Any, given: Any) -> Any:
    """What the module's own forward would return: ours waits, torchrec's hands out its lazy result.

    torchrec's result knows what it is made of, which its backward hooks ask for, only from both steps at once.
    """
    both = getattr(module, "compute_and_output_dist", None)
    result = module.output_dist(ctx, module.compute(ctx, given)) if both is None else both(ctx, given)
    return result.wait() if isinstance(result, Awaitable) else result


def cut_off(result: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """The same lookup, cut off from its tables: what a forward may differentiate without reaching them.

    Pooled columns, sequences by feature, tensors, and lazy results of torchrec's modules, which are waited for.
    ``pairs`` gets (looked up, leaf) for each tensor; the leaf's gradient is what belongs into the lookup's backward.

    Raises:
        PipelineError: a result of another kind.
    """

    def leaf_of(tensor: torch.Tensor) -> torch.Tensor:
        leaf = tensor.detach().requires_grad_(tensor.is_floating_point())
        pairs.append((tensor, leaf))
        return leaf

    return _each_tensor(result, leaf_of)


def without_graph(result: Any) -> Any:
    """The same lookup as a forward without gradients finds it. Raises what ``cut_off`` does."""
    return _each_tensor(result, torch.Tensor.detach)


def _each_tensor(result: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    # First, for a lazy result may answer like the one that it stands for.
    if hasattr(type(result), "wait"):
        types: Any = sys.modules.get("torchrec.distributed.types")
        found = _each_tensor(result.wait(), change)
        # A model of torchrec's may wait for what it is given.
        return types.LazyNoWait(found) if types is not None and isinstance(result, types.LazyAwaitable) else found
    if isinstance(result, torch.Tensor):
        return change(result)
    if isinstance(result, dict):
        return {key: _each_tensor(value, change) for key, value in result.items()}
    if hasattr(result, "key_dim"):
        values = _each_tensor(result.values(), change)
        return type(result)(list(result.keys()), list(result.length_per_key()), values, result.key_dim())
    if hasattr(result, "weights_or_none") and not hasattr(result, "keys"):
        values = _each_tensor(result.values(), change)
        return type(result)(values, result.weights_or_none(), lengths=result.lengths())
    got, expected = type(result).__name__, "a tensor, KeyedTensor or JaggedTensor, or a dict of them"
    raise PipelineError("a lookup's result that cannot be cut off", got=got, expected=expected, where="lookup")
