"""What a lookup takes out of a batch: the bags of its features in its order, checked where they are read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from twinproof.errors import ConfigError, MissingKeyError, ShapeError
from twinproof.pipeline.data import KeyedJaggedTensor
from twinproof.pipeline.foreign import own_batch
from twinproof.pipeline.jagged import Bags, check_ids, joined

__all__ = ["select", "select_each"]


def _check(features: KeyedJaggedTensor, names: Sequence[str], weights: torch.Tensor | None) -> None:
    keys = features.keys()
    missing = [name for name in names if name not in keys]
    if missing:
        raise MissingKeyError("not features of this batch", got=missing, expected=keys)
    check_ids(Bags(features.values(), features.values(), weights))


def select_each(features: KeyedJaggedTensor, names: Sequence[str]) -> list[Bags]:
    """The bags of each of these features, of as many samples as it has. Raises MissingKeyError, ShapeError."""
    _check(features, names, None)
    return [Bags(part.indices, part.offsets) for part in (features[name].bags() for name in names)]


def select(features: KeyedJaggedTensor, names: Sequence[str], *, weighted: bool) -> Bags:
    """The bags of these features in this order; a name may repeat, and of a repeated key the last is meant.

    Features of different sizes are spread over the full batch by their inverse indices.

    Raises:
        UnsupportedError: not a batch. MissingKeyError: features that are not in the batch. ConfigError: no weights
            where they are due; features of different sizes without inverse indices. ShapeError: values that are no ids.
    """
    features = own_batch(features)
    weights, keys = features.weights() if weighted else None, features.keys()
    _check(features, names, weights)
    if features.variable_stride_per_key():
        bags = joined([_spread_over_batch(features, name) for name in names])
    elif keys == list(names) and len(set(keys)) == len(keys):
        bags = features.bags()
    else:
        bags = joined([features[name].bags() for name in names])
    return Bags(bags.indices, bags.offsets, None if weights is None else bags.weights)


def _spread_over_batch(features: KeyedJaggedTensor, name: str) -> Bags:
    """The bags of one feature for every sample of the full batch, which may share a bag."""
    part, rows = features[name], _rows_of(features, name)
    lengths, begins = part.lengths()[rows].to(torch.int64), part.offsets()[:-1][rows].to(torch.int64)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    places = torch.arange(int(offsets[-1]), device=offsets.device)
    places = places + (begins - offsets[:-1]).repeat_interleave(lengths)
    weights = part.weights_or_none()
    return Bags(part.values()[places], offsets, None if weights is None else weights[places])


def _rows_of(features: KeyedJaggedTensor, name: str) -> torch.Tensor:
    inverse, strides = features.inverse_indices_or_none(), features.stride_per_key()
    stride = strides[features.index_per_key()[name]]
    if inverse is None:
        if len(set(strides)) > 1:
            message = "features of different sizes need inverse_indices, which say whose bag each sample has"
            raise ConfigError(message, got=strides, where="inverse_indices")
        return torch.arange(stride, device=features.device())
    if name not in inverse[0]:
        raise MissingKeyError("no inverse indices of this feature", got=name, expected=inverse[0])
    rows = inverse[1][inverse[0].index(name)].to(torch.int64)
    if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= stride):
        got = (int(rows.min()), int(rows.max()))
        raise ShapeError("inverse indices outside of the feature", got=got, expected=f"0 to {stride - 1}", where=name)
    return rows
