"""What an implementation may declare in ``CAPABILITIES``: each word, and what the suite then asks of it.

A misspelt word would be one that is not declared, and what it stands for would be skipped: words that nobody knows are
refused. The page ``docs/test-your-own.md`` has this table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

import pytest

from conformance.harness.implementation import capabilities

__all__ = ["WORDS", "check_words"]

# By component; what asks for parts of fastimpl names them.
WORDS: Mapping[str, Mapping[str, str]] = {
    "kvstore": {
        "injected_allocation_failure": "`store.fail_allocations(table, after_count)` lets allocations fail, and "
        "nothing is left half done",
        "large_batches": "batches above 2**32 bytes, and tables so large that threads share a verb",
        "operators": "the row store's operators, `fastimpl.ops.kvstore`, and rows that lie on a device",
        "shared_readers": "a reader does not wait for another one",
        "streamed_saves": "a save holds at most 16 MiB of rows, and a load reads saved rows from their files",
    },
    "pipeline": {
        "bag_kernels": "the operators of lookups, `fastimpl.ops.pipeline`, and their bits on any number of threads",
        "counted_collectives": "how many collectives a step makes",
        "streams": "schedules work on streams, whose order, memory and waits a virtual device records",
    },
    "offload": {
        "bounded_window": "a step holds no more on the device than its slots",
        "coalesced_copies": "a chunk takes one copy for each direction",
        "copies_in_one_call": "the operator that makes many copies in one call, of `fastimpl.ops.offload`",
        "fused_cpu_adam": "the operators of a step on the CPU in one pass, of `fastimpl.ops.offload`",
        "fused_updates": "the operators of an update in a slot, of `fastimpl.ops.offload`",
        "host_slabs": "host memory that the library takes by itself, of `fastimpl.ops.offload`",
        "overlapped_transfers": "copies run beside the update, and the host does not wait",
        "packed_tensors": "the operators that pack small tensors, of `fastimpl.ops.offload`",
        "prefetched_chunks": "`prefetch()` brings chunks before the step",
    },
    "checkpoint": {
        "balanced_writes": "ranks write about as many bytes each",
        "bounded_memory": "what a save and a load add to memory, whatever the model's size",
        "counted_io": "how many calls a save makes, and the plans of `fastimpl.checkpoint`",
        "ranged_reads": "a load reads no more than the ranges that it needs",
        "staged_copies": "the checkpoint's operators, `fastimpl.ops.checkpoint`, and copies from and to a device",
    },
}


def check_words(implementation: str, stem: str, asked: Iterable[str] = ()) -> None:
    """Demand that the suite knows every word that a component declares.

    Args:
        implementation: the module under test.
        stem: the component.
        asked: words that collected tests ask for beside those of this suite.

    Raises:
        pytest.UsageError: naming the words, and those of the suite that are written alike.
    """
    known = {word for words in WORDS.values() for word in words} | set(asked)
    unknown = sorted(capabilities(implementation, stem) - known)
    if not unknown:
        return
    near = [found for word in unknown for found in get_close_matches(word, known, n=2)]
    expected = ", ".join(near or sorted(known))
    raise pytest.UsageError(
        f"CAPABILITIES of {implementation}, {stem}: words that this suite does not know: "
        f"got {', '.join(unknown)}, expected {'of ' if not near else 'such as '}{expected}"
    )
