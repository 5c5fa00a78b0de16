"""Faults that ``test_failed_saves`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_NAMED = "twinproof.kvstore.disk:_raise_named"

failures_are_torchs = patched(
    "What a writer refuses is told as torch wraps it.",
    mutated("twinproof.kvstore.disk:StoreFiles.save", "_raise_named(error, rank)", "pass"),
    kills="KV-467",
)
nul_is_the_systems = patched(
    "A path with a NUL goes to the system.",
    mutated("twinproof.checkpoint.format:local_path", 'if "\\0" in text:', "if False:"),
    kills="KV-467",
)
systems_errors_stay_wrapped = patched(
    "An error of the system stays in torch's exception.",
    mutated(_NAMED, "TwinproofError | OSError", "TwinproofError"),
    kills="KV-468",
)
others_are_told_by_torch = patched(
    "Ranks that did not fail raise torch's exception.",
    mutated(_NAMED, "if rank not in first:", "if False:"),
    kills="KV-468",
)
who_waited_is_nobody = patched(
    "Where every rank says that another one failed, none is found that did.",
    mutated(_NAMED, "own or failures", "own"),
    kills="KV-473",
)
