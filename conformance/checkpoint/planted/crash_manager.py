"""Faults that ``test_crash_manager`` must notice."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from conformance.harness import fault, mutated, patched


@fault(kills="CKPT-889", at="twinproof.checkpoint.publish:Staging._publish_folder")
def metadata_shown_first(original: Callable[[Any], None], staging: Any) -> None:
    """A step is shown file by file, its metadata before its data."""
    if staging.target.exists():
        original(staging)
        return
    staging.target.mkdir()
    for name in sorted(os.listdir(staging.folder)):
        os.rename(staging.folder / name, staging.target / name)
    staging.folder.rmdir()


hidden_stays = patched(
    "What was hidden to be deleted stays.",
    mutated("twinproof.checkpoint.manager:_Cleaner._clean", "if _DELETED.fullmatch(name):", "if False:"),
    kills="CKPT-889",
)
