"""Faults that ``test_pairs`` must notice: each shows where two options meet, and nowhere else."""

from __future__ import annotations

from conformance.harness import mutated, patched

replicas_of_cached_plans_trusted = patched(
    "Replicas are not compared where the plan comes from a planner's cache.",
    mutated("twinproof.checkpoint.dcp:HuggingFaceStorageWriter._held", "not self._is_placeholder", "True"),
    kills="CKPT-648",
)

shards_begin_anywhere = patched(
    "Shard files are padded to 8 bytes, whatever was asked for.",
    mutated("twinproof.checkpoint.shards:write_shards", "page_align=options.page_align", "page_align=False"),
    kills="CKPT-648",
)

size_of_shards_ignored = patched(
    "A size or one file is asked for beside shards, and forgotten.",
    mutated("twinproof.checkpoint.plan:WriterOptions.make", 'flags.get("save_distributed")', "False"),
    kills="CKPT-648",
)

progress_counts_what_is_made = patched(
    "A load that converts says the size of its targets, and ends elsewhere.",
    mutated(
        "twinproof.checkpoint.dcp:HuggingFaceStorageReader.read_data",
        "sum(wanted.size_bytes for wanted in ranges)",
        "sum(wanted.target.nbytes for wanted in ranges)",
    ),
    kills="CKPT-649",
)

parts_of_an_earlier_load = patched(
    "A reader that compares names what an earlier load of it read in part.",
    mutated(
        "twinproof.checkpoint.dcp:HuggingFaceStorageReader.read_data",
        "self.unverified = check_loaded(",
        "self.unverified += check_loaded(",
    ),
    kills="CKPT-649",
)

target_dtype_skipped = patched(
    "Quantized weights for wider targets are not rounded to the dtype that was asked for on their way.",
    mutated(
        "twinproof.checkpoint.dcp:QuantizedHuggingFaceStorageReader._load",
        "part.target.dtype == self.target_dtype or self.target_dtype == torch.float32",
        "True",
    ),
    kills="CKPT-649",
)

sums_of_one_file_alone = patched(
    "A merge into several files compares no sums and states none.",
    mutated(
        "twinproof.checkpoint.shards:consolidate",
        "states_sums(catalog)",
        "mapping is None and states_sums(catalog)",
    ),
    kills="CKPT-650",
)

shards_in_place_left = patched(
    "Shards that are to be merged in place are taken for a final folder.",
    mutated("twinproof.checkpoint.shards:is_final", "not any(", "bool("),
    kills="CKPT-650",
)

metadata_lost_beside_sums = patched(
    "A single file with checksums lacks the user's metadata.",
    mutated("twinproof.checkpoint.shards:save_file", "**(metadata or {}), ", ""),
    kills="CKPT-650",
)
