"""Faults that ``test_alike`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched, swap

rank_0_decides = patched(
    "What other ranks ask for is not looked at.",
    swap("twinproof.checkpoint.dcp:check_told", lambda told: None),
    kills="CKPT-747",
)
mappings_by_their_length = patched(
    "Of a mapping the number of names is compared alone.",
    mutated(
        "twinproof.checkpoint.plan:WriterOptions.told",
        '"fqn_to_index_mapping": self._sum',
        '"fqn_to_index_mapping": len(self.mapping or ())',
    ),
    kills="CKPT-747",
)
folders_of_the_writers = patched(
    "The folder of a writer is compared, not that of its save.",
    mutated("twinproof.checkpoint.plan:WriterOptions.told", "path.absolute()", "self.path.absolute()"),
    kills="CKPT-747",
)
threads_have_to_agree = patched(
    "Ranks of different numbers of threads are refused.",
    mutated("twinproof.checkpoint.plan:WriterOptions.told", '"thread_count", ', ""),
    kills="CKPT-748",
)
native_folders_may_differ = patched(
    "Training is saved where rank 0 says.",
    swap("twinproof.checkpoint.native:check_told", lambda told: None),
    kills="CKPT-749",
)
