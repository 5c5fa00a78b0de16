"""Faults that ``test_read_ahead`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

edits_of_modules_ahead_unseen = patched(
    "What a module gave ahead is used, whatever it would read now.",
    mutated("twinproof.pipeline.stages:outdated", "if not sent or agree", "if True or agree"),
    kills="PIPE-749",
    of="fastimpl",
)
equal_values_ahead_are_one = patched(
    "Of what a module reads that runs ahead, plain values are compared, and not their types.",
    mutated("twinproof.pipeline.tracing:_read_by", "yield name, type(value), repr(value)", "yield name, value"),
    kills="PIPE-749",
    of="fastimpl",
)
writes_ahead_unseen = patched(
    "Of what a module reads that runs ahead, the tensors are compared, and not how often they were written.",
    mutated("twinproof.pipeline.tracing:_read_by", "yield name, version_of(value)", "yield name, version_of(value)[0]"),
    kills="PIPE-749",
    of="fastimpl",
)
sent_anew_where_all_edit = patched(
    "A batch is sent anew where every rank has edited what was read, and nowhere else.",
    mutated(
        "twinproof.pipeline.stages:outdated",
        "agree(int(all(batch.is_read_so() for batch in sent)))",
        "1 - agree(int(not all(batch.is_read_so() for batch in sent)))",
    ),
    kills="PIPE-750",
    of="fastimpl",
)
read_before_the_call = patched(
    "What a module reads is noted before it is called, which counts.",
    mutated(
        "twinproof.pipeline.stages:BatchContext.reading",
        "try:\n        yield\n    finally:\n        self.read = [(module, read_by(module)) for module in modules]",
        "self.read = [(module, read_by(module)) for module in modules]\n    yield",
    ),
    kills="PIPE-751",
    of="fastimpl",
)
addresses_of_tables = patched(
    "A table is known by its address, which the next one may have.",
    mutated("twinproof.pipeline.tracing:version_of", "return Known(tensor),", "return id(tensor),"),
    kills="PIPE-752",
    of="fastimpl",
)
numbers_of_forwards_unseen = patched(
    "What a forward reads of its modules is what it was in the first trace.",
    mutated("twinproof.pipeline.tracing:Reads.are_same", "if now is not then and", "if False and"),
    kills="PIPE-705",
)
parts_of_forwards_unseen = patched(
    "A part that was replaced is still what runs ahead.",
    mutated(
        "twinproof.pipeline.stages:Traces.follow",
        "is_other = [call.way for call in found] != [call.way for call in before]",
        "is_other = [call.formula for call in found] != [call.formula for call in before]",
    ),
    kills="PIPE-705",
)
followed_where_all_assign = patched(
    "A forward is followed where every rank has assigned what it reads, and nowhere else.",
    mutated("twinproof.pipeline.stages:Traces.follow", "if agree(int(is_same))", "if not agree(int(not is_same))"),
    kills="PIPE-706",
)
reads_behind_count = patched(
    "What a forward reads behind its sharded modules has it traced again.",
    mutated("twinproof.pipeline.tracing:Reads.noted", "[: self._count]", ""),
    kills="PIPE-707",
)
counters_of_forwards_count = patched(
    "What a forward assigns by itself has it traced again.",
    mutated("twinproof.pipeline.tracing:Reads.noted", "is then and not", "is not None and not"),
    kills="PIPE-707",
)
forwards_put_on_models_unseen = patched(
    "A forward that was put on the model is bypassed without a word.",
    mutated("twinproof.pipeline.stages:Traces.has_hooks", '"forward" in vars(unwrapped(self._model))', "False"),
    kills="PIPE-708",
)
other_modes_go_by_this_one = patched(
    "Whether the trace of another mode is still right is asked of what the mode before reads.",
    mutated(
        "twinproof.pipeline.stages:Traces.follow", "not self._found[modes][0].are_same()", "not self._reads.are_same()"
    ),
    kills="PIPE-767",
)
