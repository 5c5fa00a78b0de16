"""Faults that ``test_groups`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

options_by_number = patched(
    "Options are compared with those of the group that had the number before, whichever parameters it had.",
    mutated(
        "twinproof.offload.driver:MovePlan._adopt_listed",
        "is_turned = self._flags.get(param, options) != options",
        "is_turned = bool(self._listed) and [f for _, f in self._listed] != list(map(options_on, "
        "self.optimizer.param_groups))",
    ),
    kills="OPT-379",
)

held_for_ever = patched(
    "What is foreseen of a parameter stays when it has left its groups, and holds it.",
    mutated("twinproof.offload.driver:MovePlan._forget_unlisted", "del self._foreseen[param]", "pass"),
    kills="OPT-380",
)

noted_before_it_is_done = patched(
    "The options that a parameter has places for are noted before there is memory for these.",
    mutated(
        "twinproof.offload.driver:MovePlan._adopt_listed",
        "self._flags.get(param, options) != options",
        "self._flags.get(param, options) != options; self._flags[param] = options",
    ),
    kills="OPT-385",
)

without_a_place_for_ever = patched(
    "States whose new places failed for lack of memory are taken for states that have them.",
    mutated(
        "twinproof.offload.driver:MovePlan.refit",
        "self.known -= {bundle.param for bundle in some if id(bundle) in moved}",
        "pass",
    ),
    kills="OPT-386",
)

slots_taken_for_filled = patched(
    "Slots of a prefetch that was interrupted are taken for filled.",
    mutated("fastimpl.offload.transfers:StreamedTransfers._fetch_first", "except BaseException:", "except SystemExit:"),
    kills="OPT-387",
)

listed_as_done = patched(
    "After a failure for lack of memory the lists of parameters are taken for planned, and nobody looks again.",
    mutated("twinproof.offload.driver:MovePlan.refit", "self._listed = None", "pass"),
    kills="OPT-386",
)

bound_before_it_arrives = patched(
    "States are bound to memory of the device before there is memory for what is copied there: a failure loses them.",
    mutated(
        "fastimpl.offload.transfers:StreamedTransfers.to_device",
        "names.append((bundle, name))",
        "names.append((bundle, name)); rebind(self.plan.optimizer, bundle, name, here)",
    ),
    kills="OPT-389",
)

all_moved_or_none = patched(
    "What could not be brought to the device for its new place is taken for moved, and gets a second place.",
    mutated(
        "twinproof.offload.driver:MovePlan.refit",
        "moved = set[int]()",
        "moved = set(map(id, some))",
    ),
    kills="OPT-389",
)

given_up_after_a_failure = patched(
    "What found no memory for its new place stays on the device until the lists of parameters change.",
    mutated("twinproof.offload.driver:MovePlan.refit", "self._listed = None", "pass"),
    kills="OPT-462",
)

places_given_twice = patched(
    "What had no turn yet when memory ran out is planned for again, beside the place that it has.",
    mutated(
        "twinproof.offload.driver:MovePlan.refit",
        "{bundle.param for bundle in some if id(bundle) in moved}",
        "{bundle.param for bundle in some}",
    ),
    kills="OPT-484",
)

one_leaves_after_the_other = patched(
    "Parameters that leave their groups are waited for one by one.",
    mutated(
        "twinproof.offload.driver:MovePlan._forget_unlisted",
        "transfers.unplace(gone)",
        "[transfers.unplace([bundle]) for bundle in gone]",
    ),
    kills="OPT-515",
)

one_gets_its_place_after_the_other = patched(
    "Parameters whose states get other places are waited for one by one.",
    mutated(
        "twinproof.offload.driver:MovePlan.refit",
        "transfers.unplace([self.bundles[at[id(bundle)]] for bundle in some])",
        "[transfers.unplace([self.bundles[at[id(bundle)]]]) for bundle in some]",
    ),
    kills="OPT-515",
)

forgotten_before_it_is_back = patched(
    "What left its group is forgotten before the device has memory for it, and is stepped twice when it returns.",
    mutated(
        "twinproof.offload.driver:MovePlan._forget_unlisted",
        "if gone:",
        "self.bundles = [bundle for bundle in self.bundles if bundle.param in listed]\n    if gone:",
    ),
    kills="OPT-592",
    of="fastimpl",
)

planned_for_as_before = patched(
    "Groups that are what they were before an edit that failed have nothing to move.",
    mutated("twinproof.offload.driver:MovePlan.adopt", "self._listed = None", "pass"),
    kills="OPT-592",
    of="refimpl",
)
