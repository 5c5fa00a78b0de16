"""The checkpoint policy with the fast writer and reader."""

from __future__ import annotations

from fastimpl.checkpoint.quantized import QuantizedHuggingFaceStorageReader
from fastimpl.checkpoint.reader import HuggingFaceStorageReader
from fastimpl.checkpoint.writer import HuggingFaceStorageWriter
from twinproof.checkpoint import manager

__all__ = ["CheckpointManager"]


class CheckpointManager(
    manager.CheckpointManager,
    writer=HuggingFaceStorageWriter,
    reader=HuggingFaceStorageReader,
    quantized_reader=QuantizedHuggingFaceStorageReader,
):
    """A trainer's policy; see ``twinproof.checkpoint.manager.CheckpointManager`` for the arguments."""
