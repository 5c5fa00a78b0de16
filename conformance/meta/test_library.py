"""The built library: it asks torch for the current CUDA stream, and it refuses to run beside sources not its own.

No GPU is needed. On a CPU build of torch a stand-in for ``libtorch_cuda.so`` is loaded as torch loads the real one,
with local scope; on a CUDA build (``ci/cuda``) the real one is there.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastimpl
from conformance.harness import native
from fastimpl import ops
from twinproof.errors import ConfigError

_FUNCTION = "int aoti_torch_get_current_cuda_stream(int device, void** stream) { *stream = &device; return 0; }"
# What a library sees that declares the function weak and links torch_cpu alone: nothing, whatever torch has loaded.
_WEAK = """
__attribute__((weak)) int aoti_torch_get_current_cuda_stream(int device, void** stream);
int sees_function(void) { return aoti_torch_get_current_cuda_stream != 0; }
"""
_ASK = """
import ctypes, sys, torch
for path in sys.argv[1:]:
    ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL)
import fastimpl
print(fastimpl.build_info()["cuda_stream_symbol"])
"""

built = pytest.mark.skipif(ops.library_path() is None, reason="the library was not built")
no_cuda = pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has loaded the real libtorch_cuda.so")


def _compiled(folder: Path, name: str, source: str) -> Path:
    (folder / f"{name}.c").write_text(source)
    return native.compile_once(name, folder, [f"{name}.c"], ["-shared", "-fPIC", f"-Wl,-soname,{name}.so"])


def _symbol_in_new_process(*libraries: Path) -> bool:
    command = [sys.executable, "-W", "ignore", "-c", _ASK, *map(str, libraries)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.split()[-1] == "True"


@built
def test_stream_symbol_of_this_torch() -> None:
    info = fastimpl.build_info()
    assert info["cuda_stream_symbol"] is (torch.version.cuda is not None)
    assert (info["torch"], info["torch_cuda"]) == (torch.__version__, torch.version.cuda)


@built
@no_cuda
def test_stream_symbol_is_found_in_a_library_of_local_scope(tmp_path: Path) -> None:
    cuda = _compiled(tmp_path, "libtorch_cuda", _FUNCTION)
    assert _symbol_in_new_process(cuda)
    ctypes.CDLL(str(cuda), mode=ctypes.RTLD_LOCAL)
    assert ctypes.CDLL(str(_compiled(tmp_path, "libweak", _WEAK))).sees_function() == 0


@built
@no_cuda
def test_a_torch_without_the_function_is_told_from_one_with_it(tmp_path: Path) -> None:
    assert not _symbol_in_new_process(_compiled(tmp_path, "libtorch_cuda", "int other_function(void) { return 0; }"))


@built
def test_every_registered_cuda_operator_is_listed() -> None:
    info = fastimpl.build_info()
    names = {str(name).split("::")[1] for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
             if str(name).startswith("twinproof::")}  # fmt: skip
    assert set(info["unproven_cuda_ops"]) == {name.split(".")[0] for name in names} - fastimpl._PROVEN_CUDA_OPS
    assert bool(info["cuda"]) == bool(info["cuda_architectures"]) == bool(names)


def _package(folder: Path, *, recorded: str | None) -> Path:
    """A package's folder with sources, a file in place of the library, and a record of what it was built from."""
    (folder / "csrc/tests").mkdir(parents=True)
    (folder / "csrc/a.cpp").write_text("int a;\n")
    (folder / "csrc/CMakeLists.txt").write_text("project(a)\n")
    (folder / "libfastimpl_ops.so").write_bytes(b"")
    record = {"sources": ops.sources_digest(folder / "csrc") if recorded == "own" else recorded}
    (folder / "build_info.json").write_text(json.dumps({name: value for name, value in record.items() if value}))
    return folder


@pytest.mark.parametrize("recorded", ["own", "0" * 64, None])
def test_a_library_beside_other_sources_is_refused(
    recorded: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _package(tmp_path / "fastimpl", recorded=recorded)
    monkeypatch.setattr(fastimpl, "__path__", [str(folder)])
    library = ops.library_path()
    assert library == folder / "libfastimpl_ops.so"
    if recorded == "own":
        ops.refuse_if_stale(library)
        # Tests are compiled into a program of their own.
        (folder / "csrc/tests/b.cpp").write_text("int b;\n")
        ops.refuse_if_stale(library)
        (folder / "csrc/a.cpp").write_text("int a = 1;\n")
    with pytest.raises(ConfigError, match="built from other sources"):
        ops.refuse_if_stale(library)


def test_without_sources_there_is_nothing_to_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastimpl, "__path__", [str(tmp_path)])
    ops.refuse_if_stale(tmp_path / "libfastimpl_ops.so")


def test_a_program_names_its_own_sources(tmp_path: Path) -> None:
    """The same sources in two folders are two programs: what one reports lies beside it, and the other may be gone."""
    programs = []
    for name in ("one", "another"):
        folder = tmp_path / name
        folder.mkdir()
        programs.append(_compiled(folder, "where", "const char *where(void) { return __FILE__; }"))
    for name, program in zip(("one", "another"), programs, strict=True):
        where = ctypes.CDLL(str(program)).where
        where.restype = ctypes.c_char_p
        assert Path(where().decode()).parent == tmp_path / name
