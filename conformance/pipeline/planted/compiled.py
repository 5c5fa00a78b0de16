"""Faults that ``test_compiled`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched, swap


def _never() -> bool:
    return False


# torch.compile traces into a plain function that stands here; a wrapper of the original it refuses.
lookups_are_traced = patched(
    "A compiler looks into lookups, and makes a graph of each step and length.",
    swap("torch.compiler:is_compiling", _never),
    kills="PIPE-116",
    of="fastimpl",
)

compiled_models_are_no_wrappers = patched(
    "A compiled model is looked into as if it had a forward of its own.",
    mutated(
        "twinproof.pipeline.stages:_layers",
        "if kind.__name__ in _INSIDE",
        'if kind.__name__ in _INSIDE and kind.__name__ != "OptimizedModule"',
    ),
    kills="PIPE-668",
)
