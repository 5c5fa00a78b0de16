"""Faults that ``test_manager_waits`` must notice."""

from __future__ import annotations

import copy
from typing import Any

from conformance.harness import fault, mutated, patched

loaded_beside_a_save = patched(
    "A load does not wait for the save that is on its way, and finds the checkpoint before it.",
    mutated("twinproof.checkpoint.manager:CheckpointManager.load", "self.maybe_wait_for_saving()", "None"),
    kills="CKPT-625",
)


@fault(kills="CKPT-628", at="twinproof.checkpoint.manager:_Cleaner.clean")
def late_deletions_keep_another(original: Any, cleaner: Any, saved_step: int) -> None:
    """A deletion that is late keeps the checkpoint after which it was asked for, and not what was saved since."""
    steps, clean = vars(cleaner).setdefault("steps", []), type(cleaner)._clean

    def as_asked() -> None:
        cleaner._saved_step, cleaner.saving_step = steps.pop(0), None
        clean(cleaner)

    steps.append(saved_step)
    cleaner._clean = as_asked
    original(cleaner, saved_step)


failures_told_for_ever = patched(
    "The failure of an asynchronous save is told by every call after it.",
    mutated(
        "twinproof.checkpoint.manager:CheckpointManager.maybe_wait_for_saving",
        "            self._pending = None\n            end_exchange(",
        "            end_exchange(",
    ),
    kills="CKPT-629",
)

gone_is_an_error = patched(
    "A checkpoint that goes between two looks is an error of whoever looks for another.",
    mutated("twinproof.checkpoint.manager:complete_steps", "except FileNotFoundError", "except ZeroDivisionError"),
    kills="CKPT-643",
)

deleted_while_loaded = patched(
    "Retention deletes a checkpoint that is being loaded.",
    mutated("twinproof.checkpoint.manager:_Cleaner._clean", "(self._loading_step, self", "(self"),
    kills="CKPT-644",
)

kept_after_the_load = patched(
    "What a load has kept from retention stays for ever.",
    mutated("twinproof.checkpoint.manager:_Cleaner.let_go", "self._loading_step = None", "return"),
    kills="CKPT-644",
)

kept_after_a_load_that_failed = patched(
    "What a load that then failed has kept from retention stays for ever.",
    mutated("twinproof.checkpoint.manager:CheckpointManager.load", "finally:", "except RecursionError:"),
    kills="CKPT-705",
)

looked_at_twice = patched(
    "A checkpoint that goes between two looks at its format is one without a format, which is an error.",
    mutated(
        "twinproof.checkpoint.manager:complete_steps", "one_of(formats, folder / name)", "detect_format(folder / name)"
    ),
    kills="CKPT-643",
)

one_look_is_enough = patched(
    "A load whose newest checkpoint is gone looks for no other.",
    mutated(
        "twinproof.checkpoint.manager:CheckpointManager._find",
        "del complete[chosen]",
        "del complete[chosen]; break",
    ),
    kills="CKPT-710",
)


on_its_way_is_saved = patched(
    "A save of a step that an asynchronous save of is on its way is taken for that one.",
    mutated(
        "twinproof.checkpoint.manager:CheckpointManager.save",
        "    self.maybe_wait_for_saving()\n",
        "    if self._pending is not None and self._pending.step == curr_step:\n        return True\n"
        "    self.maybe_wait_for_saving()\n",
    ),
    kills="CKPT-736",
)


folder_of_the_moment = patched(
    "A manager's folder is looked for wherever the process works by then.",
    mutated(
        "twinproof.checkpoint.manager:CheckpointManager.__init__",
        '_standing(local_path(folder, "folder"))',
        'local_path(folder, "folder")',
    ),
    kills="CKPT-863",
)
initial_folder_of_the_moment = patched(
    "A manager's initial checkpoint is looked for wherever the process works by then.",
    mutated(
        "twinproof.checkpoint.manager:CheckpointManager.__init__",
        '_standing(local_path(initial_load_path, "initial_load_path"))',
        'local_path(initial_load_path, "initial_load_path")',
    ),
    kills="CKPT-863",
)

links_are_folders = patched(
    "A checkpoint that is a link is deleted as a folder is, which cannot be done.",
    mutated("twinproof.checkpoint.manager:_Cleaner._clean", "(self.folder / name).is_symlink()", "False"),
    kills="CKPT-855",
)

what_links_lead_to_is_deleted = patched(
    "Retention deletes what a link leads to.",
    mutated(
        "twinproof.checkpoint.manager:_Cleaner._clean",
        "os.unlink(self.folder / name)",
        "shutil.rmtree(os.path.realpath(self.folder / name)); os.unlink(self.folder / name)",
    ),
    kills="CKPT-855",
)

interrupted_save_given_up = patched(
    "A save whose wait was interrupted counts as failed, and is cleared away while its threads write.",
    mutated(
        "twinproof.checkpoint.manager:CheckpointManager.maybe_wait_for_saving",
        "if pending.upload.done() and pending.upload.exception() is error:",
        "if pending.upload:",
    ),
    kills="CKPT-859",
)

closed_beside_a_save = patched(
    "close() that is interrupted closes all the same, beside the save that is on its way.",
    mutated("twinproof.checkpoint.manager:CheckpointManager.close", "if self._pending is None:", "if True:"),
    kills="CKPT-859",
)

any_ranks_save = patched(
    "Whichever ranks come to a manager's save are those that save.",
    mutated(
        "twinproof.checkpoint.native:NativeStorageWriter.prepare_global_plan", "not in (None, len(plans))", "in ()"
    ),
    kills="CKPT-860",
)

threads_stay_without_managers = patched(
    "The thread of retention stays when its manager has gone.",
    mutated("twinproof.checkpoint.manager:_Cleaner.end", "self._asked.put(False)", "self._asked.put(True)"),
    kills="CKPT-865",
)

readers_have_retention = patched(
    "A manager that only loads has a thread to delete with.",
    mutated("twinproof.checkpoint.manager:CheckpointManager._set_up", " and not self.policy.load_only", ""),
    kills="CKPT-865",
)


@fault(kills="CKPT-969", at="twinproof.checkpoint.manager:_Cleaner._clean")
def kept_as_when_it_began(original: Any, cleaner: Any) -> None:
    """Which steps are kept from retention is looked at before its first step."""
    original(copy.copy(cleaner))
