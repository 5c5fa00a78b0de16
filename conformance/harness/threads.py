"""The number of threads that torch's pool has, on which operators are cut into parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["torch_threads"]


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """So many threads inside, as many as before behind."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
