"""Faults that ``test_empty_options`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_MANAGER = "twinproof.checkpoint.manager:CheckpointManager"

empty_mapping_is_none = patched(
    "An empty mapping of file indices counts as none given.",
    mutated(
        "twinproof.checkpoint.dcp:HuggingFaceStorageWriter.__init__",
        "mapping=fqn_to_index_mapping,",
        "mapping=fqn_to_index_mapping or None,",
    ),
    kills="CKPT-738",
)
empty_mapping_of_adapters_is_none = patched(
    "An empty mapping of an adapter counts as none.",
    mutated(f"{_MANAGER}._hf_writer", "mapping is not None and", "mapping and"),
    kills="CKPT-738",
)
empty_path_is_none = patched(
    "A manager that is given an empty path to start from starts afresh.",
    mutated(f"{_MANAGER}.__init__", "None if initial_load_path is None", "None if not initial_load_path"),
    kills="CKPT-738",
)
false_adapter_is_none = patched(
    "An adapter that is false counts as none given.",
    mutated(f"{_MANAGER}._to_hf", "state if self._adapter is None", "state if not self._adapter"),
    kills="CKPT-744",
)
false_states_left_out = patched(
    "States of a manager that are false are not saved.",
    mutated(f"{_MANAGER}._full_state", "if name not in without", "if value and name not in without"),
    kills="CKPT-744",
)
false_progress_is_none = patched(
    "A load tells nothing of its progress to what is false.",
    mutated(
        "twinproof.checkpoint.dcp:HuggingFaceStorageReader.__init__",
        "= verify_checksums, progress",
        "= verify_checksums, progress or None",
    ),
    kills="CKPT-744",
)
