"""A library linked for an older glibc asks for nothing newer, runs, and cannot use what came later."""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "fastimpl" / "csrc"))

import oldest_glibc  # noqa: E402

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None or platform.libc_ver()[0] != "glibc", reason="no C compiler, or another C library"
)
_THREADED = """
#include <pthread.h>
#include <dlfcn.h>
static void* body(void* value) { return (char*)value + 2; }
long in_thread(long value) {
  pthread_t thread;
  void* found = 0;
  if (!dlsym(RTLD_DEFAULT, "malloc") || pthread_create(&thread, 0, body, (void*)value)) return -1;
  pthread_join(thread, &found);
  return (long)found;
}
"""
_LATER = "int arc4random(void); int later(void) { return arc4random(); }"


def _linked(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "made.c").write_text(text, encoding="ascii")
    command = ["cc", "-shared", "-fPIC", "-Wl,--no-undefined", *options, "-o", str(folder / "made.so")]
    return subprocess.run([*command, str(folder / "made.c")], capture_output=True, text=True, check=False)


def _releases(library: Path) -> set[tuple[int, ...]]:
    done = subprocess.run(["readelf", "-W", "--dyn-syms", library], capture_output=True, text=True, check=True)
    return {oldest_glibc.release_of(found) for found in re.findall(r"GLIBC_([0-9.]+)", done.stdout)}


def test_a_library_asks_for_nothing_newer_and_runs(tmp_path: Path) -> None:
    oldest_glibc.write(tmp_path / "glibc", "2.28")
    done = _linked(tmp_path, _THREADED, f"-L{tmp_path / 'glibc'}")
    assert done.returncode == 0, done.stderr
    assert max(_releases(tmp_path / "made.so")) <= (2, 28)
    assert ctypes.CDLL(str(tmp_path / "made.so")).in_thread(40) == 42
    if oldest_glibc.release_of(platform.libc_ver()[1]) >= (2, 34):
        assert _linked(tmp_path, _THREADED).returncode == 0
        assert max(_releases(tmp_path / "made.so")) >= (2, 34), "this machine's own libc asks for more"


def test_what_came_later_is_refused(tmp_path: Path) -> None:
    oldest_glibc.write(tmp_path / "glibc", "2.28")
    done = _linked(tmp_path, _LATER, f"-L{tmp_path / 'glibc'}")
    assert done.returncode != 0
    assert "undefined reference to `arc4random'" in done.stderr
