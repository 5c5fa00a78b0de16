"""``python -m fastimpl.checkpoint inspect|verify|consolidate PATH``: look at, check and merge checkpoints from a shell.

Results go to standard output, progress and errors to standard error. Exit status 0 when all is well, 1 when the
checkpoint is not, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastimpl.checkpoint.consolidate import consolidate_with_progress
from twinproof.checkpoint.catalog import Catalog, read_catalog, read_index
from twinproof.checkpoint.format import DTYPES, UNPAIRED_F4
from twinproof.checkpoint.plan import parse_size
from twinproof.errors import TwinproofError


def _facts(path: Path) -> dict[str, Any]:
    catalog = read_catalog(path)
    tensors = {
        name: {
            "dtype": record.dtype,
            "shape": list(record.shape),
            "chunks": len(record.chunks),
            "file": _file(catalog, name),
        }
        for name, record in sorted(catalog.tensors.items())
    }
    payload = sum(math.prod(r.shape) * _bits(r.dtype) // 8 for r in catalog.tensors.values())
    files = {Path(file).name: header.file_bytes for file, header in sorted(catalog.headers.items())}
    return {
        "path": str(path),
        "files": files,
        "metadata": catalog.metadata,
        "payload_bytes": payload,
        "tensors": tensors,
    }


def _bits(dtype: str) -> int:
    # A catalog counts torch elements: two F4 make one, and an odd one stands alone.
    return {"F4": 8, UNPAIRED_F4: 4}.get(dtype) or DTYPES[dtype][0]


def _file(catalog: Catalog, name: str) -> str:
    return ", ".join(sorted({Path(chunk.file).name for chunk in catalog.tensors[name].chunks}))


def _inspect(options: argparse.Namespace) -> dict[str, Any]:
    facts = _facts(options.path)
    if not options.json:
        for name, tensor in facts["tensors"].items():
            print(f"{tensor['dtype']:>12} {tensor['shape']!s:<24} {name}  [{tensor['file']}]")
        print(f"{len(facts['tensors'])} tensors, {facts['payload_bytes']} bytes, {len(facts['files'])} files")
    return facts


def _verify(options: argparse.Namespace) -> dict[str, Any]:
    """Every header, the index, the tiling of shards, and the index's total."""
    facts = _facts(options.path)
    index = read_index(options.path) if options.path.is_dir() else None
    declared = index[1] if index is not None else None
    warnings = [] if declared in (None, facts["payload_bytes"]) else [f"the index declares {declared} bytes"]
    if not options.json:
        print(f"ok: {len(facts['tensors'])} tensors, {facts['payload_bytes']} bytes, {len(facts['files'])} files")
        print("".join(f"warning: {text}\n" for text in warnings), end="")
    return {"path": facts["path"], "ok": True, "warnings": warnings, "payload_bytes": facts["payload_bytes"]}


def _progress(json_output: bool) -> Callable[[int, int], None]:
    def show(done_bytes: int, total_bytes: int) -> None:
        if not json_output:
            end = "\n" if done_bytes == total_bytes else "\r"
            print(f"{100 * done_bytes // max(total_bytes, 1):3d} % of {total_bytes} bytes", end=end, file=sys.stderr)

    return show


def _consolidate(options: argparse.Namespace) -> dict[str, Any]:
    mapping = None
    if options.mapping is not None:
        mapping = {str(name): index for name, index in json.loads(options.mapping.read_text()).items()}
    consolidate_with_progress(
        options.path,
        options.output,
        mapping,
        num_threads=options.threads,
        max_shard_size=options.max_shard_size,
        progress=_progress(options.json),
    )
    return _verify(argparse.Namespace(path=options.output, json=options.json))


def main(argv: list[str] | None = None) -> int:
    """Run one command."""
    parser = argparse.ArgumentParser(prog="python -m fastimpl.checkpoint", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, action in (("inspect", _inspect), ("verify", _verify), ("consolidate", _consolidate)):
        command = commands.add_parser(name, help=(action.__doc__ or f"{name} a checkpoint"))
        command.add_argument("path", type=Path, metavar="PATH", help="folder or .safetensors file")
        command.add_argument("--json", action="store_true", help="print one JSON object")
        command.set_defaults(action=action)
        if name == "consolidate":
            command.add_argument("output", type=Path, metavar="OUTPUT", help="folder of the final files")
            command.add_argument("--threads", type=int, default=4)
            command.add_argument("--mapping", type=Path, help="JSON: tensor name -> file index from 1")
            command.add_argument("--max-shard-size", type=parse_size, help="bytes, or such as 5GB")
    options = parser.parse_args(argv)
    try:
        result = options.action(options)
    except (TwinproofError, OSError) as error:
        if options.json:
            print(
                json.dumps(
                    {"path": str(options.path), "ok": False, "error": type(error).__name__, "message": str(error)}
                )
            )
        else:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
