"""What a result was obtained on; a failure that cannot be placed cannot be reproduced."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["environment", "environment_line", "implementation_facts"]

_DISTRIBUTIONS = (
    "twinproof",
    "twinproof-conformance",
    "torch",
    "safetensors",
    "pytest",
    "hypothesis",
    "pytest-benchmark",
    "numpy",
    "transformers",
)
_OUR_PACKAGES = ("twinproof", "refimpl", "fastimpl", "conformance")
_OUR_VARIABLES = ("FASTIMPL_", "TWINPROOF_")
# The instruction sets that the CPU kernels dispatch on, and their usual successors.
_CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16", "amx_tile", "asimd", "sve")


def environment(folder: Path | None = None) -> dict[str, Any]:
    """Versions, processor, memory, accelerators, the file system of ``folder`` (default: here) and our variables.

    Every value is a string, number, list or dict, ready for JSON; what cannot be read says "unavailable".
    """
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _DISTRIBUTIONS}},
        "platform": platform.platform(),
        "torch": _torch(),
        "cpu": _cpu(),
        "memory_bytes": _memory_bytes(),
        "gpus": _gpus(),
        "file_system": _file_system(folder or Path.cwd()),
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_OUR_VARIABLES)},
    }


def environment_line(facts: dict[str, Any]) -> str:
    """The one line of the facts that a failure message has room for."""
    versions = facts["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "safetensors", "hypothesis"))
    gpus = ", ".join(gpu["name"] for gpu in facts["gpus"]) if isinstance(facts["gpus"], list) else "no gpu"
    cpu = facts["cpu"]
    processor = f"{cpu['count']} x {cpu['model']} [{' '.join(cpu['flags'])}]"
    return f"{packages}; {processor}; {gpus}; {facts['file_system']['type']}"


def implementation_facts(name: str) -> dict[str, Any]:
    """Where the implementation comes from, its version and what its ``build_info()`` says, if it has one."""
    module = importlib.import_module(name)
    top = name.partition(".")[0]
    distribution = "twinproof" if top in _OUR_PACKAGES else top
    build_info = getattr(module, "build_info", None)
    return {
        "name": name,
        "version": str(getattr(module, "__version__", None) or _version(distribution, "unversioned")),
        "file": str(getattr(module, "__file__", None) or "unavailable"),
        "build": _plain(build_info()) if callable(build_info) else "unavailable",
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, str | int | float | bool | type(None)) else str(value)


def _version(name: str, otherwise: str = "not installed") -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return otherwise


def _torch() -> dict[str, Any]:
    if importlib.util.find_spec("torch") is None:
        return {"build": "not installed"}
    import torch

    return {
        "cuda": torch.version.cuda or "none",
        "threads": torch.get_num_threads(),
        "distributed": torch.distributed.is_available(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        # Where torch's own compiler lay says nothing of what was built.
        "build": re.sub(r"CXX_COMPILER=[^,]*, ", "", torch.__config__.show()).splitlines(),
    }


def _cpu() -> dict[str, Any]:
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    except OSError:
        fields["model name"] = platform.processor() or "unavailable"
    present = (fields.get("flags") or fields.get("Features") or "").split()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "model": fields.get("model name", platform.machine()),
        "count": usable,
        "flags": [flag for flag in _CPU_FLAGS if flag in present],
    }


def _memory_bytes() -> int | str:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return "unavailable"


def _gpus() -> list[dict[str, Any]] | str:
    if importlib.util.find_spec("pynvml") is None:
        return "pynvml not installed"
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"none: {error}"
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [
            {
                "name": pynvml.nvmlDeviceGetName(handle),
                "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                "driver": driver,
            }
            for handle in handles
        ]
    except pynvml.NVMLError as error:
        return f"unavailable: {error}"
    finally:
        pynvml.nvmlShutdown()


def _file_system(folder: Path) -> dict[str, Any]:
    statistics = os.statvfs(folder)
    best = ("", "unavailable")
    try:
        for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
            _, mount, kind, *_ = line.split()
            if folder.resolve().is_relative_to(mount) and len(mount) >= len(best[0]):
                best = mount, kind
    except OSError:
        pass
    return {"folder": str(folder), "type": best[1], "free_bytes": statistics.f_bavail * statistics.f_frsize}
