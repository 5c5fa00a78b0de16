"""Models over the batch types, as user code writes them, in TorchScript's part of Python.

Their annotations name the reference's types, which every implementation of ours shares.
"""

import torch

from refimpl.pipeline import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = ["Asked", "Cuts", "Pooled"]

torch.fx.wrap("turned")


def turned(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Cut, put together, permuted and made anew."""
    parts = features.split([1, 1])
    whole = KeyedJaggedTensor.concat([parts[1], parts[0], features.permute([0])])
    bags = whole.to_dict()
    return KeyedJaggedTensor.from_lengths_sync(
        ["x", "y"],
        torch.cat([bags["b"].values(), whole["a"].values()]),
        torch.cat([bags["b"].lengths(), whole["a"].lengths()]),
        torch.cat([bags["b"].weights(), whole["a"].weights()]),
    )


class Cuts(torch.nn.Module):
    """A batch of two features as another one."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """What is left of a trace is what is said here."""
        again = turned(features)
        return KeyedJaggedTensor(again.keys(), again.values(), again.weights(), again.lengths(), again.offsets())


class Pooled(torch.nn.Module):
    """Columns regrouped under names."""

    def forward(self, pooled: list[KeyedTensor]) -> dict[str, torch.Tensor]:
        """Two groups."""
        return KeyedTensor.regroup_as_dict(pooled, [["c", "a"], ["b"]], ["x", "y"])


class Asked(torch.nn.Module):
    """A batch of the features a and b, and bags of one feature, whose integers of any dtype become numbers."""

    def forward(
        self, features: KeyedJaggedTensor, bags: JaggedTensor, recat: torch.Tensor
    ) -> tuple[list[list[int]], list[list[torch.Tensor]], list[str], list[KeyedJaggedTensor]]:
        """Sizes by rank, dense bags and weights, texts, and batches that are put together and received."""
        variable, keys = features.variable_stride_per_key(), features.keys()
        dense = [features["b"].to_dense(), bags.to_dense()]
        weights = bags.to_dense_weights()
        if weights is not None:
            dense.append(weights)
        received = KeyedJaggedTensor.dist_init(keys, features.dist_tensors(), variable, 1, recat, [features.stride()])
        again = KeyedJaggedTensor.from_jt_dict(features.to_dict())
        made = [KeyedJaggedTensor.concat([features, features]), received, again]
        return features.stride_per_key_per_rank(), dense, [str(features), str(bags)], made
