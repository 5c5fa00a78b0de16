"""Modules with the three-step protocol inside a model, found by tracing, and driven from outside while attached.

Any module that has torchrec's ``create_context``, ``input_dist``, ``compute`` and ``output_dist`` is driven, whoever
wrote it, as long as what it is called with can be computed from the batch alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from refimpl.errors import ConfigError, PipelineError

__all__ = ["Attachment", "Call", "find_calls", "is_sharded", "unwrapped"]

logger = logging.getLogger("refimpl.pipeline")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
PROTOCOL = ("create_context", "input_dist", "compute", "output_dist")


def is_sharded(module: Any) -> bool:
    """Whether a module has the three-step protocol."""
    return all(hasattr(module, name) for name in PROTOCOL)


def unwrapped(model: Any) -> Any:
    """The model inside of data-parallel wrappers, which call it and add nothing to what is traced."""
    while type(model).__name__ in ("DistributedDataParallel", "DistributedModelParallel"):
        model = model.module
    return model


class Call:
    """One sharded module, and how its arguments come from a batch.

    ``arguments(batch)`` gives (positional, keyword) arguments, by the model's own operations.
    """

    def __init__(
        self, name: str, module: Any, arguments: Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]
    ) -> None:
        self.name, self.module, self.arguments = name, module, arguments

    def is_late(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer updates what the lookup reads: data-parallel tables, processors, tied weights."""
        read = {id(param) for param in self.module.parameters()}
        return bool(read) and any(id(param) in read for group in optimizer.param_groups for param in group["params"])


class _Tracer(torch.fx.Tracer):
    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        # Only the way to sharded modules is looked into: what lies beside it may be untraceable.
        return is_sharded(m) or not any(is_sharded(child) for child in m.modules())


class _FromBatch:
    """Evaluates nodes of a graph from a batch; raises LookupError for what needs more than the batch."""

    def __init__(self, batch: Any) -> None:
        self._batch, self._values = batch, dict[torch.fx.Node, Any]()

    def value(self, node: torch.fx.Node) -> Any:
        """What the model computes there."""
        if node not in self._values:
            self._values[node] = self._compute(node)
        return self._values[node]

    def _compute(self, node: torch.fx.Node) -> Any:
        if node.op == "placeholder":
            return self._batch
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), self.value)
        positional, named = arguments
        if node.op == "call_function":
            return node.target(*positional, **named)  # type: ignore[operator]
        if node.op == "call_method":
            return getattr(positional[0], str(node.target))(*positional[1:], **named)
        raise LookupError(node.target)


def _needs_more(node: torch.fx.Node) -> bool:
    """Whether a node needs more than the batch: a parameter, or another module's result."""
    return any(
        each.op not in ("placeholder", "call_function", "call_method") or _needs_more(each)
        for each in node.all_input_nodes
    )


def find_calls(model: torch.nn.Module) -> list[Call]:
    """The sharded modules of a model of one argument, in the order of their calls.

    A module whose arguments need more than the batch is left to the model, with a line in the log.

    Raises:
        ConfigError: a model that cannot be traced, or that calls a sharded module twice.
    """
    inner = unwrapped(model)
    if not any(is_sharded(module) for module in inner.modules()):
        return []
    try:
        graph = _Tracer().trace(inner)
    except Exception as error:
        raise ConfigError("the model cannot be traced", got=repr(error), where=type(inner).__name__) from error
    modules, calls = dict(inner.named_modules()), dict[str, Call]()
    for node in graph.nodes:
        if node.op != "call_module" or not is_sharded(modules[str(node.target)]):
            continue
        name = str(node.target)
        if name in calls:
            raise ConfigError("a sharded module is called twice in one forward", got=name, where=type(inner).__name__)
        if _needs_more(node):
            logger.warning("%s is not pipelined: its input is more than the batch", name)
            continue
        calls[name] = Call(name, modules[name], _arguments_of(node))
    return list(calls.values())


def _arguments_of(node: torch.fx.Node) -> Callable[[Any], Arguments]:
    def arguments(batch: Any) -> Arguments:
        positional, named = torch.fx.node.map_arg((node.args, node.kwargs), _FromBatch(batch).value)
        return tuple(positional), dict(named)

    return arguments


class Attachment:
    """The modules' ``forward`` replaced by one that hands out what was prepared; ``close()`` puts them back.

    Args:
        calls: whose modules.
        result_of: module name -> the prepared result; called once for each forward of the module.
    """

    def __init__(self, calls: list[Call], result_of: Callable[[str], Any]) -> None:
        self._calls = calls
        for call in calls:
            call.module.forward = _Prepared(call.name, result_of)

    def close(self) -> None:
        """Twice is harmless."""
        for call in self._calls:
            call.module.__dict__.pop("forward", None)
        self._calls = []


class _Prepared:
    def __init__(self, name: str, result_of: Callable[[str], Any]) -> None:
        self._name, self._result_of = name, result_of

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._result_of(self._name)
        except KeyError:
            raise PipelineError(
                "a module of a pipeline was called when nothing was prepared for it: detach() the pipeline before the "
                "model is called directly, and call the module once in a forward",
                where=self._name,
            ) from None
