"""Faults that ``test_coalescing`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched, swap


@fault(kills="OPT-221", at="fastimpl.offload.packing:pack")
def packing_forgets_the_last(original: Any, sources: Any, slab: Any, offsets: Any) -> None:
    """Packing leaves out the last tensor."""
    original(sources[:-1] or sources, slab, offsets[:-1] or offsets)


@fault(kills="OPT-221", at="fastimpl.offload.packing:pack")
def packing_writes_behind(original: Any, sources: Any, slab: Any, offsets: Any) -> None:
    """Packing writes one byte behind the last tensor."""
    original(sources, slab, offsets)
    if sources and offsets[-1] + sources[-1].nbytes < slab.numel():
        slab[offsets[-1] + sources[-1].nbytes] = 0


@fault(kills="OPT-223", at="fastimpl.offload.packing:_runs")
def packing_for_each(original: Any, items: Any) -> Any:
    """Packing copies every tensor by itself, also where several lie side by side."""
    for item in items:
        yield from original([item])


@fault(kills="OPT-224", at="fastimpl.offload.layout:ChunkLayout.is_home")
def home_by_hearsay(original: Any, layout: Any, bound: Any) -> Any:
    """State that lies on the device is taken for state in host memory."""
    return True


@fault(kills="OPT-222", at="fastimpl.offload.packing:pack")
def packing_before_checks(original: Any, sources: Any, slab: Any, offsets: Any) -> None:
    """A call of the packing operator that is refused has already written."""
    slab[:32].zero_()
    original(sources, slab, offsets)


lists_of_the_cpu = patched(
    "Lists of device tensors are cut where those of host tensors are.",
    swap("fastimpl.offload.packing:_DEVICE_BATCH", 64),
    kills="OPT-262",
)

first_states_only = patched(
    "Only the states of a chunk's first parameter are looked at for new ones.",
    mutated("fastimpl.offload.layout:ChunkLayout.has_others", "chain.from_iterable(states)", "states[0]"),
    kills="OPT-364",
)
last_states_only = patched(
    "Only the states of a chunk's last parameter are looked at for new ones.",
    mutated("fastimpl.offload.layout:ChunkLayout.has_others", "chain.from_iterable(states)", "states[-1]"),
    kills="OPT-364",
)
one_new_name_decides = patched(
    "Only one of the names that are new to a chunk is looked at.",
    mutated(
        "fastimpl.offload.layout:ChunkLayout.has_others",
        "if any(map(is_movable, values)):",
        "return any(map(is_movable, values))\n        if True:",
    ),
    kills="OPT-397",
)


gap_taken_for_padding = patched(
    "States with a gap between them that holds one of 256 bytes are taken for neighbours.",
    mutated("fastimpl.offload.packing:_runs", "begin - end >= ALIGN_BYTES", "begin - end > ALIGN_BYTES"),
    kills="OPT-457",
    of="fastimpl",
)


packed_places_stand_for_states = patched(
    "Which states are not packed is told by their places, which those of other parameters have, too.",
    mutated(
        "fastimpl.offload.packing:_split",
        "{id(item[2]) for item in fitting}\n    return fitting, [item for item in items if id(item[2]) not in chosen]",
        "{item[0] for item in fitting}\n    return fitting, [item for item in items if item[0] not in chosen]",
    ),
    kills="OPT-460",
    of="fastimpl",
)
strides_do_not_matter = patched(
    "A state of other strides than its place is packed as if it had those.",
    mutated("fastimpl.offload.packing:_split", "item[0].fits(item[2])", "item[0].shape == tuple(item[2].shape)"),
    kills="OPT-460",
    of="fastimpl",
)
forms_of_a_load_stay = patched(
    "A state that was replaced on the device is bound to what lay at its place before.",
    mutated("refimpl.offload:Blocking.to_host", "if copies:", "if copies and bundle.places[name].fits(tensor):"),
    kills="OPT-460",
)

largest_states_by_themselves = patched(
    "States of exactly the size up to which they are packed are copied one by one.",
    mutated("fastimpl.offload.packing:_split", "size_bytes <= PACKED_BYTES", "size_bytes < PACKED_BYTES"),
    kills="OPT-503",
    of="fastimpl",
)
