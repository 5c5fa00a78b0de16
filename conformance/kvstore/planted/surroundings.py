"""Faults that ``test_surroundings`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

rows_of_the_default_dtype = patched(
    "Modules look rows up in the default dtype of the process.",
    mutated("twinproof.kvstore.modules:_Lookup.forward", ".to(torch.float32)", ".to(torch.get_default_dtype())"),
    kills="KV-275",
)
places_on_the_default_device = patched(
    "Places of saved rows are counted on the default device of the process.",
    mutated("twinproof.kvstore.disk:SavedRows.check_order", ', device="cpu"', ""),
    kills="KV-275",
)
moments_of_inference = patched(
    "Under inference the step of a state dict is left out.",
    mutated(
        "twinproof.kvstore.statedict:state_dict",
        'if source.layout(table).optimizer != "none":',
        'if source.layout(table).optimizer != "none" and torch.is_grad_enabled():',
    ),
    kills="KV-275",
)
found_from_here_alone = patched(
    "Saved rows are opened again by the very path that was given, wherever the process stands by then.",
    mutated("twinproof.kvstore.disk:SavedRows.__init__", "_from_anywhere(os.fspath(path))", "os.fspath(path)"),
    kills="KV-272",
)
found_where_it_stands_when_asked = patched(
    "A view of saved rows travels with the folder that is the working one when the view is made.",
    mutated("twinproof.kvstore.disk:SavedRows.__init__", "_from_anywhere(os.fspath(path))", "os.fspath(path)"),
    mutated("twinproof.kvstore.disk:SavedRows.reopened", "self.path", "_from_anywhere(self.path)"),
    kills="KV-272",
)
links_that_are_not_followed = patched(
    'A path loses ".." with the name before it, also where that name is a link.',
    mutated("twinproof.kvstore.disk:_from_anywhere", "os.path.join(os.getcwd(), path)", "os.path.abspath(path)"),
    kills="KV-272",
)
