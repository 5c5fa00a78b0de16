"""Where features and bags begin: host arithmetic and tensor cuts that eager code and TorchScript share.

What stands here is in TorchScript's part of Python, because user code scripts models that hold these types.
"""

import torch

__all__ = [
    "cut_sizes",
    "jagged_text",
    "offsets_like",
    "padded",
    "permuted_spans",
    "running_sums",
    "span_text",
    "sums_by_splits",
    "total",
]


def running_sums(counts: list[int]) -> list[int]:
    """0, then the sums of the first n counts."""
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    return ends


def total(counts: list[int]) -> int:
    """The sum of counts."""
    return running_sums(counts)[-1]


def sums_by_splits(counts: list[int], splits: list[int]) -> list[int]:
    """The sums of consecutive runs of counts, ``splits[i]`` of them in run i."""
    ends, at = running_sums(counts), running_sums(splits)
    return [ends[at[i + 1]] - ends[at[i]] for i in range(len(splits))]


def offsets_like(lengths: torch.Tensor) -> torch.Tensor:
    """[n + 1] in the dtype of lengths [n]: 0, then the running sums."""
    flat = lengths.reshape(-1)
    return torch.cat([flat.new_zeros(1), flat.cumsum(0).to(flat.dtype)])


def cut_sizes(lengths: torch.Tensor, strides: list[int]) -> list[int]:
    """Ids of each feature, on the host: the sums of consecutive lengths, ``strides[i]`` of them for feature i."""
    flat = lengths.reshape(-1)
    if len(strides) == 0 or flat.numel() == 0:
        return [0] * len(strides)
    sums = [part.sum().reshape(1) for part in torch.split(flat, strides)]
    sizes: list[int] = torch.cat(sums).tolist()
    return sizes


def permuted_spans(data: torch.Tensor, ends: list[int], order: list[int]) -> torch.Tensor:
    """The spans ``[ends[i], ends[i + 1])`` of data for each i of ``order``, one after the other."""
    if len(order) == 0:
        return data[:0]
    return torch.cat([data[ends[i] : ends[i + 1]] for i in order])


def padded(data: torch.Tensor, offsets: torch.Tensor, width: int, padding_value: float) -> torch.Tensor:
    """[bags, width, ...] from data [N, ...]: what is longer than ``width`` is cut, what is shorter is filled up."""
    sizes = torch.diff(offsets).clamp(max=width)
    columns = torch.arange(width, device=data.device)
    mask = columns.unsqueeze(0) < sizes.unsqueeze(1)
    source = (offsets[:-1].unsqueeze(1) + columns.unsqueeze(0))[mask]
    shape: list[int] = list(data.shape)
    dense = torch.full([mask.size(0), width] + shape[1:], padding_value, dtype=data.dtype, device=data.device)  # noqa: RUF005 - TorchScript
    dense[mask] = data[source]
    return dense


def span_text(values: torch.Tensor, begin: int, end: int) -> str:
    """Values [begin, end) as a list, of one dimension or two. Raises ValueError for more."""
    parts: list[str] = []
    if values.dim() == 1:
        for value in values[begin:end]:
            parts.append(str(value.item()))
    elif values.dim() == 2:
        for row in values[begin:end]:
            cells: list[str] = []
            for cell in row:
                cells.append(str(cell.item()))
            parts.append("[" + ", ".join(cells) + "]")
    else:
        raise ValueError("only values of one or two dimensions are printed")
    return "[" + ", ".join(parts) + "]"


def jagged_text(values: torch.Tensor, offsets: torch.Tensor, first: int, last: int) -> str:
    """Bags [first, last) as a list of lists."""
    ends: list[int] = offsets.tolist()
    parts: list[str] = []
    for bag in range(first, last):
        parts.append(span_text(values, ends[bag], ends[bag + 1]))
    return "[" + ", ".join(parts) + "]"
