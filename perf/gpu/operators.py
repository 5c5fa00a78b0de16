"""Every CUDA operator against the bytes that the CPU gives, on the default stream, on another, and on two at once.

    python -m perf.gpu.operators --list                          # the registered ones, as JSON
    python -m perf.gpu.operators pipeline_pool --device cuda     # one of them
    python -m perf.gpu.operators --every --counts 1000           # all in one process, for perf.gpu.sanitizer

The list is the dispatcher's: an operator without calls in ``perf/<stem>/operators.py`` is a failure. Operators of a
store take its handle, and no call stands by itself: the suite runs them, see ``perf.gpu.kvstore``. On a stream that
is not the default one, inputs arrive late, behind a delay: an operator that runs on another stream reads zeros. With
``--device cpu`` each operator is compared with itself, which rehearses this program and says nothing of a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from conformance.harness.environment import environment
from fastimpl import ops

__all__ = [
    "OperatorCall",
    "calls_of",
    "differences",
    "listed",
    "main",
    "on_device",
    "outputs",
    "provenance",
    "tensors_in",
]

_COUNTS = (1_000, 1_000_000)
_DELAY_CYCLES = 20_000_000  # About 10 ms.


@dataclass(frozen=True)
class OperatorCall:
    """One call of an operator, its arguments on the CPU.

    Attributes:
        label: what is particular to it: dtypes, options.
        arguments: as its schema has them; lists may hold tensors.
        moved_bytes: the least that the task reads and writes.
    """

    label: str
    arguments: tuple[Any, ...]
    moved_bytes: int


Calls = Callable[[int, torch.Generator], Iterator[OperatorCall]]


def calls_of(operator: str) -> Calls | None:
    """What a component declares for an operator: calls of about so many ids or elements, or None."""
    stem = operator.split("_", 1)[0]
    try:
        declared: dict[str, Calls] = importlib.import_module(f"perf.{stem}.operators").CALLS
    except ModuleNotFoundError as error:
        if error.name != f"perf.{stem}.operators":
            raise
        return None
    return declared.get(operator)


def listed() -> list[str]:
    """The operators with a CUDA kernel that calls can be made of: all but those of a store."""
    schemas = {name: getattr(torch.ops.twinproof, name).default._schema for name in ops.cuda_operators()}
    return [name for name, schema in schemas.items() if schema.arguments[0].name not in ("handle", "formats")]


def on_device(value: Any, device: torch.device) -> Any:
    """A copy of arguments on a device; what is no tensor stays."""
    if isinstance(value, torch.Tensor):
        # Strides matter to some operators, and ``to`` keeps them only for dense tensors.
        copied = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return copied.copy_(value)
    if isinstance(value, (list, tuple)):
        return type(value)(on_device(item, device) for item in value)
    return value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of arguments or results."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def outputs(operator: str, arguments: Sequence[Any]) -> list[torch.Tensor]:
    """Call it: what it returns, and the arguments that it writes, as its schema says."""
    call = getattr(torch.ops.twinproof, operator).default
    returned = call(*arguments)
    written = [
        argument
        for argument, declared in zip(arguments, call._schema.arguments, strict=True)
        if declared.alias_info is not None and declared.alias_info.is_write
    ]
    return [*tensors_in(returned), *tensors_in(written)]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def differences(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> Iterator[str]:
    """Where outputs differ in dtype, shape or bytes."""
    if len(got) != len(expected):
        yield f"got {len(got)} outputs, expected {len(expected)}"
    for number, (ours, theirs) in enumerate(zip(got, expected, strict=False)):
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            yield f"output {number}: got {ours.dtype} {list(ours.shape)}, expected {theirs.dtype} {list(theirs.shape)}"
            continue
        mine, wanted = _bits(ours), _bits(theirs)
        wrong = (mine != wanted).nonzero().flatten()
        if wrong.numel():
            first = int(wrong[0])
            yield (
                f"output {number}: {wrong.numel()} of {mine.numel()} bytes differ, the first at {first}: "
                f"got {int(mine[first])}, expected {int(wanted[first])}"
            )


def _late(arguments: Sequence[Any], device: torch.device) -> tuple[Any, ...]:
    """Arguments on a device that are zeros until the current stream comes to the copies behind its delay."""
    sources = on_device(tuple(arguments), device)
    late = on_device(tuple(arguments), device)
    for tensor in tensors_in(late):
        tensor.zero_()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda._sleep(_DELAY_CYCLES)  # type: ignore[no-untyped-call]
    for tensor, source in zip(tensors_in(late), tensors_in(sources), strict=True):
        tensor.copy_(source, non_blocking=True)
    return tuple(late)


def _streams(device: torch.device, count: int) -> list[Any]:
    return [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(count)]  # type: ignore[no-untyped-call]


def _on(stream: Any) -> Any:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _results(operator: str, call: OperatorCall, device: torch.device) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """(where it ran, its outputs) for every way to run it."""
    yield "default stream", outputs(operator, on_device(call.arguments, device))
    for name, count in (("another stream", 1), ("two streams", 2)):
        made = []
        for stream in _streams(device, count):
            with _on(stream):
                made.append(outputs(operator, _late(call.arguments, device)))
        _settle(device)
        yield from ((f"{name}, {number + 1} of {count}", found) for number, found in enumerate(made))


def provenance() -> dict[str, Any]:
    """What evidence of operators begins with: the machine but for its folders, and the digest of the sources."""
    machine = {name: value for name, value in environment().items() if name != "file_system"}
    return {"environment": machine, "library_sources": ops.build_facts()["sources"]}


def _judge(operator: str, device: torch.device, counts: Sequence[int]) -> tuple[int, list[str]]:
    calls, wrong, compared = calls_of(operator), [], 0
    if calls is None:
        stem = operator.split("_", 1)[0]
        return 0, [f"perf/{stem}/operators.py has no calls of {operator}"]
    for count in counts:
        for call in calls(count, torch.Generator().manual_seed(count)):
            # An operator writes its arguments: each run has its own.
            expected = outputs(operator, on_device(call.arguments, torch.device("cpu")))
            for where, got in _results(operator, call, device):
                _settle(device)
                compared += 1
                found = [f"{call.label}, {count}, {where}: {line}" for line in differences(got, expected)]
                print("\n".join(found), end="\n" if found else "", flush=True)
                wrong += found
    return compared, wrong


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every call gave the CPU's bytes."""
    parser = argparse.ArgumentParser(prog="perf.gpu.operators", description="CUDA operators against the CPU's bytes.")
    parser.add_argument("operator", nargs="?")
    parser.add_argument("--list", action="store_true", help="print the operators with a CUDA kernel as JSON")
    parser.add_argument("--every", action="store_true", help="all of them in this process, for a tool around it")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep what was found, as evidence")
    parser.add_argument("--counts", type=int, nargs="+", default=_COUNTS, help="of ids or elements")
    given = parser.parse_args(argv)
    registered = ops.cuda_operators()
    if given.list:
        if not registered:
            print("the library has no CUDA operator")
            return 1
        print(json.dumps(listed()))
        return 0
    if given.every:
        words = ["--device", given.device, "--counts", *map(str, given.counts)]
        codes = [main([name, *words]) for name in listed()]
        print(f"{len(codes)} operators, {len(codes) - sum(codes)} with the CPU's bytes")
        return 0 if codes and not any(codes) else 1
    if given.operator not in registered:
        parser.error(f"no CUDA operator of that name: {given.operator}; there are {', '.join(registered)}")
    compared, wrong = _judge(given.operator, torch.device(given.device), given.counts)
    if given.json is not None:
        # ``ci/checks.py`` looks for an operator's name here before it is called proven.
        ran = [given.operator] if given.device == "cuda" and compared and not wrong else []
        found = {
            **provenance(),
            "cuda_operators_run": ran,
            "compared": compared,
            "differences": wrong,
        }
        given.json.write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")
    rehearsed = "" if given.device == "cuda" else f" (a rehearsal on {given.device})"
    summary = f"{given.operator}: {compared} runs compared, {len(wrong)} differences{rehearsed}"
    print(f"{summary}; the first: {wrong[0]}" if wrong else summary)
    return 0 if compared and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
