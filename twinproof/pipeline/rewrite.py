"""Dense gradients of several ranks: who reduces them, and their mean where the pipeline is asked for it.

Prevents ranks that train apart: a model whose dense parameters nobody reduces is refused before its first update.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from twinproof.errors import ConfigError, PipelineError

__all__ = ["Attachment", "Call", "DenseGradients", "FromBatch", "Prepared", "find_calls", "is_sharded", "unwrapped"]

logger = logging.getLogger("twinproof.pipeline")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
PROTOCOL = ("create_context", "input_dist", "compute", "output_dist")


def is_sharded(module: Any) -> bool:
    """Whether a module has the three-step protocol."""
    return all(hasattr(module, name) for name in PROTOCOL)


def unwrapped(model: Any) -> Any:
    """The model inside of data-parallel wrappers, which call it and add nothing to what is traced."""
    while any(kind.__name__ in ("DistributedDataParallel", "DistributedModelParallel") for kind in type(model).__mro__):
        model = model.module
    return model


class Call:
    """One sharded module, and how its arguments come from a batch.

    ``arguments(values)`` gives (positional, keyword) arguments, by the model's own operations; ``postprocs`` are the
    modules that it calls on the way.
    """

    def __init__(
        self,
        name: str,
        module: Any,
        arguments: Callable[[FromBatch], Arguments],
        postprocs: Mapping[str, torch.nn.Module] | None = None,
    ) -> None:
        self.name, self.module, self.arguments, self.postprocs = name, module, arguments, dict(postprocs or {})

    def is_late(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer updates what the lookup reads: data-parallel tables, processors, tied weights."""
        read = {id(param) for param in self.module.parameters()}
        return bool(read) and any(id(param) in read for group in optimizer.param_groups for param in group["params"])


class _Tracer(torch.fx.Tracer):
    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        # Only the way to sharded modules is looked into: what lies beside it may be untraceable.
        return is_sharded(m) or not any(is_sharded(child) for child in m.modules())


class FromBatch:
    """Evaluates nodes of a graph from a batch; raises LookupError for what needs more than the batch.

    Attributes:
        results: of the modules that were called on the way to sharded ones, by name; each was called once.
    """

    def __init__(self, batch: Any, postprocs: Mapping[str, torch.nn.Module] | None = None) -> None:
        self._batch, self._values, self._postprocs = batch, dict[torch.fx.Node, Any](), dict(postprocs or {})
        self.results: dict[str, Any] = {}

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
        if str(node.target) in self._postprocs:
            # Its own forward, for the pipeline's stands in for it on the module.
            module = self._postprocs[str(node.target)]
            self.results[str(node.target)] = type(module).forward(module, *positional, **named)
            return self.results[str(node.target)]
        raise LookupError(node.target)


def _postprocs_of(graph: torch.fx.Graph, modules: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Modules that may run ahead of the model: without parameters that are trained, and called once."""
    names = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    return {
        name: modules[name]
        for name in names
        if names.count(name) == 1
        and not is_sharded(modules[name])
        and not any(param.requires_grad for param in modules[name].parameters())
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
    """Whether a node needs more than the batch: a parameter, or the result of a module that must not run ahead."""
    return any(
        each.op not in ("placeholder", "call_function", "call_method")
        and not (each.op == "call_module" and str(each.target) in postprocs)
        for each in _on_the_way(node)
    )


def find_calls(model: torch.nn.Module, *, pipeline_postproc: bool = False) -> list[Call]:
    """The sharded modules of a model of one argument, in the order of their calls.

    A module whose arguments need more than the batch is left to the model, with a line in the log. With
    ``pipeline_postproc`` modules between the batch and a sharded one run ahead with its exchange, once a batch, if
    nothing in them is trained.

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
    postprocs = _postprocs_of(graph, modules) if pipeline_postproc else {}
    for node in graph.nodes:
        if node.op != "call_module" or not is_sharded(modules[str(node.target)]):
            continue
        name = str(node.target)
        if name in calls:
            raise ConfigError("a sharded module is called twice in one forward", got=name, where=type(inner).__name__)
        if _needs_more(node, postprocs):
            logger.warning("%s is not pipelined: its input is more than the batch", name)
            continue
        used = {str(each.target) for each in _on_the_way(node) if each.op == "call_module"}
        mine = {target: postprocs[target] for target in postprocs if target in used}
        calls[name] = Call(name, modules[name], _arguments_of(node), mine)
    return list(calls.values())


def _arguments_of(node: torch.fx.Node) -> Callable[[FromBatch], Arguments]:
    def arguments(values: FromBatch) -> Arguments:
        positional, named = torch.fx.node.map_arg((node.args, node.kwargs), values.value)
        return tuple(positional), dict(named)

    return arguments


class Attachment:
    """The modules' ``forward`` replaced by one that hands out what was prepared; ``close()`` puts them back.

    Args:
        calls: whose modules.
        result_of: module name -> the prepared result; called once for each forward of the module.
    """

    def __init__(self, calls: list[Call], result_of: Callable[[str], Any]) -> None:
        self._driven: dict[str, Any] = {call.name: call.module for call in calls}
        for call in calls:
            self._driven |= call.postprocs
        for name, module in self._driven.items():
            module.forward = Prepared(name, result_of)

    def close(self) -> None:
        """Twice is harmless."""
        for module in self._driven.values():
            module.__dict__.pop("forward", None)
        self._driven = {}


class Prepared:
    """Stands in for a driven module's forward."""

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


def _is_dtensor(param: torch.Tensor) -> bool:
    # Without the module nobody can have made one.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(param, module.DTensor)


def _is_fully_sharded(module: torch.nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def _is_replicated(module: torch.nn.Module) -> bool:
    """Whether torch's composable ``replicate`` was applied."""
    contract = sys.modules.get("torch.distributed._composable.contract")
    registry = None if contract is None else contract._get_registry(module)
    return registry is not None and "replicate" in registry


def _wrapped(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters that a data-parallel wrapper in the model reduces."""
    for module in model.modules():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            ignored = set(module.parameters_to_ignore)
            yield from (param for name, param in module.module.named_parameters() if name not in ignored)
        elif _is_fully_sharded(module) or _is_replicated(module):
            yield from module.parameters()


def _has_hook(param: torch.Tensor) -> bool:
    return bool(param._backward_hooks) or bool(getattr(param, "_post_accumulate_grad_hooks", None))


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
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            mine = id(param) in names or (foreign and type(param) is torch.nn.Parameter)
            if mine and param.requires_grad and id(param) not in wrapped and not _is_dtensor(param):
                self.params.append(param)
        self.names = [names.get(id(param), "a parameter that is not the model's") for param in self.params]

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
        present = torch.tensor([param.grad is not None for param in self.params], dtype=torch.int64)
        present = present.to(self.params[0].device)
        dist.all_reduce(present, group=process_group)
        used = [param for param, count in zip(self.params, present.tolist(), strict=True) if count]
        for params in _alike(used):
            grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
            if any(grad.layout is not torch.strided for grad in grads):
                raise ConfigError("sparse gradients are not reduced", where="reduce_dense_gradients")
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
