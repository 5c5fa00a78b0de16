"""Faults that ``test_strays`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched, swap

strays_are_left_where_they_lie = patched(
    "States that lie in host memory at another's place stay there.",
    swap("twinproof.offload.offloader:OptimizerStateOffloader._free_strays", lambda offloader: None),
    kills="OPT-516",
)

whatever_fits_is_at_home = patched(
    "A state of the right form is taken to lie at its own place.",
    mutated(
        "twinproof.offload.states:strays",
        "if not is_home or tensor.data_ptr() != transfers.home(bundle, name).data_ptr():",
        "if not is_home:",
    ),
    kills="OPT-516",
    of="fastimpl",
)

sizes_are_not_looked_at = patched(
    "What begins at its own place is taken for what lay there.",
    mutated(
        "fastimpl.offload.layout:ChunkLayout._are_read_as_planned",
        "all(map(eq, map(torch.Tensor.size, tensors), self._sizes))",
        "True",
    ),
    kills="OPT-516",
    of="fastimpl",
)

strides_are_not_looked_at = patched(
    "What begins at its own place and has its size is taken for what lay there.",
    mutated(
        "fastimpl.offload.layout:ChunkLayout._are_read_as_planned",
        "all(map(eq, map(torch.Tensor.stride, tensors), self._strides))",
        "True",
    ),
    kills="OPT-590",
    of="fastimpl",
)

conjugates_are_what_they_are_views_of = patched(
    "A conjugate that lies at the place of its state is taken for it.",
    mutated("twinproof.offload.states:Place.fits", "is_same and not tensor.is_conj()", "is_same"),
    kills="OPT-590",
    of="fastimpl",
)

transposes_go_home_as_planned = patched(
    "What begins at its own place of the device goes home as what lay there.",
    mutated("fastimpl.offload.transfers:StreamedTransfers.untidy", "chunk.forget_here()", "pass"),
    kills="OPT-590",
    of="fastimpl",
)

views_are_the_ones_that_were_made = patched(
    "Views of host memory are bound again, whatever memory their user gave them.",
    mutated("fastimpl.offload.transfers:StreamedTransfers.untidy", "if not chunk.layout.is_intact():", "if False:"),
    kills="OPT-517",
    of="fastimpl",
)

loads_of_groups_that_were = patched(
    "A load looks for the parameters of the last step.",
    mutated("twinproof.offload.offloader:OptimizerStateOffloader.load_state_dict", "self._adopt()", "pass"),
    kills="OPT-518",
)
