"""Which operators let the host wait for the current stream, by what torch's CUDA operators do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from conformance.provers.virtual_device.device import HOST_VALUE_OPS, tensors_in

__all__ = ["host_operands", "host_results", "host_wait"]

_PUTS = {"aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put"}
_INDEXING = {"aten::index", "aten::_unsafe_index", *_PUTS}
# Their second argument may lie on the host: indices, and lengths of packed sequences, which have to.
_ON_HOST = {
    **dict.fromkeys(_INDEXING, "indices"),
    "aten::_pack_padded_sequence": "lengths",
    "aten::_pad_packed_sequence": "batch_sizes",
}
# They count first, and the host waits for the count; what they write comes after that.
_COUNTING = {"aten::nonzero", "aten::masked_select", "aten::argwhere"}
# Whether a decomposition has failed is asked for on the host (``_linalg_check_errors``, BatchLinearAlgebra.cpp).
_FAILING = {
    "aten::_linalg_check_errors", "aten::_linalg_eigh", "aten::_linalg_svd", "aten::linalg_eig", "aten::linalg_eigvals",
}  # fmt: skip
_MASKS = (torch.bool, torch.uint8)


def host_wait(
    func: Any,
    args: tuple[Any, ...],
    options: dict[str, Any],
    *,
    is_on_device: Callable[[torch.Tensor], bool],
    is_known: Callable[[torch.Tensor], bool],
) -> tuple[bool, bool]:
    """How the host waits within an operator with operands of the device.

    Args:
        func: the operator.
        args: what it is called with, by position.
        options: the same, by name.
        is_on_device: whether a tensor lies on the device.
        is_known: whether the program has a tensor, and not torch alone.

    Returns:
        Whether it waits for what came before the operator, and whether for values on which the result depends. A wait
        for values that is none for what came before is at the operator's end.
    """
    name = func._schema.name
    if name in _INDEXING:
        return _index_wait(name, args, options, is_on_device, is_known)
    if name == "aten::repeat_interleave":
        # The sum of the repeats is asked for unless it is given (aten/src/ATen/native/Repeat.h).
        return False, torch.Tag.dynamic_output_shape in func.tags and options.get("output_size") is None
    if name in _COUNTING:
        return True, True
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return False, name in HOST_VALUE_OPS or name in _FAILING or bool(tags & set(func.tags))


def host_operands(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors of a call that may be the host's, with others of the device."""
    word = _ON_HOST.get(name)
    return [] if word is None else list(tensors_in(args[1] if len(args) > 1 else options[word]))


def host_results(name: str, result: Any) -> list[torch.Tensor]:
    """The new tensors of a result that lie on the host, where others lie on the device."""
    return [result[1]] if name == "aten::_pack_padded_sequence" else []


def _index_wait(
    name: str,
    args: tuple[Any, ...],
    options: dict[str, Any],
    is_on_device: Callable[[torch.Tensor], bool],
    is_known: Callable[[torch.Tensor], bool],
) -> tuple[bool, bool]:
    # As torch's own test_sync_warning (test/test_torch.py) has it. ``expandTensors`` (ATen/native/IndexingUtils.h) asks
    # ``nonzero`` of a mask where the mask lies, and copies integers of the host to the device; a host mask's go there
    # through pinned memory, without a wait.
    given = host_operands(name, args, options)
    masks = [one for one in given if one.dtype in _MASKS and is_on_device(one)]
    waits = any(one.dtype not in _MASKS and not is_on_device(one) for one in given)
    if name not in _PUTS:
        return waits or bool(masks), bool(masks)
    value = args[2] if len(args) > 2 else options["values"]
    accumulates = args[3] if len(args) > 3 else options.get("accumulate", False)
    if not is_on_device(value) and value.numel() == 1:
        if len(given) == len(masks) == 1 and not accumulates:
            # ``canDispatchToMaskedFill``: the value is the host's, and nobody waits.
            return False, False
        # A tensor goes to the device by a blocking copy. A number of Python's does so up to torch 2.13 and no longer
        # after (pull request 188330): such a wait is no edge.
        waits = waits or (value.dim() == 0 and is_known(value))
    return waits or bool(masks), bool(masks)
