"""Compiles proofs of kernels with the system's C++ compiler, and plants faults in copies of the kernels' sources."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from conformance.harness.native import CompileError, cache_folder, compile_once

__all__ = ["Planted", "SimtError", "build", "compile_flags", "include_folders", "why_no_prover"]

_FLAGS = ("-std=c++20", "-g0", "-ffp-contract=off", "-fno-strict-aliasing", "-Wall", "-Wextra")
# Compiles about as fast as -O0, which runs five times as long; -O1 compiles half as long again and runs no faster.
_OPTIMIZE = "-Og"
# The parts that ask most of a compiler and take least of its time.
_PROBE = "#include <simt/fiber.h>\n#include <span>\nint main() { return 0; }\n"


class SimtError(RuntimeError):
    """No working compiler, a fault that cannot be planted, or a program that ended without a verdict."""


@dataclass(frozen=True)
class Planted:
    """One fault in a copy of a source: ``old`` occurs there exactly once and becomes ``new``.

    Where several are planted in one program, ``FAULT`` in ``new`` is whether the program's ``simt_planted`` is this
    fault's number, counted from 1, so that one compilation serves all of them.
    """

    name: str
    file: str  # As the kernels' sources include it, such as "pipeline/pool_kernel.h".
    old: str
    new: str


def include_folders() -> tuple[Path, ...]:
    """Where ``simt.h``, the prover behind it and the library's own kernels are included from."""
    found = importlib.util.find_spec("fastimpl")
    if found is None or found.origin is None:
        raise SimtError("fastimpl is not installed, whose csrc/common/simt.h kernels include")
    sources = Path(found.origin).parent / "csrc"
    return sources / "common", Path(__file__).parent / "include", sources


def compile_flags() -> tuple[str, ...]:
    """What a build system of one's own gives to the host compiler."""
    return (*_FLAGS, _OPTIMIZE, *(f"-I{folder}" for folder in include_folders()))


_GUARD = "SIMT_PLANTED"


def _with_fault(text: str, planted: Planted, number: int) -> str:
    if text.count(planted.old) != 1:
        raise SimtError(
            f"{planted.name}: {planted.file} has {text.count(planted.old)} places, expected 1: {planted.old}"
        )
    return text.replace(planted.old, planted.new.replace("FAULT", f"(simt_planted == {number})"))


def _overlay(source: Path, faults: Sequence[Planted], folders: Sequence[Path]) -> Path:
    """A folder with copies of the headers, in which the faults are, and of the proofs, which refuse any others."""
    proofs = source.read_text(encoding="utf-8")
    copies = {source.name: f'#line 1 "{source.resolve()}"\n{proofs}\n'}
    for file in dict.fromkeys(planted.file for planted in faults):
        found = [folder / file for folder in folders if (folder / file).is_file()]
        if not found:
            raise SimtError(f"{faults[0].name}: {file} is in none of {', '.join(map(str, folders))}")
        text, guard = found[0].read_text(encoding="utf-8"), f"{_GUARD}_{re.sub(r'[^A-Za-z0-9]', '_', file)}"
        for number, planted in enumerate(faults, start=1):
            text = _with_fault(text, planted, number) if planted.file == file else text
        copies[file] = f"{text}\n#if !defined({_GUARD})\n#define {_GUARD}\n#endif\n#define {guard}\n"
        copies[source.name] += (
            f"#ifndef {guard}\n#error {file} is included from elsewhere: the fault is not there\n#endif\n"
        )
    digest = hashlib.sha256(json.dumps(copies).encode()).hexdigest()[:24]
    target = cache_folder() / f"planted-{digest}"
    for name, content in copies.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=target, delete=False, encoding="utf-8") as made:
            made.write(content)
        os.replace(made.name, target / name)
    return target


def build(
    source: str | os.PathLike[str],
    *,
    includes: Sequence[str | os.PathLike[str]] = (),
    planted: Planted | Sequence[Planted] | None = None,
) -> Path:
    """The program of the proofs in ``source`` (``.cpp``), compiled once per content.

    Args:
        source: proofs, with ``simt::prover::main`` as their program.
        includes: folders of the kernels' own headers, searched before ours.
        planted: a fault for one of the headers; or several, of which the proofs choose one by ``simt_planted``, an int
            that they define before they include the headers.

    Raises:
        SimtError: no working compiler, one that refuses, or a fault whose place is not there exactly once.
    """
    path = Path(source)
    folders = (*(Path(folder) for folder in includes), *include_folders())
    try:
        if planted is not None:
            faults = (planted,) if isinstance(planted, Planted) else tuple(planted)
            folders = (path.parent, *folders)
            overlay = _overlay(path, faults, folders)
            # First, so that headers of the proofs include the faulty copy too.
            path, folders = overlay / path.name, (overlay, *folders)
        return compile_once(f"simt-{path.stem}", path.parent, (path.name,), (*_FLAGS, _OPTIMIZE), (), folders)
    except CompileError as error:
        raise SimtError(str(error)) from error


@cache
def why_no_prover() -> str | None:
    """A reason why kernels cannot be proven here; None where they can."""
    if platform.system() != "Linux":
        return f"the SIMT prover needs Linux, this is {platform.system()}"
    try:
        with tempfile.TemporaryDirectory() as folder:
            probe = Path(folder) / "probe.cpp"
            probe.write_text(_PROBE, encoding="utf-8")
            build(probe)
    except SimtError as error:
        return f"the SIMT prover cannot be built: {error}"
    return None
