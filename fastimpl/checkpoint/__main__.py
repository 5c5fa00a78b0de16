"""Look at, verify, compare, merge and clean up checkpoints from a shell.

``python -m fastimpl.checkpoint inspect|verify|diff|consolidate|clean PATH``, or ``twinproof checkpoint ...``.
Results go to standard output, progress and errors to standard error. Exit status 0 when all is well, 1 when the
checkpoint is not or two differ, 2 for wrong arguments and where a comparison could not be made, 130 if interrupted,
141, as of any command, where whoever read the output has gone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from fastimpl import ops
from fastimpl.checkpoint.consolidate import consolidate_with_progress
from fastimpl.checkpoint.reader import ReadRanges
from twinproof.checkpoint.catalog import (
    PIECE_BYTES,
    Catalog,
    LoadJob,
    Meter,
    cut_rectangle,
    payload_bytes,
    read_index,
    stored_ranges,
    verify_catalog,
)
from twinproof.checkpoint.format import as_bits, parse_json_object, torch_dtype
from twinproof.checkpoint.plan import check_count, parse_size
from twinproof.checkpoint.publish import Leftover, find_leftovers, remove_leftover
from twinproof.checkpoint.whole import read_catalog
from twinproof.errors import ConfigError, MissingCheckpointError, TwinproofError, UnsupportedError

_Value = TypeVar("_Value")


def _say(text: str) -> None:
    """A line to standard output; what that cannot encode is escaped: names may be any text, and paths any bytes."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


def _facts(path: Path, catalog: Catalog) -> dict[str, Any]:
    tensors = {
        name: {
            "dtype": record.dtype,
            "shape": list(record.shape),
            "chunks": len(record.chunks),
            "file": _file(catalog, name),
        }
        for name, record in sorted(catalog.tensors.items())
    }
    payload = sum(map(payload_bytes, catalog.tensors.values()))
    files = {Path(file).name: header.file_bytes for file, header in sorted(catalog.headers.items())}
    return {
        "path": str(path),
        "files": files,
        "metadata": catalog.metadata,
        "payload_bytes": payload,
        "tensors": tensors,
    }


def _file(catalog: Catalog, name: str) -> str:
    return ", ".join(sorted({Path(chunk.file).name for chunk in catalog.tensors[name].chunks}))


def _inspect(options: argparse.Namespace) -> dict[str, Any]:
    facts = _facts(options.path, read_catalog(options.path))
    if not options.json:
        for name, tensor in facts["tensors"].items():
            _say(f"{tensor['dtype']:>12} {tensor['shape']!s:<24} {name}  [{tensor['file']}]")
        _say(f"{len(facts['tensors'])} tensors, {facts['payload_bytes']} bytes, {len(facts['files'])} files")
    return facts


def _verify(options: argparse.Namespace) -> dict[str, Any]:
    """Every header, the index, the tiling of shards, the index's total, and every byte that has a checksum."""
    catalog = read_catalog(options.path)
    facts = _facts(options.path, catalog)
    index = read_index(options.path) if options.path.is_dir() else None
    declared = index.total_size if index is not None else None
    warnings = [] if declared in (None, facts["payload_bytes"]) else [f"the index declares {declared} bytes"]
    warnings += [f"{file} holds tensors that the index has in other files: not read" for file in catalog.passed_over]
    found = verify_catalog(catalog, options.path, ops.crc32, options.threads, _progress(options.json))
    if not options.json:
        _say(f"ok: {len(facts['tensors'])} tensors, {facts['payload_bytes']} bytes, {len(facts['files'])} files")
        _say(str(found))
        for text in warnings:
            _say(f"warning: {text}")
    return {
        "path": facts["path"],
        "ok": True,
        "warnings": warnings,
        "payload_bytes": facts["payload_bytes"],
        "verified": str(found),
        "checked": list(found.checked),
        "unchecked": list(found.unchecked),
    }


def _diff(options: argparse.Namespace) -> dict[str, Any]:
    """Names, dtypes, shapes and every value, bit by bit, of two checkpoints of any layout."""
    sides = [read_catalog(path) for path in (options.path, options.other)]
    names = sorted(sides[0].tensors.keys() | sides[1].tensors.keys())
    total_bytes = sum(payload_bytes(record) for record in sides[0].tensors.values())
    meter = Meter(_progress(options.json), total_bytes)
    differences = {}
    for name in names:
        difference = _difference(name, sides)
        if difference is not None:
            differences[name] = difference
        if name in sides[0].tensors:
            meter.add(payload_bytes(sides[0].tensors[name]))
    for side in sides:
        side.check_unchanged()
    if not options.json:
        for name, difference in differences.items():
            _say(f"{name}: {difference}")
        _say(f"{len(names) - len(differences)} tensors equal, {len(differences)} differ")
    return {"path": str(options.path), "other": str(options.other), "ok": not differences, "differences": differences}


def _difference(name: str, sides: Sequence[Catalog]) -> str | None:
    missing = [which for which, side in zip(("first", "second"), sides, strict=True) if name not in side.tensors]
    if missing:
        return f"not in the {missing[0]}"
    first, second = (side.tensors[name] for side in sides)
    for what, mine, other in (("dtype", first.dtype, second.dtype), ("shape", first.shape, second.shape)):
        if mine != other:
            return f"{what} {mine} and {other}"
    dtype = torch_dtype(first.dtype)
    if dtype is None:
        where = sides[0].where(name)
        raise UnsupportedError(
            "no torch dtype holds this tensor", got=first.dtype, expected="no F6, and F4 of even width", where=where
        )
    count, place = 0, None
    # The same two for all pieces: the allocator keeps what it is given back, and finds no room in it for the next.
    buffers = [torch.empty(0, dtype=torch.uint8)] * 2
    for offsets, sizes in cut_rectangle(first.shape, max(1, PIECE_BYTES // dtype.itemsize)):
        values, size_bytes = [], math.prod(sizes) * dtype.itemsize
        for i, record in enumerate((first, second)):
            if buffers[i].numel() < size_bytes:
                buffers[i] = torch.empty(size_bytes, dtype=torch.uint8)
            memory, ranges = stored_ranges(name, record, offsets, sizes, buffer=buffers[i][:size_bytes])
            ReadRanges().read(LoadJob(ranges, 1, time.perf_counter()))
            values.append(as_bits(memory))
        if not torch.equal(*values):
            unequal = torch.nonzero(values[0] != values[1])
            count += len(unequal)
            place = place or [a + b for a, b in zip(offsets, unequal[0].tolist(), strict=True)]
    return f"{count} of {math.prod(first.shape)} values, the first at {place}" if count else None


def _clean(options: argparse.Namespace) -> dict[str, Any]:
    """Name what interrupted saves left in PATH and beside it; with --delete, remove what is old enough."""
    if not options.path.is_dir():
        raise MissingCheckpointError(
            "not a folder",
            got="a file, or nothing",
            expected="one with checkpoints, or a checkpoint",
            where=options.path,
        )
    path = options.path.resolve()
    found = [*find_leftovers(path), *find_leftovers(path.parent, path.name)]
    old = [each for each in found if each.age_s >= 3600 * options.older_than and not each.is_needed]
    if not options.json:
        for each in found:
            why = "delete" if each in old else f"keep: {_why_kept(each)}"
            _say(f"{why:8} {each.path}  ({each.kind} of {each.target.name}, {each.age_s / 3600:.1f} hours old)")
        _say(f"{len(found)} leftovers, {len(old)} to delete" + ("" if options.delete else "; --delete deletes them"))
    for each in old if options.delete else ():
        remove_leftover(each)
    deleted = [str(each.path) for each in old] if options.delete else []
    return {"path": str(path), "ok": True, "leftovers": [str(each.path) for each in found], "deleted": deleted}


def _why_kept(leftover: Leftover) -> str:
    return f"the only copy of {leftover.target.name}, rename it back" if leftover.is_needed else "too young"


def _progress(json_output: bool) -> Callable[[int, int], None]:
    def show(done_bytes: int, total_bytes: int) -> None:
        if not json_output:
            end = "\n" if done_bytes == total_bytes else "\r"
            print(f"{100 * done_bytes // max(total_bytes, 1):3d} % of {total_bytes} bytes", end=end, file=sys.stderr)

    return show


def _consolidate(options: argparse.Namespace) -> dict[str, Any]:
    mapping = None
    if options.mapping is not None:
        mapping = parse_json_object(options.mapping.read_bytes(), str(options.mapping))
    consolidate_with_progress(
        options.path,
        options.output,
        mapping,
        num_threads=options.threads,
        max_shard_size=options.max_shard_size,
        progress=_progress(options.json),
    )
    return _verify(argparse.Namespace(path=options.output, json=options.json, threads=options.threads))


def main(argv: list[str] | None = None) -> int:
    """Run one command."""
    parser = argparse.ArgumentParser(prog="twinproof checkpoint", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    actions = {"inspect": _inspect, "verify": _verify, "diff": _diff, "consolidate": _consolidate, "clean": _clean}
    for name, action in actions.items():
        command = commands.add_parser(name, help=(action.__doc__ or f"{name} a checkpoint"))
        command.add_argument("path", type=Path, metavar="PATH", help="folder or .safetensors file")
        command.add_argument("--json", action="store_true", help="print one JSON object")
        command.set_defaults(action=action)
        if name in ("verify", "consolidate"):
            command.add_argument("--threads", type=_named(_thread_count), default=4)
        if name == "diff":
            command.add_argument("other", type=Path, metavar="OTHER", help="the checkpoint to compare with")
        if name == "clean":
            command.add_argument("--delete", action="store_true", help="delete, not only name")
            text = "least age in hours of what is deleted (default: 24): a save that is running is younger"
            command.add_argument("--older-than", type=_named(_hours), default=24.0, metavar="HOURS", help=text)
        if name == "consolidate":
            command.add_argument("output", type=Path, metavar="OUTPUT", help="folder of the final files")
            command.add_argument("--mapping", type=Path, help="JSON: tensor name -> file index from 1")
            command.add_argument("--max-shard-size", type=_named(_size), help="bytes, or such as 5GB")
    options = parser.parse_args(argv)
    try:
        status = _run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has gone, as ``head`` does. What is left of it goes nowhere, when Python ends too.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return 128 + signal.SIGPIPE
    return status


def _run(options: argparse.Namespace) -> int:
    try:
        result = options.action(options)
    except KeyboardInterrupt:
        print("interrupted; nothing half-written is visible", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except (TwinproofError, OSError) as error:
        if options.json:
            print(
                json.dumps(
                    {"path": str(options.path), "ok": False, "error": type(error).__name__, "message": str(error)}
                )
            )
        else:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2 if options.command == "diff" else 1
    if options.json:
        print(json.dumps(result))
    return 0 if result.get("ok", True) else 1


def _named(convert: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """``convert`` whose ConfigError argparse prints whole: of other errors it says which function refused the text."""

    def converted(text: str) -> _Value:
        try:
            return convert(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return converted


def _thread_count(text: str) -> int:
    return check_count(int(text) if text.isdecimal() else text, "--threads")


def _hours(text: str) -> float:
    """Hours of ``--older-than``. A negative age would delete what a running save writes, NaN would keep everything."""
    try:
        hours = float(text)
    except ValueError:
        hours = math.nan
    if not 0 <= hours < math.inf:
        raise ConfigError("not an age in hours", got=text, expected="a number >= 0", where="--older-than")
    return hours


def _size(text: str) -> int:
    return parse_size(int(text) if text.isdecimal() else text)


if __name__ == "__main__":
    sys.exit(main())
