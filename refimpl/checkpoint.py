"""HF-format (safetensors) checkpoints through ``torch.distributed.checkpoint``, in plain Python.

Replaces the HF parts of ``torch.distributed.checkpoint``. This is the meaning of ``fastimpl.checkpoint``: the same
names, the same bytes. Layout, policy, planners and publication live here once and are shared.
"""

from twinproof.checkpoint.consolidate import consolidate_safetensors_files, consolidate_safetensors_files_on_every_rank
from twinproof.checkpoint.planners import HuggingFaceLoadPlanner, HuggingFaceSavePlanner
from twinproof.checkpoint.reader import HuggingFaceStorageReader
from twinproof.checkpoint.single import load_file, save_file
from twinproof.checkpoint.writer import HuggingFaceStorageWriter

# What the suite may ask beyond the contract: the reference moves whole tensors through one rank and counts nothing.
CAPABILITIES: frozenset[str] = frozenset()

__all__ = [
    "HuggingFaceLoadPlanner",
    "HuggingFaceSavePlanner",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "consolidate_safetensors_files",
    "consolidate_safetensors_files_on_every_rank",
    "load_file",
    "save_file",
]
