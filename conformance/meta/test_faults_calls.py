"""The fault harness sees every call that it claims to see: a fault that never strikes would make crash tests pass."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.provers.faults import CALLS, READ_CALLS, Fault, FaultServer, run_program, why_no_shim, why_no_tracer
from conformance.provers.faults.build import BUILD_FLAGS

pytestmark = pytest.mark.skipif(why_no_shim() is not None, reason=str(why_no_shim()))
needs_tracer = pytest.mark.skipif(why_no_tracer() is not None, reason=str(why_no_tracer()))

_PROGRAM = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
#define SAY(name, call) printf("%s %d\n", name, (int)((call) < 0))
int main(int n, char **v) {
    char data[64] = "0123456789012345678901234567890123456789";
    struct iovec parts[2] = {{data, 20}, {data + 20, 20}};
    (void)n;
    if (chdir(v[1]) != 0) return 9;
    mkdir("folder", 0777);
    int dir = open(".", O_RDONLY | O_DIRECTORY), sub = open("folder", O_RDONLY | O_DIRECTORY);
    int fd = open("a", O_RDWR | O_CREAT, 0666), to = openat(dir, "b", O_RDWR | O_CREAT, 0666);
    close(open64("open64", O_WRONLY | O_CREAT, 0666));
    close(openat64(dir, "openat64", O_WRONLY | O_CREAT, 0666));
    close(creat("creat", 0666));
    close(creat64("creat64", 0666));
    write(fd, data, 40);
    pwrite(fd, data, 40, 40), pwrite64(fd, data, 40, 80);
    writev(fd, parts, 2), pwritev(fd, parts, 2, 120), pwritev64(fd, parts, 2, 160);
    pwritev2(fd, parts, 2, 200, 0), pwritev64v2(fd, parts, 2, 240, 0);
    fsync(fd), fdatasync(fd), syncfs(fd), sync_file_range(fd, 0, 40, 0);
    ftruncate(fd, 300), ftruncate64(fd, 320), truncate("a", 340), truncate64("a", 360);
    fallocate(fd, 0, 0, 400), fallocate64(fd, 0, 0, 420), posix_fallocate(fd, 0, 440), posix_fallocate64(fd, 0, 460);
    lseek(fd, 0, SEEK_SET);
    read(fd, data, 40), readv(fd, parts, 2);
    pread(fd, data, 40, 40), pread64(fd, data, 40, 80);
    preadv(fd, parts, 2, 120), preadv64(fd, parts, 2, 160), preadv2(fd, parts, 2, 200, 0);
    preadv64v2(fd, parts, 2, 240, 0);
    lseek(fd, 0, SEEK_SET);
    sendfile(to, fd, 0, 10), sendfile64(to, fd, 0, 10), copy_file_range(fd, 0, to, 0, 10, 0);
    char *map = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    map[0] = 'm';
    msync(map, 4096, MS_SYNC);
    munmap(mmap64(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, to, 0), 4096);
    munmap(mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE, to, 0), 4096);
    rename("creat", "renamed"), renameat(dir, "renamed", dir, "again"), renameat2(dir, "again", sub, "moved", 0);
    link("a", "linked"), linkat(dir, "a", sub, "linkat", 0);
    symlink("a", "pointer"), symlinkat("a", sub, "pointer");
    FILE *file = fopen("stream", "w");
    fwrite(data, 1, 40, file), fflush(file), fclose(file);
    fclose(fopen64("stream64", "w"));
    syscall(SYS_write, fd, data, 7);
    syscall(SYS_fsync, to);
    unlink("linked"), unlinkat(sub, "linkat", 0), mkdirat(dir, "made", 0777), unlinkat(dir, "made", AT_REMOVEDIR);
    mkdir("gone", 0777), rmdir("gone");
    close(fd), close(to), close(sub), close(dir);
    return 0;
}
"""

# How often each call of the program counts; libc's own implementation of stdio is visible to the tracer alone.
_COUNTS = {
    "open": 10,
    "write": 2,
    "pwrite": 2,
    "writev": 1,
    "pwritev": 4,
    "fwrite": 1,
    "fflush": 1,
    "fsync": 2,
    "fdatasync": 1,
    "syncfs": 1,
    "sync_file_range": 1,
    "rename": 3,
    "link": 2,
    "symlink": 2,
    "unlink": 2,
    "rmdir": 2,
    "mkdir": 3,
    "ftruncate": 2,
    "truncate": 2,
    "fallocate": 4,
    "sendfile": 2,
    "copy_file_range": 1,
    "mmap": 2,
    "msync": 1,
    "close": 10,
    "read": 1,
    "pread": 2,
    "readv": 1,
    "preadv": 4,
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("program")
    (folder / "calls.c").write_text(_PROGRAM)
    command = ["cc", "-w", "-O0", "-U_FORTIFY_SOURCE", str(folder / "calls.c"), "-o", str(folder / "calls")]
    subprocess.run(command, check=True, timeout=60)
    return folder / "calls"


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    with FaultServer(preload=("pytest", __name__)) as running:
        yield running


def test_the_sources_compile_without_a_warning(tmp_path: Path) -> None:
    folder = Path(__file__).parents[1] / "provers" / "faults"
    sources = [str(path) for path in folder.glob("*.c") if path.name != "tracer.c" or why_no_tracer() is None]
    flags = [*BUILD_FLAGS, "-Wall", "-Wextra", "-Wshadow", "-Werror", "-fPIC", "-fsyntax-only"]
    done = subprocess.run(["cc", *flags, *sources], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_shim_sees_every_call_and_alias(program: Path, tmp_path: Path) -> None:
    outcome = run_program([str(program), str(tmp_path)], root=tmp_path)
    assert outcome.exit_code == 0, outcome.log
    assert {call: outcome.trace.count(call) for call in CALLS} == _COUNTS
    assert all(event.end > event.begin for event in outcome.trace)


@needs_tracer
def test_the_tracer_sees_the_same_calls_and_the_writes_inside_stdio(program: Path, tmp_path: Path) -> None:
    outcome = run_program([str(program), str(tmp_path)], root=tmp_path, via="tracer")
    assert outcome.exit_code == 0, outcome.log
    seen = {call: outcome.trace.count(call) for call in CALLS}
    assert seen == {**_COUNTS, "fwrite": 0, "fflush": 0, "write": _COUNTS["write"] + 1}
    assert outcome.trace.only("write", suffix="/stream")[0].size == 40


@pytest.mark.parametrize("via", ["shim", pytest.param("tracer", marks=needs_tracer)])
def test_events_say_what_was_done(program: Path, tmp_path: Path, via: Any) -> None:
    trace = run_program([str(program), str(tmp_path)], root=tmp_path, via=via, rank=3).trace
    root = os.path.realpath(tmp_path)
    assert {event.rank for event in trace} == {3}
    vectors = trace.only("pwritev", suffix="/a")
    assert [event.offset for event in vectors] == [120, 160, 200, 240]
    assert {(event.size, event.result) for event in vectors} == {(40, 40)}
    read = trace.only(READ_CALLS, suffix="/a")
    assert [event.offset for event in read] == [-1, -1, 40, 80, 120, 160, 200, 240]
    assert {(event.size, event.result) for event in read} == {(40, 40)}
    moves = [(event.path, event.path2) for event in trace.only("rename")]
    assert moves[0] == (f"{root}/creat", f"{root}/renamed")
    assert moves[2] == (f"{root}/again", f"{root}/folder/moved")
    assert trace.only("msync")[0].path == f"{root}/a"
    assert trace.only("mkdir", suffix="/folder")[0].created
    assert [event.created for event in trace.only("open", suffix="/a")] == [True]
    assert trace.only("open", suffix="/a")[0].inode == os.stat(tmp_path / "a").st_ino
    assert trace.only("unlink", suffix="/linked")[0].inode == os.stat(tmp_path / "a").st_ino
    assert trace.only("fsync", suffix="/b")
    assert trace.bytes_written == sum(event.result for event in trace.writes())


@pytest.mark.parametrize("via", ["shim", pytest.param("tracer", marks=needs_tracer)])
@pytest.mark.parametrize("call", sorted(set(CALLS) - {"mmap", "close", "fflush", "fwrite"}))
def test_every_call_can_be_struck_at_its_last_occurrence(program: Path, tmp_path: Path, call: str, via: Any) -> None:
    nth = _COUNTS[call] + (call == "write" and via == "tracer")
    outcome = run_program([str(program), str(tmp_path)], root=tmp_path, faults=[Fault(call, nth, "kill")], via=via)
    assert outcome.killed
    assert outcome.trace.count(call) == nth
    # The call that is struck is the last one, and it was not made.
    assert [event.end for event in outcome.trace.struck] == [0]
    assert outcome.trace.events[-1] is outcome.trace.struck[0]


@pytest.mark.parametrize("call", ["fwrite", "fflush", "close", "mmap"])
def test_streams_and_mappings_can_fail(tmp_path: Path, server: FaultServer, call: str) -> None:
    outcome = server.run_forked(_use_stream, str(tmp_path / "s"), root=tmp_path, faults=[Fault(call, 1, "errno")])
    assert outcome.value() == {**dict.fromkeys(("fwrite", "fflush", "close", "mmap"), 0), call: errno.ENOSPC}


def _use_stream(path: str) -> dict[str, int]:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fopen.restype = libc.fwrite.restype = libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    codes = {}
    stream = ctypes.c_void_p(libc.fopen(path.encode(), b"w+"))
    codes["fwrite"] = 0 if libc.fwrite(b"12345678", 1, 8, stream) == 8 else ctypes.get_errno()
    codes["fflush"] = 0 if libc.fflush(stream) == 0 else ctypes.get_errno()
    mapped = libc.mmap(None, 8, 3, 1, libc.fileno(stream), 0)
    codes["mmap"] = 0 if mapped != ctypes.c_void_p(-1).value else ctypes.get_errno()
    codes["close"] = 0 if libc.fclose(stream) == 0 else ctypes.get_errno()
    return codes
