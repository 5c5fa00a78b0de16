"""Compiles the shim and the tracer, once per content, so that no binary is shipped."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from conformance.harness.native import CompileError, compile_once
from conformance.provers.faults.model import FaultError

__all__ = ["BUILD_FLAGS", "build_shim", "build_tracer", "why_no_shim", "why_no_tracer"]

_HERE = Path(__file__).parent
_SHARED = ("session.c", "paths.c", "filter.c")
# Fortified inline wrappers and 64-bit redirections would rename the very functions that are to be defined.
BUILD_FLAGS = ("-std=gnu11", "-O1", "-U_FORTIFY_SOURCE", "-U_FILE_OFFSET_BITS", "-fvisibility=hidden")
_SHIM_FLAGS = ("-fPIC", "-shared")
_TIMEOUT_S = 120


def _build(name: str, sources: tuple[str, ...], flags: tuple[str, ...], libraries: tuple[str, ...]) -> Path:
    try:
        return compile_once(name, _HERE, sources, flags, libraries)
    except CompileError as error:
        raise FaultError(str(error)) from error


@cache
def build_shim() -> Path:
    """The shared library to preload. Raises FaultError without a working compiler or on an unknown architecture."""
    return _build("shim", ("shim.c", *_SHARED), (*BUILD_FLAGS, *_SHIM_FLAGS), ("-ldl",))


@cache
def build_tracer() -> Path:
    """The tracer program, for x86-64. Raises FaultError as ``build_shim``."""
    return _build("tracer", ("tracer.c", *_SHARED), BUILD_FLAGS, ())


@cache
def why_no_shim() -> str | None:
    """A reason why faults cannot be injected through the shim here; None where they can."""
    if platform.system() != "Linux":
        return f"the fault shim needs Linux, this is {platform.system()}"
    try:
        shim = build_shim()
        ctypes.CDLL(str(shim))
    except (FaultError, OSError) as error:
        return f"the fault shim cannot be built or loaded: {error}"
    return None


@cache
def why_no_tracer() -> str | None:
    """A reason why raw system calls cannot be traced here, such as a forbidden ptrace; None where they can."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"the tracer needs Linux on x86-64, this is {platform.system()} on {platform.machine()}"
    from conformance.provers.faults.session import Session

    try:
        tracer = build_tracer()
    except FaultError as error:
        return f"the tracer cannot be built: {error}"
    with tempfile.TemporaryDirectory() as folder, Session(folder) as session:
        made = os.path.join(session.root, "probe")
        command = [str(tracer), str(session.path), "0", "run", "/bin/mkdir", made]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        seen = session.trace().count("mkdir")
    if done.returncode != 0 or seen != 1:
        return f"ptrace or seccomp is not permitted here: {done.stderr.strip() or f'{seen} calls seen'}"
    return None
