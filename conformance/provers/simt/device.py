"""The other execution: what nvcc makes of the same source, where there is one. No GPU is needed to compile."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from conformance.provers.simt.build import SimtError, include_folders

__all__ = ["Usage", "device_usage", "why_no_nvcc"]

_TIMEOUT_S = 300
# Without contraction, as the library's arithmetic asks for: each operation is rounded by itself.
_FLAGS = ("-std=c++17", "-O3", "-fmad=false", "-Xptxas=-v", "-c")
_ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\w+)'")
_SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True)
class Usage:
    """What the assembler reports of one kernel for one architecture."""

    kernel: str  # Mangled.
    architecture: str
    register_count: int
    stack_bytes: int
    spill_bytes: int


@cache
def why_no_nvcc() -> str | None:
    """A reason why kernels cannot be compiled for a device here; None where they can."""
    return None if shutil.which("nvcc") else "nvcc is not on PATH"


def device_usage(source: Path, *, architectures: Sequence[str], includes: Sequence[Path] = ()) -> list[Usage]:
    """Compiles ``source`` (``.cu``) and reads registers, stack and spills of each of its kernels.

    Args:
        source: instantiates the kernels, such as by ``simt::launch``.
        architectures: such as ``("80", "90")``.
        includes: folders of the kernels' headers, searched before ours.

    Raises:
        SimtError: no nvcc, or it refuses the source.
    """
    reason = why_no_nvcc()
    if reason is not None:
        raise SimtError(reason)
    targets = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in architectures]
    search = [f"-I{folder}" for folder in (*includes, *include_folders()) if folder.name != "include"]
    with tempfile.TemporaryDirectory() as folder:
        command = ["nvcc", *_FLAGS, *targets, *search, str(source), "-o", f"{folder}/made.o"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise SimtError(f"{' '.join(command)} failed:\n{done.stderr}")
    found, entry, spill = [], ("", ""), (0, 0, 0)
    for line in (done.stdout + done.stderr).splitlines():
        if match := _ENTRY.search(line):
            entry = (match.group(1), match.group(2))
        elif match := _SPILL.search(line):
            spill = (int(match.group(1)), int(match.group(2)), int(match.group(3)))
        elif match := _REGISTERS.search(line):
            found.append(Usage(*entry, int(match.group(1)), spill[0], spill[1] + spill[2]))
    if not found:
        raise SimtError(f"{' '.join(command)} reported no kernel")
    return found
