"""A library that belongs to the sources here: the one that is carried along, or else one that is built now.

    python -m perf.gpu.library [--build FOLDER]

A carried library is refused when the digest of its sources, in ``build_info.json``, is not that of ``fastimpl/csrc``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import fastimpl
from fastimpl import ops
from twinproof.errors import ConfigError

__all__ = ["build", "main", "reason_against_carried"]


def reason_against_carried() -> str | None:
    """Why the library here cannot be used, or None."""
    path = ops.library_path()
    if path is None:
        return "there is none"
    try:
        ops.refuse_if_stale(path)
    except ConfigError as error:
        return str(error)
    return None if ops.build_facts().get("cuda") else "it was built without CUDA"


def build(folder: Path) -> None:
    """Compile for the GPU that is here, into the package. Raises CalledProcessError."""
    package = Path(next(iter(fastimpl.__path__)))
    environment = os.environ | {"FASTIMPL_BUILD": "cuda"}
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    words = ["cmake", "-S", str(package / "csrc"), "-B", str(folder), *generator, "-DCMAKE_BUILD_TYPE=Release"]
    # Another compiler's new warnings are no reason to have no evidence.
    words += [
        f"-DPython3_EXECUTABLE={sys.executable}",
        "-DCMAKE_CUDA_ARCHITECTURES=native",
        "-DSTRICT=OFF",
    ]
    subprocess.run(words, env=environment, check=True)
    subprocess.run(["cmake", "--build", str(folder), "--parallel"], env=environment, check=True)
    shutil.copy2(folder / "libfastimpl_ops.so", package)
    shutil.copy2(folder / "build_info.out.json", package / "build_info.json")


def main(argv: Sequence[str] | None = None) -> int:
    """0 when there is a library to use."""
    parser = argparse.ArgumentParser(prog="perf.gpu.library", description="A library that belongs to the sources here.")
    parser.add_argument("--build", type=Path, metavar="FOLDER", help="build there where the carried one is refused")
    given = parser.parse_args(argv)
    reason = reason_against_carried()
    if reason is None:
        print(f"the carried library is of these sources, {ops.build_facts()['sources'][:12]}")
        return 0
    print(f"the carried library is refused: {reason}", flush=True)
    if given.build is None:
        return 1
    try:
        build(given.build)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no library: {error}")
        return 1
    reason = reason_against_carried()
    print(f"built here: {reason or 'of these sources'}")
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main())
