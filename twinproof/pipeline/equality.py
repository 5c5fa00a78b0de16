"""Batches as dictionaries of features and back, as modules; and whether two batches are equal: torchrec's helpers."""

from typing import Any

import torch

from twinproof.pipeline.jagged_tensor import JaggedTensor
from twinproof.pipeline.keyed_jagged import KeyedJaggedTensor

__all__ = ["ComputeJTDictToKJT", "ComputeKJTToJTDict", "jt_is_equal", "kjt_is_equal"]


class ComputeKJTToJTDict(torch.nn.Module):
    """``KeyedJaggedTensor.to_dict`` as a module."""

    def forward(self, keyed_jagged_tensor: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Feature name -> its bags."""
        return keyed_jagged_tensor.to_dict()


class ComputeJTDictToKJT(torch.nn.Module):
    """``KeyedJaggedTensor.from_jt_dict`` as a module."""

    def forward(self, jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        """The features as one batch."""
        return KeyedJaggedTensor.from_jt_dict(jt_dict)


def _close(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.allclose(one, other)


def _same_bags(one: Any, other: Any) -> bool:
    pairs = [(one.values(), other.values()), (one.weights_or_none(), other.weights_or_none())]
    pairs += [(one.lengths(), other.lengths()), (one.offsets(), other.offsets())]
    return all(_close(mine, theirs) for mine, theirs in pairs)


@torch.fx.wrap
def jt_is_equal(jt_1: Any, jt_2: Any) -> bool:
    """Whether both are bags of one feature with close values and weights, and the same lengths."""
    return isinstance(jt_1, JaggedTensor) and isinstance(jt_2, JaggedTensor) and _same_bags(jt_1, jt_2)


@torch.fx.wrap
def kjt_is_equal(kjt_1: Any, kjt_2: Any) -> bool:
    """Whether both are batches of the same features in the same order with equal bags."""
    if not (isinstance(kjt_1, KeyedJaggedTensor) and isinstance(kjt_2, KeyedJaggedTensor)):
        return False
    if kjt_1.keys() != kjt_2.keys() or kjt_1.stride_per_key() != kjt_2.stride_per_key():
        return False
    return _same_bags(kjt_1, kjt_2)
