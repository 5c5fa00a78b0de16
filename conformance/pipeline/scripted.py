"""Models over the batch types, as user code writes them, in TorchScript's part of Python.

Their annotations name the reference's types, which every implementation of ours shares.
"""

import torch

from refimpl.pipeline import KeyedJaggedTensor, KeyedTensor

__all__ = ["Cuts", "Pooled"]

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
