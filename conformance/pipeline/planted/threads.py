"""Faults that ``test_threads`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_TRACER = "twinproof.pipeline.tracing:Tracer"

calls_of_others_followed = patched(
    "A call of a module in another thread is looked for in the model that is traced.",
    mutated(f"{_TRACER}.call_module", "if threading.get_ident() != self._thread:", "if False:"),
    kills="PIPE-730",
)

traces_at_once = patched(
    "Two threads trace at once.",
    mutated("twinproof.pipeline.tracing:alone", "with _ONE_TRACE:", "if True:"),
    kills="PIPE-731",
)
