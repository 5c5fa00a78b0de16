"""HF-format (safetensors) checkpoints through ``torch.distributed.checkpoint``, each byte written once.

Drop-in for the HF parts of ``torch.distributed.checkpoint``. Meaning: ``refimpl.checkpoint``, whose layout, policy,
planners and publication are used as they are. Differences from torch's defaults: ``save_distributed`` and
``enable_consolidation`` are True.
"""

from typing import TYPE_CHECKING

from fastimpl import ops
from refimpl.checkpoint import HuggingFaceLoadPlanner, HuggingFaceSavePlanner
from twinproof.checkpoint.manager import StateDictAdapter
from twinproof.checkpoint.native import CheckpointFormat, detect_format, load_training, save_training

if TYPE_CHECKING or ops.available():
    from fastimpl.checkpoint.consolidate import (
        consolidate_safetensors_files,
        consolidate_safetensors_files_on_every_rank,
    )
    from fastimpl.checkpoint.manager import CheckpointManager
    from fastimpl.checkpoint.quantized import QuantizedHuggingFaceStorageReader
    from fastimpl.checkpoint.reader import HuggingFaceStorageReader
    from fastimpl.checkpoint.single import load_file, save_file
    from fastimpl.checkpoint.writer import HuggingFaceStorageWriter
else:
    from refimpl.checkpoint import (
        CheckpointManager,
        HuggingFaceStorageReader,
        HuggingFaceStorageWriter,
        QuantizedHuggingFaceStorageReader,
        consolidate_safetensors_files,
        consolidate_safetensors_files_on_every_rank,
        load_file,
        save_file,
    )

CAPABILITIES = frozenset(
    {"balanced_writes", "bounded_memory", "counted_io", "ranged_reads", "staged_copies"} if ops.available() else ()
)

__all__ = [
    "CheckpointFormat",
    "CheckpointManager",
    "HuggingFaceLoadPlanner",
    "HuggingFaceSavePlanner",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "QuantizedHuggingFaceStorageReader",
    "StateDictAdapter",
    "consolidate_safetensors_files",
    "consolidate_safetensors_files_on_every_rank",
    "detect_format",
    "load_file",
    "load_training",
    "save_file",
    "save_training",
]
