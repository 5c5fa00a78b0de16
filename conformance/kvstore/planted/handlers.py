"""Faults that ``test_handlers`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_STORE = "twinproof.kvstore.store:KVStore"
_UPDATE = "self._engine.update(table, checked, floats, hyper, now)"

steps_written_late = patched(
    "The step of a table is written behind its rows.",
    mutated(
        f"{_STORE}.apply_gradients",
        _UPDATE,
        f"before = self.step_count(table)\n        {_UPDATE}\n        self._engine.set_step(table, before)\n"
        "        self._engine.set_step(table, number)",
    ),
    kills="KV-454",
)
steps_written_early = patched(
    "The step of a table is written before its rows.",
    mutated(f"{_STORE}.apply_gradients", _UPDATE, f"self._engine.set_step(table, number)\n        {_UPDATE}"),
    kills="KV-454",
)
interrupted_clears_stay_bases = patched(
    "A table that an interrupted clear has emptied stays a base of deltas.",
    mutated("twinproof.kvstore.deltas:Fingerprints.forgetting", "self.forget(table)\n    try:", "try:"),
    kills="KV-455",
)
steps_behind_all_tables = patched(
    "A load sets the steps when it has written all tables.",
    mutated(
        "twinproof.kvstore.disk:StoreFiles.load",
        "store.set_step_count(table, ",
        "opened.callback(store.set_step_count, table, ",
    ),
    kills="KV-481",
)
failed_clears_are_no_bases = patched(
    "A table that a clear has failed on is no base any more.",
    mutated("twinproof.kvstore.deltas:Fingerprints.forgetting", "if is_known:", "if False:"),
    kills="KV-474",
)
failed_clears_are_loads = patched(
    "A table that was never loaded counts as loaded from something without a name, when a clear has failed on it.",
    mutated("twinproof.kvstore.deltas:Fingerprints.forgetting", "if is_known:", "if True:"),
    kills="KV-474",
)
names_before_their_parts = patched(
    "What a table was loaded from is noted before which part of it.",
    mutated(
        "twinproof.kvstore.deltas:Fingerprints.set_loaded",
        "self._loaded[table] = None\n",
        "self._loaded[table] = name\n",
    ),
    kills="KV-482",
)
listeners_written_back = patched(
    "Who removes a listener writes back those that there were when it began.",
    mutated(
        f"{_STORE}.remove_listener",
        "for number, known in listeners.copy().items():\n            if known == listener:\n"
        "                listeners.pop(number, None)",
        "kept = {number: known for number, known in listeners.copy().items() if known != listener}\n"
        "        listeners.clear()\n        listeners.update(kept)",
    ),
    kills="KV-483",
)
numbers_of_listeners_repeat = patched(
    "A listener takes the place of one that another thread adds meanwhile.",
    mutated(
        f"{_STORE}.add_listener",
        "(self._step_listeners if steps else self._listeners)[next(self._listener_numbers)] = listener",
        "chosen = self._step_listeners if steps else self._listeners\n    number = max(chosen, default=0) + 1\n"
        "    chosen[number] = listener",
    ),
    kills="KV-483",
)
