"""Lookups in a CUDA graph: checks, pooling, gradients of weights and the fused step, captured once and replayed.

    python -m perf.gpu.graph --device cuda

A launcher that waited for the device, or copied host memory, would end the capture with an error. Each replay is
compared with the CPU's bytes, also after the ids in the graph's memory have changed. ``--device cpu`` rehearses.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from conformance.pipeline.model import DTYPES
from conformance.pipeline.strategies import Arguments
from fastimpl import ops
from perf.gpu.operators import differences, on_device, tensors_in

__all__ = ["lookup_step", "main"]

_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")
_REPLAYS = 3


def lookup_step(a: Arguments, optimizer: str) -> list[torch.Tensor]:
    """One forward and backward; what they return. Tables and states are stepped in place."""
    counts = [a.tables[table].shape[0] for table in a.feature_tables]
    ids, offsets, found = ops.settle_bags(a.indices, a.offsets, counts)
    bags = (a.feature_tables, ids, offsets, a.weights, a.means)
    out = torch.zeros_like(a.grad)
    ops.pool_bags(a.tables, *bags, out)
    weights = ops.bag_weight_gradients(a.tables, a.feature_tables, ids, offsets, a.means, a.grad)
    ops.step_bags(a.tables, a.momentum1, a.momentum2, *bags, a.grad, optimizer, 0.1)
    return [ids, offsets, found, out, weights]


def _copied(a: Arguments, device: torch.device) -> Arguments:
    made = Arguments.__new__(Arguments)
    made.__dict__.update({name: on_device(value, device) for name, value in vars(a).items()})
    return made


def _state(a: Arguments) -> list[torch.Tensor]:
    return list(tensors_in([a.tables, a.momentum1, a.momentum2]))


def _captured(run: Callable[[], list[torch.Tensor]], device: torch.device) -> tuple[Callable[[], Any], Any]:
    """What repeats the run, and a list of its results, filled by then."""
    results: list[torch.Tensor] = []
    if device.type != "cuda":

        def again() -> None:
            results[:] = run()

        return again, results
    side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        # Kernels are loaded by their first launch, which a capture would not bear.
        run()
    torch.cuda.synchronize(device)
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results[:] = run()
    return graph.replay, results


def _wrong(optimizer: str, device: torch.device) -> Iterator[str]:
    given = Arguments.of(7, DTYPES, optimizer, is_weighted=True, features=4, bags=64, longest=10, rows=40)
    theirs, mine = _copied(given, torch.device("cpu")), _copied(given, device)
    replay, results = _captured(lambda: lookup_step(mine, optimizer), device)
    # The first launches have stepped the tables.
    for target, source in zip(_state(mine), _state(given), strict=True):
        target.copy_(source)
    for number in range(_REPLAYS):
        if number:
            # Other ids, the first of which no table has.
            ids = given.indices.roll(number)
            ids[0] = -1
            counts = [given.tables[table].shape[0] for table in given.feature_tables]
            ids = ops.settle_bags(ids, given.offsets, counts)[0]
            ids[0] = -1
            for arguments in (theirs, mine):
                arguments.indices.copy_(ids)
        expected = lookup_step(theirs, optimizer)
        replay()
        for name, got, wanted in (("results", results, expected), ("tables", _state(mine), _state(theirs))):
            for line in differences(got, wanted):
                yield f"{optimizer}, replay {number}, {name}: {line}"


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every replay gave the CPU's bytes."""
    parser = argparse.ArgumentParser(prog="perf.gpu.graph", description="Lookups in a CUDA graph.")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args(argv)
    device = torch.device(given.device)
    if not ops.available():
        print("there is no library")
        return 1
    wrong = [line for optimizer in _OPTIMIZERS for line in _wrong(optimizer, device)]
    print("\n".join(wrong), end="\n" if wrong else "")
    how = "replays of a graph" if device.type == "cuda" else f"repetitions on {device}, a rehearsal"
    print(f"{len(_OPTIMIZERS) * _REPLAYS} {how}, {len(wrong)} differences")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
