"""The checkpoint policy with the fast writer and reader."""

from __future__ import annotations

from fastimpl.checkpoint.reader import HuggingFaceStorageReader
from fastimpl.checkpoint.writer import HuggingFaceStorageWriter
from twinproof.checkpoint import manager

__all__ = ["CheckpointManager"]


class CheckpointManager(manager.CheckpointManager, writer=HuggingFaceStorageWriter, reader=HuggingFaceStorageReader):
    """A trainer's policy; see ``twinproof.checkpoint.manager.CheckpointManager`` for the arguments."""
