"""Registers, stack and spills of every kernel, from the compiler's report, against the bounds in ``ci/kernels.json``.

    python ci/kernels.py BUILD_LOG [--architectures 80 90 ...] [--write]

The log is that of a build with ``-Xptxas=-v`` (``CUDAFLAGS=-Xptxas=-v``). A kernel is judged by its worst instance on
any architecture. Each of ours spills nothing; the CUDA library's have the bounds that its own code needs. Registers are
handed out by eights, so that bounds are multiples of 8. ``--write`` makes the file anew, for a look at the difference.
Prints one line per violation, or the table, and exits 1 if there is any.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

BOUNDS = Path(__file__).with_suffix(".json")
LIBRARY = "cub::"
_ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\w+)'")
_MEMORY = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True)
class Use:
    """What a kernel takes: registers of a thread, bytes of its stack, bytes of it that are spilled registers."""

    registers: int
    stack_bytes: int
    spill_bytes: int


def read_report(lines: Iterable[str]) -> Iterator[tuple[str, str, Use]]:
    """(mangled name, architecture, use) of every compiled entry."""
    name = architecture = None
    memory = (0, 0)
    for line in lines:
        entry, stack, used = _ENTRY.search(line), _MEMORY.search(line), _USED.search(line)
        if entry:
            (name, architecture), memory = entry.groups(), (0, 0)
        elif stack:
            memory = int(stack[1]), int(stack[2]) + int(stack[3])
        elif used and name is not None and architecture is not None:
            yield name, architecture, Use(int(used[1]), *memory)
            name = None


def demangled(names: list[str]) -> list[str]:
    """As C++ writes them."""
    done = subprocess.run(["c++filt"], input="\n".join(names), check=True, capture_output=True, text=True)
    return done.stdout.split("\n")[: len(names)]


def short_name(full: str) -> str:
    """What a kernel is called here: what ``for_each_index`` or ``simt::launch`` runs, else the function; bare."""
    body = re.search(r"(?:for_each_index|simt::detail::run)<(?:\(anonymous namespace\)::|[a-z_]+::)*(\w+)", full)
    if body:
        return body[1]
    head = full.split("(anonymous namespace)::")[-1] if full.startswith("void (anonymous") else full
    function = re.search(r"(\w+)(?:<|\()", head)
    library = re.search(r"\b(Device\w+Kernel|EmptyKernel)\b", full) if " cub::" in full else None
    return LIBRARY + library[1] if library else (function[1] if function else full)


def worst(report: Iterable[tuple[str, str, Use]]) -> dict[str, dict[str, Use]]:
    """By short name and architecture, the largest of each kind."""
    found = list(report)
    shorts = dict(zip([name for name, *_ in found], demangled([name for name, *_ in found]), strict=True))
    table: dict[str, dict[str, Use]] = {}
    for name, architecture, use in found:
        mine = table.setdefault(short_name(shorts[name]), {})
        before = mine.get(architecture, Use(0, 0, 0))
        mine[architecture] = Use(*map(max, zip(asdict(before).values(), asdict(use).values(), strict=True)))
    return table


def violations(
    table: dict[str, dict[str, Use]], bounds: dict[str, dict[str, int]], architectures: Iterable[str]
) -> Iterator[str]:
    """A kernel over its bound, without one, or gone; one of ours that spills; an architecture that was not compiled."""
    wanted = set(architectures)
    for name in sorted(table.keys() ^ bounds.keys()):
        known = "is not in ci/kernels.json" if name in table else "is in ci/kernels.json and was not compiled"
        yield f"{name}: {known}"
    for name, uses in sorted(table.items()):
        for missing in sorted(wanted - uses.keys()):
            yield f"{name}: was not compiled for {missing}"
        for architecture, use in sorted(uses.items()):
            if use.spill_bytes and not name.startswith(LIBRARY):
                yield f"{name} on {architecture}: spills {use.spill_bytes} bytes, ours spill none"
            for what, got in asdict(use).items():
                most = bounds.get(name, {}).get(what)
                if most is not None and got > most:
                    yield f"{name} on {architecture}: {what} got {got}, at most {most}"


def bounds_of(table: dict[str, dict[str, Use]]) -> dict[str, dict[str, int]]:
    """The least bounds that hold."""
    made = {}
    for name, uses in sorted(table.items()):
        most = Use(*map(max, zip(*(asdict(use).values() for use in uses.values()), strict=True)))
        made[name] = asdict(most) | {"registers": -(-most.registers // 8) * 8}
    return made


def main(arguments: list[str]) -> int:
    """Judge a log."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("log", type=Path)
    parser.add_argument("--architectures", nargs="*", default=[], help="that every kernel must be compiled for")
    parser.add_argument("--write", action="store_true", help="make ci/kernels.json from this log")
    given = parser.parse_args(arguments)
    log = given.log.read_text(encoding="utf-8", errors="replace") if given.log.exists() else ""
    table = worst(read_report(log.splitlines()))
    if not table:
        print(f"kernels: {given.log} reports no kernel; build with CUDAFLAGS=-Xptxas=-v")
        return 1
    if given.write:
        lines = (f' "{name}": {json.dumps(bound)}' for name, bound in bounds_of(table).items())
        BOUNDS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    found = list(violations(table, json.loads(BOUNDS.read_text(encoding="utf-8")), given.architectures))
    compiled = sorted({architecture for uses in table.values() for architecture in uses}, key=int)
    for name, uses in sorted(table.items()):
        columns = (
            f"{architecture}:{uses[architecture].registers}" for architecture in compiled if architecture in uses
        )
        print(f"{name:<40} {' '.join(columns)}")
    print("\n".join(found) or f"kernels: {len(table)} on {', '.join(compiled)}, no violation")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
