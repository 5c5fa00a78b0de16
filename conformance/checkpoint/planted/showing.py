"""Faults that ``test_showing`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_REPLACE = "twinproof.checkpoint.publish:Staging._replace"

hidden_where_the_second_rename_fails = patched(
    "Where the new folder does not come, the old one stays under its hidden name.",
    mutated(_REPLACE, "os.rename(previous, self.target)", "pass"),
    kills="CKPT-968",
)
exchange_forgotten_by_an_interrupt = patched(
    "What an exchange put under the hidden name is deleted as the save's own where an interrupt comes behind it.",
    mutated(_REPLACE, "elif found != own:", "elif False:"),
    kills="CKPT-968",
)
replaced_folder_stays = patched(
    "What was replaced stays where an interrupt comes behind the second rename.",
    mutated(
        _REPLACE, "if found is None:\n            self._replaced = previous", "if found is None:\n            pass"
    ),
    kills="CKPT-968",
)
