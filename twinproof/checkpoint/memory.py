"""Tensors as raw memory, without numpy: values move as bits, so every dtype and every NaN payload survives."""

from __future__ import annotations

import ctypes

import torch

from twinproof.errors import NoDataError, UnstorableError

__all__ = ["as_bits", "buffer_of", "check_storable"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_storable(tensor: torch.Tensor, where: str) -> None:
    """Raise UnstorableError for a tensor without plain memory: meta (NoDataError), sparse, quantized."""
    if tensor.is_meta:
        raise NoDataError("a meta tensor has no data to store", got=list(tensor.shape), where=where)
    if tensor.layout is not torch.strided or tensor.is_quantized:
        got = f"{tensor.device.type} tensor, layout {tensor.layout}"
        raise UnstorableError(
            "a tensor without dense memory cannot be stored", got=got, expected="strided", where=where
        )


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as integers of the same width: same shape, strides and memory (lazy conjugates resolved).

    torch cannot copy every dtype (float4, float8_e8m0fnu), but it can copy integers of every width.
    """
    return tensor.detach().resolve_conj().resolve_neg().view(_BITS[tensor.dtype.itemsize])


def buffer_of(tensor: torch.Tensor) -> memoryview:
    """Writable view of a contiguous CPU tensor's bytes. The caller keeps the tensor alive."""
    size_bytes = tensor.numel() * tensor.element_size()
    if not size_bytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * size_bytes).from_address(tensor.data_ptr())).cast("B")
