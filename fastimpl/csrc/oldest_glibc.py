"""Makes a libc to link against that has only what a release of glibc has: ``oldest_glibc.py FOLDER RELEASE``.

A linker binds each symbol to its newest version in the libc of the machine that builds, so that a library asks for that
machine's glibc though its code does not. Here each symbol of the machine's libc has the newest version that is not
newer than RELEASE, and a symbol that came later is missing: to use one is an error of the linker. What is written is
``libc.so.6`` without code, which is only ever linked against, and the linker's script ``libc.so``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

_SYMBOL = re.compile(
    r"\s*\d+: [0-9a-f]+\s+(?P<size>\w+)\s+(?P<kind>FUNC|OBJECT|IFUNC)\s+(?:GLOBAL|WEAK)\s+DEFAULT\s+\d+ "
    r"(?P<name>\w+)@@?GLIBC_(?P<release>[0-9.]+)$"
)


class Symbol(NamedTuple):
    """One version of a symbol: ``release`` as numbers, so that they compare."""

    release: tuple[int, ...]
    is_object: bool
    size_bytes: int


def release_of(text: str) -> tuple[int, ...]:
    """``"2.28"`` as (2, 28)."""
    return tuple(map(int, text.split(".")))


def _found(name: str) -> str:
    done = subprocess.run(["cc", f"-print-file-name={name}"], check=True, capture_output=True, text=True)
    return str(Path(done.stdout.strip()).resolve())


def symbols_of(library: str, newest: tuple[int, ...]) -> dict[str, Symbol]:
    """Name -> the newest version that is not newer than ``newest``; names without one are left out."""
    done = subprocess.run(["readelf", "-W", "--dyn-syms", library], check=True, capture_output=True, text=True)
    found: dict[str, Symbol] = {}
    for match in filter(None, map(_SYMBOL.match, done.stdout.splitlines())):
        symbol = Symbol(release_of(match["release"]), match["kind"] == "OBJECT", int(match["size"], 0))
        if symbol.release <= newest:
            found[match["name"]] = max(symbol, found.get(match["name"], symbol))
    return found


def write(folder: Path, release: str) -> None:
    """Write ``libc.so.6`` and ``libc.so`` into ``folder``."""
    symbols = symbols_of(_found("libc.so.6"), release_of(release))
    lines = []
    for number, (name, symbol) in enumerate(sorted(symbols.items())):
        kind = "object" if symbol.is_object else "function"
        lines += [".data" if symbol.is_object else ".text", f".globl s{number}", f".type s{number}, @{kind}"]
        lines += [f".size s{number}, {symbol.size_bytes}", f"s{number}: .zero {max(1, symbol.size_bytes)}"]
        lines.append(f".symver s{number}, {name}@@GLIBC_{'.'.join(map(str, symbol.release))}, remove")
    folder.mkdir(parents=True, exist_ok=True)
    made, source, versions = (folder / name for name in ("libc.so.6", "libc.s", "libc.map"))
    source.write_text("\n".join(lines) + "\n", encoding="ascii")
    releases = sorted({symbol.release for symbol in symbols.values()})
    nodes = [f"GLIBC_{'.'.join(map(str, each))} {{}};\n" for each in releases]
    versions.write_text("".join(nodes), encoding="ascii")
    options = ["-shared", "-nostdlib", "-Wl,-soname,libc.so.6", f"-Wl,--version-script,{versions}"]
    subprocess.run(["cc", *options, "-o", str(made), str(source)], check=True)
    rest = f"{_found('libc_nonshared.a')} AS_NEEDED ( {_found('ld-linux-x86-64.so.2')} )"
    (folder / "libc.so").write_text(f"GROUP ( {made.resolve()} {rest} )\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2])
