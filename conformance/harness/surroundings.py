"""What a caller may have set for its process or its thread, beside anything that is under test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    kept = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(kept)


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SURROUNDINGS: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "wide numbers": partial(_default_dtype, torch.float64),
    "narrow numbers": partial(_default_dtype, torch.bfloat16),
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
    "deterministic": _deterministic,
    "mixed precision": partial(torch.autocast, "cpu", torch.bfloat16),
}
