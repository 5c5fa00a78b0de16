"""What batches are made of: of other batches, and of what ranks sent. In TorchScript's part of Python."""

import torch

from twinproof.pipeline.spans import cut_sizes, permuted_spans, running_sums

__all__ = ["received_same", "received_variable", "staggered"]


def received_same(
    tensors: list[torch.Tensor], recat: torch.Tensor | None, stride_per_rank: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Lengths, values and weights that ranks sent, in the order of features: by rank and feature before.

    ``recat`` holds, for each block of the result, the block that was received; a block is the samples of one rank and
    feature, or a single sample where ranks have different numbers of them. None is the order of receipt.
    """
    lengths, values = tensors[0].reshape(-1), tensors[1]
    weights = tensors[2] if len(tensors) > 2 else None
    if recat is None or recat.numel() == 0:
        return lengths, values, weights
    order: list[int] = recat.tolist()
    same = True
    for stride in stride_per_rank:
        same = same and stride == stride_per_rank[0]
    block = stride_per_rank[0] if same else 1
    if block == 0:
        return lengths, values, weights
    blocks = [block] * (lengths.numel() // block)
    ends = running_sums(cut_sizes(lengths, blocks))
    if weights is not None:
        weights = permuted_spans(weights, ends, order)
    return permuted_spans(lengths, running_sums(blocks), order), permuted_spans(values, ends, order), weights


def received_variable(
    tensors: list[torch.Tensor], recat: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """``received_same`` where each rank has its own number of samples of each feature: ``tensors[2]``."""
    lengths, values = tensors[0].reshape(-1), tensors[1]
    weights = tensors[3] if len(tensors) > 3 else None
    if recat is None or recat.numel() == 0:
        return lengths, values, weights
    order: list[int] = recat.tolist()
    blocks: list[int] = tensors[2].tolist()
    ends = running_sums(cut_sizes(lengths, blocks))
    if weights is not None:
        weights = permuted_spans(weights, ends, order)
    return permuted_spans(lengths, running_sums(blocks), order), permuted_spans(values, ends, order), weights


def staggered(strides: torch.Tensor, key_count: int, num_workers: int, stagger: int) -> torch.Tensor:
    """Samples of each feature by rank, [F, ranks], on the host; what was received is by rank, then feature.

    With ``stagger`` the ranks stand in columns of ``stagger`` rows and are read column by column.
    """
    if strides.numel() == 0:
        return torch.zeros([key_count, 1], dtype=torch.int64)
    found = strides.view(num_workers, key_count).t().cpu()
    if stagger > 1:
        found = found[:, torch.arange(num_workers).view(stagger, -1).t().reshape(-1)]
    return found
