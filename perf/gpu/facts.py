"""What the machine is: GPU, driver, clocks, versions, tools. Each fact by itself, so that a missing one hides no other.

python -m perf.gpu.facts
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence

from conformance.harness.environment import environment

__all__ = ["main"]

_FIELDS = ("name", "driver_version", "memory.total", "memory.used", "clocks.sm", "clocks.max.sm", "power.limit",
           "mig.mode.current", "pcie.link.gen.max")  # fmt: skip
_QUERY = ",".join(_FIELDS)
_TOOLS = ("nvcc", "compute-sanitizer", "ncu", "nsys", "cmake", "ninja", "g++")
_TIMEOUT_S = 10


def _said(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unavailable: {error}"
    return (done.stdout or done.stderr).strip()


def main() -> int:
    """0 when there is a GPU that the driver answers for."""
    gpus = _said(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"])
    print(f"{_QUERY}\n{gpus}")
    print("\n".join(f"{tool}: {shutil.which(tool) or 'not here'}" for tool in _TOOLS))
    print(json.dumps(environment(), indent=1, default=str))
    has_gpu = not gpus.startswith("unavailable") and "NVIDIA" in gpus.upper()
    print(gpus.splitlines()[0] if has_gpu else "no GPU here")
    return 0 if has_gpu else 1


if __name__ == "__main__":
    sys.exit(main())
