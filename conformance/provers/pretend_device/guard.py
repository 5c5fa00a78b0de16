"""The device's guard for torch, compiled at first use."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from conformance.harness.native import NoCompilerError, compile_once

__all__ = ["register_guard"]

_TORCH = Path(torch.__file__).parent


def register_guard() -> bool:
    """Register a guard of C++, before torch has one of Python; False where there is no compiler for it.

    Without it, the first error in a backward ends the process: torch's guard of Python backends calls Python while an
    exception passes through it. Raises CompileError where the compiler refuses.
    """
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    version = f"-DTORCH_OF_GUARD={torch.__version__!r}"
    flags = ("-std=c++20", "-O1", "-shared", "-fPIC", abi, version, "-isystem", str(_TORCH / "include"))
    try:
        made = compile_once(
            "pretend-guard", Path(__file__).parent, ("guard.cpp",), flags, (f"-L{_TORCH / 'lib'}", "-lc10")
        )
    except NoCompilerError:
        return False
    ctypes.CDLL(str(made))
    return True
