"""Faults that ``test_crash_manager`` must notice."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from conformance.harness import mutated, patched, swap, wrap


def _shown_file_by_file(original: Callable[[Any], None], staging: Any) -> None:
    if staging.target.exists():
        original(staging)
        return
    staging.target.mkdir()
    for name in sorted(os.listdir(staging.folder)):
        os.rename(staging.folder / name, staging.target / name)
    staging.folder.rmdir()


metadata_shown_first = patched(
    "A step is shown file by file, its metadata before its data, and loaded without a look at its files.",
    wrap("twinproof.checkpoint.publish:Staging._publish_folder", _shown_file_by_file),
    swap("twinproof.checkpoint.manager:is_whole", lambda *_: True),
    kills="CKPT-889",
)

hidden_stays = patched(
    "What was hidden to be deleted stays.",
    mutated("twinproof.checkpoint.manager:_Cleaner._clean", "if _DELETED.fullmatch(name):", "if False:"),
    kills="CKPT-889",
)
