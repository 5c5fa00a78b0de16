"""NVIDIA's compute-sanitizer around every CUDA operator, one of its tools in each step.

    python -m perf.gpu.sanitizer memcheck

``memcheck`` sees accesses outside of allocations and misaligned ones; ``racecheck`` hazards of shared memory;
``synccheck`` barriers that not all threads reach. Each operator runs as in ``perf.gpu.operators``, its bytes compared,
in small shapes: an instrumented kernel is ten to a hundred times slower. Memory comes from the driver, not from torch's
cache, and each allocation is padded: what lies beside a tensor belongs to nobody.

The tool comes with the CUDA toolkit, or as ``pip install nvidia-cuda-sanitizer-api``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

__all__ = ["TOOLS", "find_sanitizer", "find_tool", "main"]

TOOLS = ("memcheck", "racecheck", "synccheck")
_NAME = "compute-sanitizer"
_FOUND = 86  # The exit status that says the tool found something, which no program of ours ends with.
_PADDING_BYTES = 256
_COUNT = 1_000
_ERRORS_SHOWN = 40
# The last line of a run that came to its end.
_SUMMARY = {"memcheck": "ERROR SUMMARY", "racecheck": "RACECHECK SUMMARY", "synccheck": "ERROR SUMMARY"}


def find_tool(name: str) -> str | None:
    """Where a tool is: on the search path, in the toolkit that CUDA_HOME names, or in a package of pip's."""
    homes = [Path(home) / "bin" for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    packages = Path(sysconfig.get_path("purelib")) / "nvidia"
    places = [*homes, *sorted(packages.glob("*/bin"))]
    return shutil.which(name) or next((str(place / name) for place in places if (place / name).is_file()), None)


def find_sanitizer() -> str | None:
    """Where compute-sanitizer is."""
    return find_tool(_NAME)


def main(argv: Sequence[str] | None = None) -> int:
    """0 when all operators ran under the tool, gave the CPU's bytes, and the tool found nothing."""
    parser = argparse.ArgumentParser(prog="perf.gpu.sanitizer", description="compute-sanitizer around all operators.")
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("--device", default="cuda", help="cpu: a rehearsal, in which the tool sees no kernel")
    given = parser.parse_args(argv)
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print(f"{_NAME} is not here: it comes with the CUDA toolkit, or by pip install nvidia-cuda-sanitizer-api")
        return 1
    options = ["--tool", given.tool, "--error-exitcode", str(_FOUND), "--print-limit", str(_ERRORS_SHOWN)]
    if given.tool == "memcheck":
        options += ["--padding", str(_PADDING_BYTES), "--leak-check", "no"]
    if given.device == "cpu":
        options += ["--require-cuda-init", "no"]
    program = [sys.executable, "-m", "perf.gpu.operators", "--every", "--device", given.device, "--counts", str(_COUNT)]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    # Without its summary the tool did not come to its end, whatever the exit status is. On a CPU it has none.
    finished = given.device == "cpu"
    command = [sanitizer, *options, *program]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        # As it comes: a run that its limit ends leaves what it found so far.
        for line in run.stdout or ():
            print(line, end="", flush=True)
            finished |= _SUMMARY[given.tool] in line
    print(f"{given.tool}: exit status {run.returncode}{'' if finished else ', and no summary'}")
    return 0 if run.returncode == 0 and finished else 1


if __name__ == "__main__":
    sys.exit(main())
