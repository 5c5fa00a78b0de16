"""The generator of what a power cut may leave: exactly the states that the model allows, on programs of a few calls."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conformance.provers.faults import FaultServer, Snapshot, power_cut_states, why_no_shim

pytestmark = pytest.mark.skipif(why_no_shim() is not None, reason=str(why_no_shim()))

_EXCHANGE = 2
_HERE = -100
_NEW = b"abcdefgh"


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    with FaultServer(preload=("pytest", __name__)) as running:
        yield running


def _put(path: str, content: bytes = _NEW, *, sync: bool = True) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(descriptor, content)
    if sync:
        os.fsync(descriptor)
    os.close(descriptor)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _careless(root: str) -> None:
    _put(f"{root}/.new", sync=False)
    os.rename(f"{root}/.new", f"{root}/file")


def _synced(root: str) -> None:
    _put(f"{root}/.new")
    os.rename(f"{root}/.new", f"{root}/file")


def _durable(root: str) -> None:
    _synced(root)
    _sync(root)


def _in_place(root: str) -> None:
    descriptor = os.open(f"{root}/file", os.O_WRONLY | os.O_TRUNC)
    os.write(descriptor, _NEW)
    os.fsync(descriptor)
    os.close(descriptor)


def _two_writes(root: str) -> None:
    descriptor = os.open(f"{root}/file", os.O_WRONLY | os.O_CREAT)
    os.pwrite(descriptor, _NEW[4:], 4)
    os.pwrite(descriptor, _NEW[:4], 0)
    os.close(descriptor)


def _two_copies(root: str) -> None:
    _put(f"{root}/source")
    source = os.open(f"{root}/source", os.O_RDONLY)
    descriptor = os.open(f"{root}/file", os.O_WRONLY | os.O_CREAT)
    os.copy_file_range(source, descriptor, 4, 4, 4)
    os.copy_file_range(source, descriptor, 4, 0, 0)
    os.close(descriptor)
    os.close(source)


_OLD = b"OLDOLD"
_HALVES: tuple[set[bytes | None], set[bytes | None]] = (
    {None, b"", _NEW, _NEW[:4], b"\0\0\0\0efgh", b"abcd\0\0\0\0", b"\0\0\0\0ef", b"abcdef", b"ab\0\0efgh"},
    {None, b"", _NEW, _NEW[:4], b"\0\0\0\0efgh", b"abcdef", b"ab\0\0efgh"},
)
# (program, old content or None, the contents that may be there at any instant, and those after it returned).
_CASES: list[tuple[Callable[[str], None], bytes | None, set[bytes | None], set[bytes | None]]] = [
    (_careless, _OLD, {_OLD, b"", _NEW[:4], _NEW}, {_OLD, b"", _NEW[:4], _NEW}),
    (_synced, _OLD, {_OLD, _NEW}, {_OLD, _NEW}),
    (_durable, _OLD, {_OLD, _NEW}, {_NEW}),
    (_durable, None, {None, _NEW}, {_NEW}),
    # Nothing but the truncation; then the write without it, over what was there; half of it; all, synced at last.
    (_in_place, _OLD, {_OLD, b"", _NEW, _NEW[:4], _NEW[:4] + _OLD[4:]}, {_NEW}),
    (_two_writes, None, *_HALVES),
    (_two_copies, None, *_HALVES),
]


@pytest.mark.parametrize(
    ("program", "old", "anytime", "returned"), _CASES, ids=lambda value: getattr(value, "__name__", "")
)
def test_one_file(
    server: FaultServer,
    tmp_path: Path,
    program: Callable[[str], None],
    old: bytes | None,
    anytime: set[bytes | None],
    returned: set[bytes | None],
) -> None:
    if old is not None:
        (tmp_path / "file").write_bytes(old)
    before = Snapshot.of(tmp_path)
    outcome = server.run_forked(program, str(tmp_path), root=tmp_path)
    outcome.value()
    states = list(power_cut_states(outcome.trace, before, Snapshot.of(tmp_path), below=str(tmp_path / "file")))
    path = str(tmp_path / "file")
    assert {state.files.get(path) for state in states} - anytime == set()
    assert {state.files.get(path) for state in states if state.returned} == returned
    assert {_OLD if old else None, _NEW} <= {state.files.get(path) for state in states}


def _staged(root: str, sync: bool, parent: bool) -> None:
    """A folder is filled and exchanged with the old one."""
    os.mkdir(f"{root}/.hidden")
    _put(f"{root}/.hidden/a", sync=sync)
    _put(f"{root}/.hidden/index")
    _sync(f"{root}/.hidden")
    libc = ctypes.CDLL(None)
    assert libc.renameat2(_HERE, f"{root}/.hidden".encode(), _HERE, f"{root}/ck".encode(), _EXCHANGE) == 0
    if parent:
        _sync(root)
    for name in ("a", "index"):
        os.unlink(f"{root}/.hidden/{name}")


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("parent", [True, False])
def test_a_folder(server: FaultServer, tmp_path: Path, sync: bool, parent: bool) -> None:
    root = tmp_path / "root"
    (root / "ck").mkdir(parents=True)
    for name in ("a", "index"):
        (root / "ck" / name).write_bytes(_OLD)
    before = Snapshot.of(root)
    outcome = server.run_forked(_staged, str(root), sync, parent, root=root)
    outcome.value()
    states = list(power_cut_states(outcome.trace, before, Snapshot.of(root), below=str(root / "ck")))
    found = [tuple(state.files[f"{root}/ck/{name}"] for name in ("a", "index")) for state in states]
    torn = {(b"", _NEW), (_NEW[:4], _NEW)} if not sync else set()
    assert set(found) == {(_OLD, _OLD), (_NEW, _NEW), *torn}
    ended = {pair for pair, state in zip(found, states, strict=True) if state.returned}
    assert ended == {(_NEW, _NEW), *torn, *(() if parent else {(_OLD, _OLD)})}
    states[0].put(tmp_path / "made")
    assert (tmp_path / "made" / "a").read_bytes() == found[0][0]
