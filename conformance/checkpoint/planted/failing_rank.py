"""Planted bugs of calls that fail on one rank."""

from __future__ import annotations

from conformance.harness import mutated, patched

prepared_alone = patched(
    "A rank whose part of a save cannot be prepared raises at once, and the others write and wait for it.",
    mutated(
        "twinproof.checkpoint.dcp:HuggingFaceStorageWriter.write_data",
        "self._settled(lambda: self._prepared(plan, planner, instruction, folder, begun_s))",
        "self._prepared(plan, planner, instruction, folder, begun_s)",
    ),
    kills="CKPT-730",
)
unwritten_in_silence = patched(
    "What fails while a block is written is forgotten, and the save is shown without it.",
    mutated("fastimpl.checkpoint.run:Runner._write", "self._fail(error)\n        return", "return"),
    kills="CKPT-730",
    of="fastimpl",
)
progress_raises_alone = patched(
    "What progress raises behind a block that others sent bytes of ends this rank's turns, and the others wait.",
    mutated("fastimpl.checkpoint.run:Runner._write", "except BaseException as", "except (OSError, MemoryError) as"),
    kills="CKPT-875",
    of="fastimpl",
)
folder_stays = patched(
    "What fails on the coordinator when all is written leaves the hidden folder.",
    mutated("twinproof.checkpoint.dcp:HuggingFaceStorageWriter.finish", "self.staging.discard()", "pass"),
    kills="CKPT-730",
)
merge_begun_alone = patched(
    "A rank that cannot begin a merge raises at once, and the others wait for it.",
    mutated("twinproof.checkpoint.shards:consolidate", "together(begun, together_with)", "begun()"),
    kills="CKPT-731",
)
looked_for_alone = patched(
    "Of what ends a program while the first rank looks for a checkpoint no other rank is told.",
    mutated("twinproof.checkpoint.manager:CheckpointManager._agreed", "except BaseException as", "except Exception as"),
    kills="CKPT-731",
)
given_back_alone = patched(
    "A rank that cannot hand out what was loaded raises at once, and the others wait for it.",
    mutated(
        "twinproof.checkpoint.native:load_native",
        "together(lambda: give_back(state, loaded), group)",
        "give_back(state, loaded)",
    ),
    kills="CKPT-731",
)
loaded_over_all_ranks = patched(
    "A training of some of the ranks is loaded over the group of all.",
    mutated(
        "twinproof.checkpoint.native:load_native",
        "planner=planner, process_group=process_group)",
        "planner=planner)",
    ),
    kills="CKPT-876",
)
managed_over_all_ranks = patched(
    "A manager saves over the group of all ranks.",
    mutated(
        "twinproof.checkpoint.manager:CheckpointManager._save",
        "planner=planner, process_group=self._group)",
        "planner=planner)",
    ),
    kills="CKPT-876",
)
