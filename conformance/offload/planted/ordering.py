"""Edges that are left out or lead from the wrong stream, and memory that goes too early or never."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from conformance.harness import PlantedBug, swap, wrap

OFFLOADER = "fastimpl.offload.transfers:StreamedTransfers"


class _Altered:
    """The engine with one call left out, or changed: the ``nth`` of its kind during a method."""

    def __init__(self, engine: Any, call: str, nth: int, instead: Callable[..., Any] | None) -> None:
        self._engine, self._call, self._nth, self._instead = engine, call, nth, instead

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        return self._count(found) if name == self._call else found

    def _count(self, original: Any) -> Any:
        def call(*arguments: Any) -> Any:
            self._nth -= 1
            if self._nth != 0:
                return original(*arguments)
            return self._instead(original, *arguments) if self._instead is not None else None

        return call


def altered(method: str, call: str, nth: int = 1, instead: Callable[..., Any] | None = None) -> Any:
    """Leave the ``nth`` call of an engine's verb out while a method of the offloader runs, or do something instead."""

    def around(original: Callable[..., Any], offloader: Any, *arguments: Any, **options: Any) -> Any:
        engine = offloader.engine
        offloader.engine = _Altered(engine, call, nth, instead)
        try:
            return original(offloader, *arguments, **options)
        finally:
            offloader.engine = engine

    return wrap(f"{OFFLOADER}.{method}", around)


def _bug(id: str, sentence: str, requirements: tuple[str, ...], patch: Any) -> PlantedBug:
    return PlantedBug(id, sentence, requirements, "fastimpl", patch)


def _new_streams(original: Any, offloader: Any, *arguments: Any) -> Any:
    offloader._in, offloader._out = offloader.engine.stream("in"), offloader.engine.stream("out")
    return original(offloader, *arguments)


def _one_stream(original: Any, offloader: Any, *arguments: Any) -> Any:
    offloader._in = offloader._out = offloader.engine.current()
    return original(offloader, *arguments)


def _all_slots(original: Any, transfers: Any) -> Any:
    transfers.plan.options = dataclasses.replace(transfers.plan.options, slots=1 << 20)
    return original(transfers)


def _waits_at_the_end(original: Any, offloader: Any, *arguments: Any) -> Any:
    result = original(offloader, *arguments)
    offloader.settle()
    return result


def _not_moved(original: Any, transfers: Any, arithmetic: Any, step_whole: Any) -> bool:
    arithmetic()
    return False


def _one_each(original: Any, memory: Any, bundles: Any, chunk_bytes: int, engine: Any) -> Any:
    return original(memory, bundles, 1, engine)


def _fetched_anyway(original: Any, offloader: Any) -> None:
    slots, fetched = offloader._slots, offloader._fetched
    original(offloader)
    offloader._slots, offloader._fetched = slots, fetched


@contextmanager
def _trusts_what_was_fetched() -> Iterator[None]:
    only_once = wrap(f"{OFFLOADER}._fetch_first", lambda original, own: None if own._slots else original(own))
    with only_once(), wrap(f"{OFFLOADER}.settle_for_writing", _fetched_anyway)():
        yield


def _keeps_a_slot(original: Any, offloader: Any, *arguments: Any) -> None:
    slots = offloader._slots[:1]
    original(offloader, *arguments)
    offloader.__dict__.setdefault("_kept", []).extend(slots)


PLANTED = (
    _bug(
        "cuda_waits_for_nothing",
        "On a GPU streams do not wait for events.",
        ("OPT-110",),
        swap("twinproof.engine:CudaEngine.wait", lambda engine, stream, event: None),
    ),
    _bug(
        "a_slot_leaks_each_step",
        "A staging slot stays allocated after each step.",
        ("OPT-111",),
        wrap(f"{OFFLOADER}._drop_fetched", _keeps_a_slot),
    ),
    _bug(
        "no_wait_for_the_copy_in",
        "The update does not wait for its chunk to arrive.",
        ("OPT-065", "OPT-066", "OPT-001"),
        altered("_update_chunk", "wait"),
    ),
    _bug(
        "copy_out_before_the_update",
        "The copy out does not wait for the update.",
        ("OPT-066", "OPT-020", "OPT-042"),
        altered("_send", "wait"),
    ),
    _bug(
        "event_on_the_wrong_stream",
        "The event behind the update is recorded on the copy stream.",
        ("OPT-066", "OPT-002"),
        altered("_send", "record", 1, lambda record, event, stream: record(event, "offload-d2h")),
    ),
    _bug(
        "slot_written_while_in_use",
        "A slot is filled before the copy out of the chunk that used it.",
        ("OPT-006", "OPT-007"),
        altered("_fetch", "wait", 2),
    ),
    _bug(
        "host_read_before_it_was_written",
        "A copy in does not wait for the copy out of what was on the device.",
        ("OPT-087",),
        altered("_fetch", "wait", 1),
    ),
    _bug(
        "slots_not_kept",
        "Slots go back to the allocator while copies still use them.",
        ("OPT-016", "OPT-017"),
        swap("conformance.provers.virtual_device.engine:VirtualEngine.keep", lambda engine, tensor, stream: None),
    ),
    _bug(
        "slots_written_before_their_allocation",
        "A copy in does not wait for the stream that allocated its slot.",
        ("OPT-031", "OPT-012"),
        altered("_fetch_first", "wait", 1),
    ),
    _bug(
        "state_left_without_being_kept",
        "What a load left on the device is released while it is copied out.",
        ("OPT-048",),
        altered("to_host", "keep", 1),
    ),
    _bug(
        "host_read_too_early",
        "Host memory counts as filled as soon as the copy is queued.",
        ("OPT-046", "OPT-050", "OPT-052"),
        swap(f"{OFFLOADER}.settle", lambda offloader: None),
    ),
    _bug(
        "masters_written_under_a_copy_in",
        "refresh_masters() writes host memory that a copy in still reads.",
        ("OPT-041",),
        swap(f"{OFFLOADER}.settle_for_writing", lambda offloader: offloader.settle()),
    ),
    _bug(
        "streams_made_each_step",
        "A new pair of streams for every step.",
        ("OPT-059",),
        wrap(f"{OFFLOADER}.step", _new_streams),
    ),
    _bug(
        "nothing_overlaps",
        "Copies run on the stream of the update.",
        ("OPT-079",),
        wrap(f"{OFFLOADER}.step", _one_stream),
    ),
    _bug(
        "everything_fetched_at_once",
        "All chunks are on the device at the same time.",
        ("OPT-057",),
        wrap(f"{OFFLOADER}._fetch_first", _all_slots),
    ),
    _bug(
        "slots_kept_between_steps",
        "The staging slots stay allocated.",
        ("OPT-056",),
        swap(f"{OFFLOADER}._drop_fetched", lambda offloader: setattr(offloader, "_fetched", 0)),
    ),
    _bug(
        "host_waits_each_step",
        "Every step ends with a wait of the host.",
        ("OPT-069",),
        wrap(f"{OFFLOADER}.step", _waits_at_the_end),
    ),
    _bug(
        "call_site_lost",
        "The step runs, and nothing moves (Megatron #4716, 73 days).",
        ("OPT-076",),
        wrap(f"{OFFLOADER}.step", _not_moved),
    ),
    _bug(
        "a_copy_for_each_tensor",
        "Parameters are moved one by one.",
        ("OPT-078",),
        wrap("fastimpl.offload.transfers:cut", _one_each),
    ),
    _bug(
        "prefetched_values_trusted",
        "What was written to host memory after a prefetch is lost.",
        ("OPT-072",),
        _trusts_what_was_fetched,
    ),
)
