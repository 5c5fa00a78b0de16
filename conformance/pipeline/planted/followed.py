"""Faults that ``test_followed`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_TRACING = "twinproof.pipeline.tracing"

other_parts_taken = patched(
    "What a forward calls a module with is compared with what was computed ahead under hooks alone.",
    mutated(
        "twinproof.pipeline.stages:check_asked", "if not is_hooked and is_other_part", "if False and is_other_part"
    ),
    kills="PIPE-769",
)
computed_parts_compared = patched(
    "What a forward computes is compared, too, with what was computed ahead.",
    mutated(f"{_TRACING}:_is_other_tensor", "return not begins.isdisjoint(memory()) and", "return"),
    kills="PIPE-769",
)
equal_parts_refused = patched(
    "Parts of a batch that lie elsewhere are other parts, whatever they hold.",
    mutated(f"{_TRACING}:_is_other_tensor", "and not _hold_same(ahead, given)", ""),
    kills="PIPE-769",
)

regions_left_out = patched(
    "What is computed ahead is computed outside of the forward's regions of autocast.",
    mutated(f"{_TRACING}:in_regions_of", "stack.enter_context(copy.copy(region))", "pass"),
    kills="PIPE-770",
)
inputs_in_later_regions = patched(
    "What a node needs is computed in the regions of the node itself.",
    mutated(
        "twinproof.pipeline.stages:FromBatch._compute",
        "positional, named = _evaluated((node.args, node.kwargs), self.value)\n    with in_regions_of(node):",
        "with in_regions_of(node):\n        positional, named = _evaluated((node.args, node.kwargs), self.value)",
    ),
    kills="PIPE-770",
)
regions_of_modes_alike = patched(
    "Modes that differ in their regions of autocast alone call the same.",
    mutated("twinproof.pipeline.stages:_formula_of", "arguments, regions_of(each)", "arguments"),
    kills="PIPE-770",
)

regions_of_the_call_before = patched(
    "What was computed ahead in the caller's autocast of another step is used.",
    mutated("twinproof.pipeline.stages:outdated", "batch.read or not batch.is_cast_so()", "batch.read"),
    kills="PIPE-771",
    of="fastimpl",
)
regions_of_modules_alone = patched(
    "Whether something is computed ahead is told by the modules that run ahead.",
    mutated(
        "twinproof.pipeline.stages:BatchContext.is_cast_so", "return self.regions is None or", "return not self.read or"
    ),
    kills="PIPE-771",
    of="fastimpl",
)

modules_alone_computed_anew = patched(
    "A batch is sent anew in another region of the caller's where modules ran ahead for it, and nowhere else.",
    mutated(
        "twinproof.pipeline.stages:outdated",
        "agree(int(all(batch.is_read_so() for batch in sent)))",
        "agree(int(all(batch.is_read_so() for batch in sent if batch.read)))",
    ),
    kills="PIPE-772",
    of="fastimpl",
)
