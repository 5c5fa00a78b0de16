"""Faults that ``test_triggers`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched


@fault(kills="KV-154", at="twinproof.kvstore.eviction:BackgroundEvictor._stepped")
def round_after_every_step(original: Any, evictor: Any, table: str) -> None:
    """The background evictor runs a round after every step of training."""
    evictor._step_count = 0
    evictor._trigger_steps, kept = 1, evictor._trigger_steps
    try:
        original(evictor, table)
    finally:
        evictor._trigger_steps = kept


steps_by_the_tables_number = patched(
    "Steps are counted by the number that the table's have.",
    mutated(
        "twinproof.kvstore.eviction:BackgroundEvictor._stepped",
        "self._step_count += 1",
        "self._step_count = self._store.step_count(table)",
    ),
    kills="KV-154",
)


@fault(kills="KV-155", at="twinproof.kvstore.eviction:BackgroundEvictor._has_many_bytes")
def memory_in_whole_units(original: Any, evictor: Any) -> bool:
    """The memory that triggers a round is rounded down to whole units."""
    # As upstream, which compares whole gigabytes.
    evictor._trigger_bytes, kept = (evictor._trigger_bytes or 0) // 1024 * 1024, evictor._trigger_bytes
    try:
        return bool(original(evictor))
    finally:
        evictor._trigger_bytes = kept


other_listeners_removed = patched(
    "To remove a listener of steps removes the others.",
    mutated(
        "twinproof.kvstore.store:KVStore.remove_listener",
        "if known == listener:",
        "if (known == listener) != (listeners is self._step_listeners):",
    ),
    kills="KV-236",
)


waits_for_the_next_alone = patched(
    "Waiting ends when a round has begun.",
    mutated("twinproof.kvstore.eviction:BackgroundEvictor.wait", "(worker.due or worker.busy)", "worker.due"),
    kills="KV-251",
)
forgets_what_came_in_a_round = patched(
    "That a round is due is forgotten when it has run, with what triggered the next one meanwhile.",
    mutated(
        "twinproof.kvstore.eviction:_Worker._work",
        "self.due, self.busy = False, True\n        try:\n            self._round()",
        "self.busy = True\n        try:\n            self._round()\n            self.due = False",
    ),
    kills="KV-267",
)
partial_rounds_not_told = patched(
    "What a round did that was ended by close is not told.",
    mutated(
        "twinproof.kvstore.eviction:_Worker._round",
        "self.rounds.append(found.stats)",
        "self.rounds.extend([found.stats] if found.done else [])",
    ),
    kills="KV-270",
)
first_failure_is_the_end = patched(
    "A round that fails is the last one.",
    mutated(
        "twinproof.kvstore.eviction:_Worker._round",
        "if evictor is None else",
        "if evictor is None or evictor._failure is not None else",
    ),
    kills="KV-271",
)
steps_counted_late = patched(
    "The step is counted when those who listen have heard of it.",
    mutated(
        "twinproof.kvstore.store:KVStore.apply_gradients",
        "    try:\n        self.tell_written(table)",
        "        self._engine.set_step(table, number - 1)\n"
        "    try:\n        self.tell_written(table)\n        self._engine.set_step(table, number)",
    ),
    kills="KV-255",
)
closed_and_still_told_of_steps = patched(
    "An evictor of steps stays among those that its store tells of them.",
    mutated("twinproof.kvstore.eviction:BackgroundEvictor._end", "self._store.remove_listener(self._stepped)", "pass"),
    kills="KV-256",
)
closed_and_still_told_of_writes = patched(
    "An evictor of rows or bytes stays among those that its store tells of writes.",
    mutated("twinproof.kvstore.eviction:BackgroundEvictor._end", "self._store.remove_listener(self._written)", "pass"),
    kills="KV-256",
)
nobody_hears_of_views = patched(
    "Rows that a view writes are told to nobody.",
    mutated("twinproof.kvstore.store:KVStore.place", "self.tell_written(table)", "pass"),
    kills="KV-282",
)
nobody_hears_of_state_dicts = patched(
    "Rows of a state dict are told to nobody.",
    mutated("twinproof.kvstore.store:KVStore.load_state_dict", "self.tell_written(*begun)", "pass"),
    kills="KV-282",
)
removals_are_told = patched(
    "Who listens for writes hears of removals, too.",
    mutated(
        "twinproof.kvstore.store:KVStore.clear",
        "self._engine.clear(table)",
        "self._engine.clear(table)\n        self.tell_written(table)",
    ),
    kills="KV-282",
)


@fault(kills="KV-310", at="twinproof.kvstore.store:KVStore.tell_written")
def listeners_of_the_moment(original: Any, store: Any, table: str) -> None:
    """Who was removed while others were told is not told any more."""
    for listener in tuple(store._listeners.values()):
        if listener in store._listeners.values():
            listener(table)


@fault(kills="KV-310", at="twinproof.kvstore.store:KVStore.remove_listener")
def removed_from_one_list(original: Any, store: Any, listener: Any) -> None:
    """A listener of writes that is removed goes on listening for steps."""
    kept = store._step_listeners.copy()
    is_found = listener in store._listeners.values()
    original(store, listener)
    if is_found:
        store._step_listeners = kept


failures_lost_at_the_end = patched(
    "What a round raised is lost where nobody waits.",
    mutated("twinproof.kvstore.eviction:BackgroundEvictor._tell", "failure is not None and", "False and"),
    kills="KV-425",
)

failures_told_again = patched(
    "What a round raised is raised by every close.",
    mutated(
        "twinproof.kvstore.eviction:BackgroundEvictor._tell", "self._worker.untold, None", "self._worker.untold, 'told'"
    ),
    kills="KV-425",
)

failures_before_errors = patched(
    "What a round raised takes the place of an error that leaves the block.",
    mutated("twinproof.kvstore.eviction:BackgroundEvictor.__exit__", "if error is None:", "if True:"),
    kills="KV-425",
)

waits_for_a_thread_of_another_process = patched(
    "Who waits in a forked process waits for a thread that does not live there.",
    mutated("twinproof.kvstore.eviction:_Worker.is_over", "or not self._thread.is_alive()", ""),
    kills="KV-432",
)
silence_in_a_forked_process = patched(
    "Waiting in a forked process ends, as if there were nothing to do.",
    mutated("twinproof.kvstore.eviction:BackgroundEvictor.wait", "and not worker.closed:", "and False:"),
    kills="KV-432",
)
nobody_behind_one_that_raises = patched(
    "Listeners behind one that raises are not told.",
    mutated(
        "twinproof.kvstore.store:_tell",
        "told.callback(listener, table)",
        "told.callback(lambda: None)\n    for listener in dict(listeners).values():\n        listener(table)",
    ),
    kills="KV-433",
)
steps_not_told_behind_a_write_that_raises = patched(
    "Listeners of steps are not told where one of writes has raised.",
    mutated(
        "twinproof.kvstore.store:KVStore.apply_gradients",
        "finally:\n        _tell(self._step_listeners, table)",
        "finally:\n        pass\n    _tell(self._step_listeners, table)",
    ),
    kills="KV-433",
)


programs_abort = patched(
    "A program asks the threads of its evictors to end, and ends before them.",
    mutated("twinproof.kvstore.eviction:_end_all", "worker.join()", "pass"),
    kills="KV-427",
)
rounds_outlive_their_evictor = patched(
    "A round goes on to its end, though its evictor was closed.",
    mutated("twinproof.kvstore.eviction:_Worker._round", "while not self.closed and found.step", "while found.step"),
    kills="KV-270",
)
forked_programs_wait_for_a_lock = patched(
    "A forked process that ends takes a lock that a thread holds which does not live there.",
    mutated("twinproof.kvstore.eviction:_Worker.end", "if self._thread.is_alive():", "if True:"),
    kills="KV-427",
)
threads_keep_their_evictor = patched(
    "The thread of an evictor keeps it.",
    mutated("twinproof.kvstore.eviction:_Worker.__init__", "weakref.ref(evictor)", "lambda: evictor"),
    kills="KV-428",
)
failures_keep_their_store = patched(
    "The thread of an evictor keeps what a round raised, and with it the store.",
    mutated("twinproof.kvstore.eviction:_Worker._keep", "evictor._failure =", "evictor._failure = self.failure ="),
    kills="KV-428",
)
failures_nobody_ever_hears_of = patched(
    "What a round raised is lost with the evictor.",
    mutated("twinproof.kvstore.eviction:_Worker.abandon", "if untold is not None:", "if False:"),
    kills="KV-428",
)
every_round_is_held = patched(
    "What each round did is held as long as the evictor lives.",
    mutated("twinproof.kvstore.eviction:_Worker._round", "del self.rounds[:-ROUNDS_KEPT]", "pass"),
    kills="KV-446",
)
totals_of_what_is_held = patched(
    "Rounds that are held no longer are not counted.",
    mutated(
        "twinproof.kvstore.eviction:_Worker._round", "self.round_count += 1", "self.round_count = len(self.rounds)"
    ),
    kills="KV-446",
)
callers_change_what_is_held = patched(
    "Whoever changes the list of rounds changes what the evictor tells.",
    mutated(
        "twinproof.kvstore.eviction:BackgroundEvictor.rounds",
        "self._worker.rounds[-ROUNDS_KEPT:]",
        "self._worker.rounds",
    ),
    kills="KV-446",
)
