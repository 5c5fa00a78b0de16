"""Faults that ``test_interrupts`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_TRANSFERS = "fastimpl.offload.transfers:StreamedTransfers"
_HOST_STEP = "fastimpl.offload.cpu_step:HostStep"

chunk_bound_before_it_is_sent = patched(
    "A chunk is bound to host memory first, where the states of before its update are.",
    mutated(
        f"{_TRANSFERS}._update_chunk",
        "        self._send(chunk, slot, compute)",
        "        self._settle_down(chunk)\n        self._send(chunk, slot, compute)",
    ),
    kills="OPT-531",
    of="fastimpl",
)
stepped_weights_stay_down = patched(
    "Weights of a chunk that was stepped when it was interrupted do not go up.",
    mutated(
        f"{_HOST_STEP}.run",
        "            self._send_up(work, slot, device[slot])\n            raise",
        "            raise",
    ),
    kills="OPT-532",
    of="fastimpl",
)
counters_stay_advanced = patched(
    "Counters of parameters that an interrupted step did not come to stay advanced.",
    mutated(f"{_HOST_STEP}._update", "counter.fill_(count)", "pass"),
    kills="OPT-532",
    of="fastimpl",
)
stepped_rows_unknown = patched(
    "What the library did counts as done where it was not interrupted.",
    mutated(
        "fastimpl.offload.cpu_step:_step_rows",
        "    finally:\n",
        "    except ZeroDivisionError:\n        pass\n    else:\n",
    ),
    kills="OPT-532",
    of="fastimpl",
)
rows_noted_before_they_are_stepped = patched(
    "A parameter that torch steps counts as stepped before it is.",
    mutated(
        f"{_HOST_STEP}._update",
        "                adam_step(hyper, *rows[0])\n                work.stepped.append(alone)",
        "                work.stepped.append(alone)\n                adam_step(hyper, *rows[0])",
    ),
    kills="OPT-535",
    of="fastimpl",
)
rows_of_no_call_noted = patched(
    "What the library was asked to step counts as stepped, whatever came of it.",
    mutated("fastimpl.offload.cpu_step:_step_rows", "if float(moment):", "if numbers:"),
    kills="OPT-535",
    of="fastimpl",
)
note_interrupted = patched(
    "A note that is interrupted is not made.",
    mutated(
        "twinproof.offload.states:MasterWeights.noted_together",
        "            self._note_now(written)\n            raise",
        "            raise",
    ),
    kills="OPT-533",
)
loaded_states_in_place_of_none = patched(
    "A load takes the states of a parameter away before it has the new ones.",
    mutated(
        "twinproof.offload.driver:_take_over",
        "        # Made before the old ones go: where memory is short they stay.",
        "        optimizer.state.pop(param, None)",
    ),
    kills="OPT-534",
)
