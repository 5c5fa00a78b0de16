"""Faults that ``test_dropped`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched


@fault(kills="PIPE-672", at="twinproof.pipeline.driver:Pipeline.__reduce_ex__")
def pipelines_copied(original: Any, pipeline: Any, protocol: Any) -> Any:
    """A copy of a pipeline shares what is in flight, or drives a model whose modules know nothing of it."""
    return object.__reduce_ex__(pipeline, 4)


views_hold_their_pipeline = patched(
    "What shows the batches in flight holds the pipeline that holds it.",
    mutated("twinproof.pipeline.torchrec_models:QueueView.__init__", "weakly(make), weakly(replace)", "make, replace"),
    kills="PIPE-673",
)
forwards_hold_their_module = patched(
    "What stands in for a module's forward holds the module that holds it.",
    mutated("twinproof.pipeline.stages:Prepared.__init__", "weakref.ref(module)", "lambda: module"),
    kills="PIPE-673",
)
exchanges_hold_what_they_give = patched(
    "An exchange holds the second half of its way, which holds the first.",
    mutated("fastimpl.pipeline.input_dist:InputDist._exchange", "copy.copy(self)", "self"),
    kills="PIPE-673",
    of="fastimpl",
)
dropped_pipelines_keep_modules = patched(
    "Modules of a pipeline that was dropped wait for what it prepares.",
    mutated("twinproof.pipeline.stages:Attachment.__del__", "self.close()", "pass"),
    kills="PIPE-674",
)
frames_hold_errors_of_loaders = patched(
    "A frame of its own traceback holds what a loader raised.",
    mutated("twinproof.pipeline.driver:Pipeline._taken", "raise failures.pop()", "raise failures[0]"),
    kills="PIPE-675",
)
frames_hold_failed_exchanges = patched(
    "An exchange that failed holds its exception, whose frames hold the exchange.",
    mutated("twinproof.pipeline.driver:Pipeline._drop", "in_flight.forget()", "pass"),
    kills="PIPE-675",
)
tracers_hold_models = patched(
    "What traced a model holds it, and itself.",
    mutated(
        "twinproof.pipeline.stages:find_calls",
        "tracer.root, tracer.tensor_attrs, tracer.submodule_paths = torch.nn.Module(), {}, None",
        "pass",
    ),
    kills="PIPE-676",
)
traces_leave_attributes = patched(
    "What a forward assigns in a trace, and torch for its constants, stays on the model.",
    mutated("twinproof.pipeline.tracing:left_as_they_were", "del now[name]", "pass"),
    kills="PIPE-678",
)
traces_write_buffers = patched(
    "What a forward writes in a buffer in a trace stays there.",
    mutated("twinproof.pipeline.tracing:left_as_they_were", "buffer.copy_(value)", "pass"),
    kills="PIPE-678",
)
traces_count = patched(
    "What a forward counts in its attributes counts traces, too.",
    mutated("twinproof.pipeline.tracing:left_as_they_were", "now.update(then)", "pass"),
    kills="PIPE-678",
)
traces_collect = patched(
    "What a forward adds to a list in a trace stays there.",
    mutated("twinproof.pipeline.tracing:left_as_they_were", "_restore(collection, parts)", "pass"),
    kills="PIPE-755",
)
traces_collect_inside = patched(
    "What a forward adds to a list inside of another collection in a trace stays there.",
    mutated(
        "twinproof.pipeline.tracing:collections_in", "left += each.values() if isinstance(each, dict) else each", "pass"
    ),
    kills="PIPE-755",
)
dead_forwards_are_called = patched(
    "A forward whose module has gone is looked for on nothing.",
    mutated("twinproof.pipeline.stages:Prepared._driven", "module is None", "False"),
    kills="PIPE-679",
)
buffers_of_inference_mode_are_written = patched(
    "What a trace writes in a buffer that was made in inference mode stays there.",
    mutated("twinproof.pipeline.tracing:left_as_they_were", "if version is None or", "if version is not None and"),
    kills="PIPE-680",
)
versions_of_inference_tensors = patched(
    "Torch is asked how often a tensor of inference mode was written, which it does not count.",
    mutated("twinproof.pipeline.tracing:_version_of", "None if tensor.is_inference() else ", ""),
    kills="PIPE-680",
)
