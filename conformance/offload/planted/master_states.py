"""Faults that ``test_master_states`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_MASTERS = "twinproof.offload.states:MasterWeights"

masters_given_on_their_way = patched(
    "What is given is read while copies of a step are on their way to it.",
    mutated(f"{_MASTERS}.state_dict", "mover.settle()", "pass"),
    kills="OPT-566",
    of="fastimpl",
)
masters_written_while_read = patched(
    "A load writes what a prefetch still reads.",
    mutated(f"{_MASTERS}.load", "self._settle_for_writing()", "pass"),
    kills="OPT-566",
    of="fastimpl",
)
masters_given_as_parameters = patched(
    "What is given is the parameters, which lack bits.",
    mutated(
        f"{_MASTERS}.state_dict", "master.detach() for master in self.pairs", "p.float() for p in self.pairs.values()"
    ),
    kills="OPT-566",
)

any_dict_is_of_masters = patched(
    "A dict that has more than masters is taken.",
    mutated(f"{_MASTERS}.load_state_dict", "list(state_dict) != [_MASTERS]", "_MASTERS not in state_dict"),
    kills="OPT-567",
)

attached_twice = patched(
    "Masters that an offloader was given are run by the optimizer's hooks as well.",
    mutated(f"{_MASTERS}.attach", "mover is not None and mover.optimizer is optimizer", "False"),
    kills="OPT-568",
)
closed_offloaders_run_masters = patched(
    "An offloader that is closed counts as running its masters.",
    mutated(f"{_MASTERS}._mover_now", "mover is not None and mover._driver.attached", "True"),
    kills="OPT-568",
)
