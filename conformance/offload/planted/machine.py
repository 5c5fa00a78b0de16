"""Faults that ``test_machine`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault


@fault(kills="OPT-030", at="twinproof.offload.offloader:OptimizerStateOffloader.load_state_dict", of="fastimpl")
def prefetched_before_the_load(original: Any, offloader: Any, state_dict: Any) -> None:
    """A step uses what was prefetched before a load."""
    offloader.transfers._drop_fetched = lambda: None
    try:
        original(offloader, state_dict)
    finally:
        del offloader.transfers._drop_fetched
    for chunk in offloader.transfers._chunks:
        chunk.version = chunk.memory._version


@fault(kills="OPT-030", at="twinproof.offload.offloader:OptimizerStateOffloader.load_state_dict", of="fastimpl")
def loaded_under_a_copy_in(original: Any, offloader: Any, state_dict: Any) -> None:
    """A load writes host memory that a prefetch still reads."""
    offloader.settle_for_writing = offloader.settle
    try:
        original(offloader, state_dict)
    finally:
        del offloader.settle_for_writing


@fault(kills="OPT-260", at="twinproof.offload.offloader:OptimizerStateOffloader.offload")
def copied_once(original: Any, offloader: Any, *flags: Any, **named: Any) -> None:
    """A second offload() before the release takes what the first copied for what is there now."""
    copied_out = offloader._copied_out
    if offloader.options.release == "at_offload" or not copied_out._noted:
        original(offloader, *flags, **named)
        return
    before = set(copied_out._noted)
    copied_out.note(offloader.plan, offloader.transfers, lambda bundle, name: (bundle.param, name) in before)
