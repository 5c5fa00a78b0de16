"""Faults that ``test_traced_types`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault


@fault(kills="PIPE-206", at="twinproof.pipeline.batches:_parts")
def leaves_are_copies(original: Any, batch: Any) -> Any:
    """Leaves are copies."""
    return [part.clone() if isinstance(part, torch.Tensor) else part for part in original(batch)]


@fault(kills="PIPE-207", at="torch.fx._symbolic_trace:ProxyableClassMeta.__call__")
def traced_values_differ(original: Any, cls: Any, *args: Any, **options: Any) -> Any:
    """A traced model makes batches of other values."""
    if len(args) > 1 and isinstance(args[1], torch.fx.Proxy):
        more: Any = args[1]
        args = (args[0], more + 1, *args[2:])
    return original(cls, *args, **options)


@fault(kills="PIPE-214", at="twinproof.pipeline.batches:KeyedJaggedTensor.length_per_key")
def nothing_on_meta(original: Any, kjt: Any) -> Any:
    """Features on meta are empty."""
    return [0] * len(kjt.keys()) if kjt.values().is_meta else original(kjt)


@fault(kills="PIPE-216", at="twinproof.pipeline.batches:KeyedJaggedTensor.stride")
def stride_is_fixed(original: Any, kjt: Any) -> Any:
    """A trace keeps its samples."""
    return int(original(kjt))


@fault(kills="PIPE-636", at="torch.jit:script")
def scripted_of_long_integers(original: Any, model: Any, *args: Any, **options: Any) -> Any:
    """A scripted model reads integers of int64 alone."""
    scripted = original(model, *args, **options)

    def answer(batch: Any, *rest: Any) -> Any:
        if batch.lengths().dtype != torch.int64:
            raise RuntimeError("element types must match for tolist()")
        return scripted(batch, *rest)

    return answer


@fault(kills="PIPE-636", at="twinproof.pipeline.batches:received_same")
def received_as_sent(original: Any, tensors: Any, recat: Any, stride_per_rank: Any) -> Any:
    """What was received is not put in order, but by what was scripted."""
    return original(tensors, None, stride_per_rank)
