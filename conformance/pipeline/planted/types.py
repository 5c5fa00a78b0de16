"""Faults in torchrec's batch types, which both implementations share."""

from __future__ import annotations

from typing import Any

import torch

from conformance.pipeline.planted.planting import shared, shared_swap


def _without_tensor(self: Any, indices: Any) -> Any:
    return self._made([], self._values[:0], None, self.lengths()[:0], None, [])


def _wide(original: Any, lengths: torch.Tensor) -> Any:
    return original(lengths).to(torch.int64)


def _least(original: Any, kjt: Any) -> Any:
    return min(kjt.stride_per_key()) if kjt.variable_stride_per_key() else original(kjt)


def _nothing(*args: Any, **options: Any) -> None:
    return None


def _first(original: Any, batch: Any) -> Any:
    keys = batch.keys()
    return {key: keys.index(key) for key in keys}


def _copied(original: Any, batch: Any) -> Any:
    return [part.clone() if isinstance(part, torch.Tensor) else part for part in original(batch)]


def _one_more(original: Any, cls: Any, *args: Any, **options: Any) -> Any:
    if len(args) > 1 and isinstance(args[1], torch.fx.Proxy):
        more: Any = args[1]
        args = (args[0], more + 1, *args[2:])
    return original(cls, *args, **options)


def _stripped(original: Any, tensor: Any) -> Any:
    return original(tensor).strip()


def _zeros(original: Any, data: Any, offsets: Any, width: int, padding_value: float) -> Any:
    return original(data, offsets, width, 0.0)


def _old_offsets(original: Any, bags: Any, source: Any, non_blocking: bool) -> Any:
    offsets = None if bags._offsets is None else bags._offsets.clone()
    original(bags, source, non_blocking)
    if offsets is not None:
        bags._offsets.copy_(offsets)


def _as_received(original: Any, tensors: Any, recat: Any, *rest: Any) -> Any:
    return original(tensors, None, *rest)


def _turned(original: Any, *args: Any) -> Any:
    return original(*args).flip(0)


def _none_on_meta(original: Any, kjt: Any) -> Any:
    return [0] * len(kjt.keys()) if kjt.values().is_meta else original(kjt)


def _values_alone(one: Any, other: Any) -> bool:
    return one.values().shape == other.values().shape and torch.equal(one.values(), other.values())


def _fixed(original: Any, kjt: Any) -> Any:
    return int(original(kjt))


_KJT = "twinproof.pipeline.batches:KeyedJaggedTensor"

PLANTED = (
    shared_swap("permute_takes_one", "permute takes no tensor.", ("PIPE-200",), f"{_KJT}.permute", _without_tensor),
    shared("offsets_are_wide", "Offsets are int64.", ("PIPE-201",), "twinproof.pipeline.jagged:offsets_like", _wide),
    shared("stride_is_the_least", "The stride is the smallest feature's.", ("PIPE-202",), f"{_KJT}.stride", _least),
    shared_swap(
        "ids_not_checked",
        "A lookup takes whatever it is given.",
        ("PIPE-203",),
        "twinproof.pipeline.batches:check_ids",
        _nothing,
    ),
    shared_swap(
        "float_lengths",
        "Lengths of any dtype make bags.",
        ("PIPE-204",),
        "twinproof.pipeline.jagged:check_integers",
        _nothing,
    ),
    shared("first_of_a_key", "A repeated key is the first.", ("PIPE-205",), f"{_KJT}._key_indices", _first),
    shared("leaves_are_copies", "Leaves are copies.", ("PIPE-206",), "twinproof.pipeline.batches:_parts", _copied),
    shared(
        "traced_values_differ",
        "A traced model makes batches of other values.",
        ("PIPE-207",),
        "torch.fx._symbolic_trace:ProxyableClassMeta.__call__",
        _one_more,
    ),
    shared(
        "text_without_an_end",
        "str() has no last line.",
        ("PIPE-208",),
        "twinproof.pipeline.batches:KeyedTensor.__str__",
        _stripped,
    ),
    shared(
        "padding_is_zero",
        "Padding is always zero.",
        ("PIPE-209",),
        "twinproof.pipeline.jagged:padded",
        _zeros,
    ),
    shared(
        "stale_offsets",
        "copy_ leaves the offsets of before.",
        ("PIPE-210",),
        "twinproof.pipeline.batches:JaggedTensor._copy_parts",
        _old_offsets,
    ),
    shared(
        "as_received",
        "What ranks sent stays in the order of ranks.",
        ("PIPE-211",),
        "twinproof.pipeline.keyed:received_same",
        _as_received,
    ),
    shared(
        "first_columns",
        "A repeated key is the first.",
        ("PIPE-212",),
        "twinproof.pipeline.batches:KeyedTensor._key_indices",
        _first,
    ),
    shared(
        "inverse_the_other_way",
        "Samples have the bags of others.",
        ("PIPE-213",),
        "twinproof.pipeline.batches:_rows_of",
        _turned,
    ),
    shared("nothing_on_meta", "Features on meta are empty.", ("PIPE-214",), f"{_KJT}.length_per_key", _none_on_meta),
    shared_swap(
        "equal_by_values",
        "Batches of the same values are equal.",
        ("PIPE-215",),
        "twinproof.pipeline.batches:_same_bags",
        _values_alone,
    ),
    shared("stride_is_fixed", "A trace keeps its samples.", ("PIPE-216",), f"{_KJT}.stride", _fixed),
)
