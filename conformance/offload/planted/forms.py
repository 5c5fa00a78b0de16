"""Faults that ``test_forms`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched, swap

_MASTERS = "twinproof.offload.states:MasterWeights"
_DRIVER = "twinproof.offload.driver"

masters_loaded_one_by_one = patched(
    "Masters that are loaded into each other are read after they were written.",
    mutated(f"{_MASTERS}.load", "value.clone()", "value"),
    kills="OPT-504",
)

masters_known_by_themselves = patched(
    "Masters that are loaded into each other as views, as a state dict holds them, are read after they were written.",
    mutated(f"{_MASTERS}.load", "local_of(value).untyped_storage().data_ptr() in homes", "value in self.pairs"),
    kills="OPT-504",
)

meshes_of_masters_unseen = patched(
    "A plain tensor is loaded into a master that is a DTensor, until torch says that it cannot.",
    mutated(f"{_MASTERS}.load", "mesh_of(value) != mesh_of(master)", "False"),
    kills="OPT-505",
)

meshes_of_states_unseen = patched(
    "A plain tensor of a shard's shape is loaded for a state that is a DTensor.",
    mutated(f"{_DRIVER}:_check_kind", "mesh_of(value) != mesh_of(param)", "False"),
    kills="OPT-505",
)

meshes_of_plain_parameters = patched(
    "A DTensor is loaded for a state of a plain parameter.",
    mutated(
        f"{_DRIVER}:_check_kind", "mesh_of(value) != mesh_of(param)", "mesh_of(param) not in (None, mesh_of(value))"
    ),
    kills="OPT-505",
)

states_on_meta_loaded = patched(
    "A state that has no values is loaded.",
    mutated(f"{_DRIVER}:check_saved", "isinstance(value, torch.Tensor) and value.is_meta", "False"),
    kills="OPT-506",
)

moments_of_whole_numbers = patched(
    "A moment of whole numbers is loaded, and torch fails at the next step.",
    mutated(f"{_DRIVER}:_check_kind", "not (value.is_floating_point() or value.is_complex())", "False"),
    kills="OPT-506",
)

counters_stand_still = patched(
    "A counter that is a number is counted beside the state, and never goes on.",
    mutated(f"{_DRIVER}:_check_lasting", "not isinstance(count, torch.Tensor)", "False"),
    kills="OPT-507",
)

places_of_before = patched(
    "A parameter without states that has another shape by now is stepped in the places of before.",
    mutated(f"{_DRIVER}:_check_lasting", "[place.shape, tuple", "[shape, tuple"),
    kills="OPT-507",
)

states_of_before = patched(
    "States are not compared with the shape of their parameter.",
    mutated(f"{_DRIVER}:_check_lasting", "tuple(local_of(value).shape)", "shape"),
    kills="OPT-507",
)

kernel_takes_8_bits = patched(
    "Weights of 8 bits are given to the kernel, which does not know them.",
    mutated("fastimpl.offload.cpu_step:_have_one_order", "row[-1].dtype not in GRADIENTS", "False"),
    kills="OPT-508",
    of="fastimpl",
)

optimizers_inside_unseen = patched(
    "An optimizer is looked for inside of a wrapper under one name alone.",
    swap(f"{_DRIVER}:_HELD_AS", ("optimizer",)),
    kills="OPT-509",
)

masters_of_nobody = patched(
    "Masters are attached to an optimizer that steps none of them.",
    mutated(f"{_MASTERS}.attach", "(self.pairs and not self.stepped_by(optimizer))", "False"),
    kills="OPT-510",
)

parameters_beside_masters = patched(
    "Masters are attached to an optimizer that steps their parameters.",
    mutated(f"{_MASTERS}.attach", "if have_masters or", "if"),
    kills="OPT-510",
)

masters_of_others_ended = patched(
    "The step of one optimizer takes the gradients of another's masters.",
    mutated(f"{_MASTERS}.before_step", "masters = self.stepped_by(optimizer)", "masters = list(self.pairs)"),
    mutated(f"{_MASTERS}.attach", "self.end(self.stepped_by(stepped))", "self.end(self.pairs)"),
    kills="OPT-511",
)

versions_of_the_original = patched(
    "A copy of masters expects the versions that the original's parameters had.",
    mutated(f"{_MASTERS}.__setstate__", "master: version_of(param)", "master: (2, 2)"),
    kills="OPT-512",
)

copies_forget_writes = patched(
    "A copy of masters takes a parameter that was written for one that was not.",
    mutated(f"{_MASTERS}.__getstate__", "if version_of(param) != self._versions[master]", "if False"),
    kills="OPT-512",
)

copied_masters_of_nobody = patched(
    "A copied master does not know its parameter.",
    mutated(f"{_MASTERS}.__setstate__", "_bind(master, param)", "_bind(master, master)"),
    kills="OPT-512",
)

own_masters_marked = patched(
    "In a copy, a parameter that is its own master is marked as the master of itself.",
    mutated(f"{_MASTERS}.__setstate__", "if master is not param:", "if True:"),
    kills="OPT-580",
)

masters_of_none_refused = patched(
    "Masters of no parameter cannot be attached to an optimizer, which steps none of them.",
    mutated(f"{_MASTERS}.attach", "(self.pairs and not self.stepped_by(optimizer))", "not self.stepped_by(optimizer)"),
    kills="OPT-580",
)

masters_of_inference = patched(
    "Masters that are made in inference mode can be stepped in no other.",
    mutated(f"{_MASTERS}.__init__", "torch.inference_mode(False)", "torch.autograd.set_grad_enabled(True)"),
    kills="OPT-513",
)

parameters_of_inference = patched(
    "Parameters that no step can write to are taken until torch says so.",
    mutated(f"{_MASTERS}.__init__", "param.is_inference()", "False"),
    kills="OPT-513",
)

shapes_of_masters_unseen = patched(
    "A parameter of another shape than its master is given to torch.",
    mutated(f"{_MASTERS}.check", "param.shape != master.shape", "False"),
    kills="OPT-514",
)
