"""Faults that ``test_masters`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched, wrap


def _forgotten(original: Any, transfers: Any, bundles: Any) -> None:
    for chunk in transfers._chunks:
        chunk.bundles = [other for other in chunk.bundles if all(other is not bundle for bundle in bundles)]
    transfers._chunks = [chunk for chunk in transfers._chunks if chunk.bundles]


masters_left_in_a_forgotten_block = patched(
    "A parameter's states that are still in an old block are taken for moved.",
    wrap("fastimpl.offload.transfers:StreamedTransfers.unplace", _forgotten),
    # Whoever looks for states at another's place would find them.
    mutated("twinproof.offload.offloader:OptimizerStateOffloader._free_strays", "if not suspects:", "if True:"),
    kills="OPT-049",
    of="fastimpl",
)


@fault(kills="OPT-044", at="twinproof.offload.states:MasterWeights.load")
def masters_loaded_without_parameters(original: Any, masters: Any, values: Any) -> None:
    """Loaded masters do not reach the parameters before the next step."""
    before = [param.detach().clone() for param in masters.pairs.values()]
    original(masters, values)
    for (master, param), value in zip(masters.pairs.items(), before, strict=True):
        with torch.no_grad():
            param.copy_(value)
        masters._note(master)


@fault(kills="OPT-043", at="twinproof.offload.states:MasterWeights.__init__")
def masters_deduplicated(original: Any, masters: Any, params: Any) -> None:
    """Duplicate and non-floating parameters are skipped in silence."""
    original(masters, [p for p in dict.fromkeys(params) if p.is_floating_point()])


@fault(kills="OPT-331", at="twinproof.offload.states:MasterWeights.check_stepped_by")
def masters_of_nobody_taken(original: Any, masters: Any, optimizer: Any) -> None:
    """Only parameters that are no masters are looked for."""
    if any(param not in masters.pairs for group in optimizer.param_groups for param in group["params"]):
        original(masters, optimizer)


@fault(kills="OPT-012", at="twinproof.offload.states:MasterWeights.end")
def masters_truncated(original: Any, masters: Any, some: Any) -> None:
    """Masters are cut to bf16 instead of rounded."""
    for master in some:
        param = masters.pairs[master]
        if param is not master and master.grad is not None:
            with torch.no_grad():
                param.copy_((master.view(torch.int32) >> 16 << 16).view(torch.float32))
            master.grad = param.grad = None
            masters._note(master)


@fault(kills="OPT-041", at="twinproof.offload.states:MasterWeights.check")
def stale_masters_unnoticed(original: Any, masters: Any, some: Any) -> Any:
    """A loaded model is overwritten by old masters."""


@fault(kills="OPT-041", at="fastimpl.offload.transfers:StreamedTransfers.settle_for_writing")
def masters_written_under_a_copy_in(original: Any, offloader: Any) -> Any:
    """refresh_masters() writes host memory that a copy in still reads."""
    return offloader.settle()


masters_of_all = patched(
    "Whatever the CPU steps beside masters is looked for among them.",
    mutated(
        "twinproof.offload.driver:updates_of",
        "masters.pairs.get(bundle.param, bundle.param)",
        "masters.pairs[bundle.param]",
    ),
    kills="OPT-369",
)
gradients_of_masters_only = patched(
    "Beside masters no gradient is looked at.",
    mutated(
        "twinproof.offload.offloader:OptimizerStateOffloader._check_gradients",
        "*(self.plan.known - self.masters.pairs.keys())",
        "",
    ),
    kills="OPT-369",
)

hooks_of_before_stay = patched(
    "What ran masters with a plain optimizer runs beside an offloader, and makes all gradients at once.",
    mutated("twinproof.offload.states:MasterWeights.detach", "handle.remove()", "pass"),
    kills="OPT-370",
)


gradients_are_given_by_name = patched(
    "A gradient that the masters were given before counts as given, whatever was added to it since.",
    mutated("twinproof.offload.states:MasterWeights.start", " or version != given._version", ""),
    mutated("twinproof.offload.states:_has_own", " and grad._version == version", ""),
    kills="OPT-428",
)

masters_taken_before_the_checks = patched(
    "Masters run with their plain optimizer no more once an offloader of it was asked for, also where it is refused.",
    mutated(
        "twinproof.offload.offloader:OptimizerStateOffloader.__init__",
        "master_weights.check_stepped_by(optimizer)",
        "master_weights.check_stepped_by(optimizer); master_weights.detach()",
    ),
    kills="OPT-429",
)

prefetched_masters_are_kept = patched(
    "Whether something was written behind a prefetch is asked of the block alone, where masters only lie.",
    mutated("fastimpl.offload.transfers:StreamedTransfers._version_of", "or name == MASTER", ""),
    kills="OPT-430",
    of="fastimpl",
)

gradients_of_before_the_closure = patched(
    "Masters get the gradients that there are before the closure is evaluated.",
    mutated(
        "twinproof.offload.states:MasterWeights.before_step",
        "given = self.with_closure(optimizer, arguments[1:], options)",
        "given = None",
    ),
    kills="OPT-432",
)

closures_see_the_model_of_before = patched(
    "A closure that is evaluated again sees the model as it was at its first evaluation.",
    mutated("twinproof.offload.states:MasterWeights.with_closure", "self._round_all(some)", "pass"),
    kills="OPT-432",
)

gradients_of_evaluations_lost = patched(
    "An evaluation of a closure behind the first begins without gradients, whether the closure clears them or not.",
    mutated(
        "twinproof.offload.states:MasterWeights._round_all", "param.copy_(master)", "param.copy_(master).grad = None"
    ),
    kills="OPT-432",
)

views_taken_for_strangers = patched(
    "A write to one of several views of a tensor is taken for one from outside to the others.",
    mutated("twinproof.offload.states:MasterWeights._note_now", "self._kin.get(master, [master])", "[master]"),
    kills="OPT-447",
)

writes_to_views_unseen = patched(
    "A parameter that lies beside others in one tensor is never taken for stale.",
    mutated(
        "twinproof.offload.states:MasterWeights.check",
        "if param is not master and",
        "if param is not master and master not in self._kin and",
    ),
    kills="OPT-447",
)


@fault(kills="OPT-449", at="twinproof.offload.states:_check_values")
def values_of_masters_unchecked(original: Any, given: Any) -> Any:
    """Whatever has shapes is loaded as masters, as far as it goes."""
    return list(given)


complex_masters = patched(
    "Complex values are loaded as masters, without their imaginary parts.",
    mutated("twinproof.offload.states:_check_values", "not plain or value.is_complex()", "not plain"),
    kills="OPT-449",
)

gradients_outlive_the_step = patched(
    "Masters hold the gradients that they took until the next ones come.",
    mutated(
        "twinproof.offload.states:MasterWeights.took",
        "master.given = self.pairs[master].grad = None",
        "self.pairs[master].grad = None",
    ),
    kills="OPT-452",
)

first_master_alone_looked_at = patched(
    "Of masters that were prefetched the first chunk alone is looked at for writes.",
    mutated(
        "fastimpl.offload.transfers:StreamedTransfers._fetch_first",
        "for chunk in self._chunks[: self._fetched])",
        "for chunk in self._chunks[:1])",
    ),
    kills="OPT-430",
    of="fastimpl",
)

stepped_without_its_parameter = patched(
    "A master that was stepped is rounded where its parameter has a gradient still.",
    mutated(
        "twinproof.offload.states:MasterWeights.end",
        "own_grad(master) is not None or",
        "param.grad is not None or False and",
    ),
    kills="OPT-461",
)
freed_behind_the_step = patched(
    "A master whose gradient was freed behind the step is taken for one that was not stepped.",
    mutated("twinproof.offload.states:MasterWeights.start", "self._begun[master] = version_of(master)", "pass"),
    kills="OPT-461",
)

rounding_noted_behind_it = patched(
    "What a rounding writes is noted behind the write alone, where an interrupt may come between.",
    mutated("twinproof.offload.states:MasterWeights.end", "self._note(master)", "None"),
    kills="OPT-530",
)
load_noted_behind_it = patched(
    "What a load writes into a parameter is noted before the write, and not at the load's end.",
    mutated("twinproof.offload.states:MasterWeights.load", "self._note(master)", "self._note_now([master])"),
    kills="OPT-530",
)
interrupted_step_forgets_what_it_wrote = patched(
    "A step on the CPU that is interrupted notes those parameters alone that it was done with.",
    mutated("twinproof.offload.states:MasterWeights.noted_together", "if is_step", "if False"),
    kills="OPT-530",
    of="refimpl",  # fastimpl knows what it has stepped.
)
