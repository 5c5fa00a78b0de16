"""Compiles C and C++ of the suite with the system's compiler, once per content, so that no binary is shipped.

Prevents a stale or foreign binary from judging: the file name is a digest of sources, flags and compiler, and the
folder belongs to this user alone.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["CompileError", "NoCompilerError", "cache_folder", "compile_once"]

_COMPILERS = {"c": ("cc", "gcc", "clang"), "cpp": ("c++", "g++", "clang++")}
# Only bounds a compiler that hangs: on a busy machine one works for minutes.
_TIMEOUT_S = 900


class CompileError(RuntimeError):
    """No compiler, or one that refused; or a cache folder that others can write to."""


class NoCompilerError(CompileError):
    """No compiler on PATH."""


def _compiler(language: str) -> str:
    for name in _COMPILERS[language]:
        found = shutil.which(name)
        if found:
            return found
    raise NoCompilerError(f"no compiler: none of {', '.join(_COMPILERS[language])} is on PATH")


def cache_folder() -> Path:
    """The folder of this user's compiled programs. Raises CompileError where others could write to it."""
    folder = Path(tempfile.gettempdir()) / f"twinproof-faults-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise CompileError(f"{folder} is not a folder that only this user can write to")
    return folder


def compile_once(
    name: str,
    folder: Path,
    sources: Sequence[str],
    flags: Sequence[str],
    libraries: Sequence[str] = (),
    includes: Sequence[Path] = (),
) -> Path:
    """The program or library ``name`` made of ``sources`` in ``folder``, all of them C (``.c``) or C++ (``.cpp``).

    ``includes`` are folders of headers, searched in that order; every ``.h`` in them counts as content. So does where
    the sources are: a program names them in its reports, and those of another checkout may be gone.

    Raises:
        NoCompilerError. CompileError: no working compiler.
    """
    language = Path(sources[0]).suffix[1:]
    compiler = _compiler(language)
    places = map(str, (folder.resolve(), *includes))
    digest = hashlib.sha256("\0".join((compiler, platform.machine(), *flags, *libraries, *places)).encode())
    for path in sorted([*folder.glob("*.h"), *folder.glob(f"*.{language}")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for include in includes:
        for path in sorted(include.rglob("*.h")):
            digest.update(str(path.relative_to(include)).encode() + b"\0" + path.read_bytes())
    target = cache_folder() / f"{name}-{digest.hexdigest()[:24]}"
    if target.exists():
        return target
    # Several processes may build at once; the rename makes a finished file appear at one instant.
    with tempfile.TemporaryDirectory(dir=target.parent) as made:
        output = Path(made) / name
        search = [f"-I{include}" for include in includes]
        command = [compiler, *flags, *search, *(str(folder / source) for source in sources)]
        command += ["-o", str(output), *libraries]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise CompileError(f"{' '.join(command)} failed:\n{done.stderr}")
        output.replace(target)
    return target
