"""Other users, groups and mounts, for tests that ask what a save does to them; who cannot have them skips by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["another_group", "as_ordinary_user", "bind_mount", "common_folder"]

# Nobody's, on every Linux.
_UID = _GID = 65534


@contextmanager
def common_folder() -> Iterator[Path]:
    """A folder of an ordinary user that everybody may reach, which pytest's own is not."""
    path = Path(tempfile.mkdtemp(prefix="twinproof-"))
    try:
        if os.geteuid() == 0:
            os.chown(path, _UID, _GID)
        path.chmod(0o755)
        yield path
    finally:
        subprocess.run(["chmod", "-R", "u+rwX", path], check=False)
        shutil.rmtree(path)


@contextmanager
def as_ordinary_user() -> Iterator[None]:
    """Inside, the system refuses this process what it refuses others than root. Does nothing for an ordinary user."""
    if os.geteuid() != 0:
        yield
        return
    groups, gid = os.getgroups(), os.getegid()
    os.setgroups([])
    os.setegid(_GID)
    os.seteuid(_UID)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(gid)
        os.setgroups(groups)


def another_group(path: Path) -> int:
    """Give a folder another group than this process makes files in; its number. Skips where there is none to give."""
    if os.geteuid() == 0:
        group = 2000
    else:
        groups = [each for each in os.getgroups() if each != os.getegid()]
        if not groups:
            pytest.skip("this user is in one group alone, and may give a folder no other")
        group = groups[0]
    os.chown(path, -1, group)
    return group


@contextmanager
def bind_mount(source: Path, target: Path, *, below: Path) -> Iterator[None]:
    """Mount a folder in another place; nothing is mounted below a folder afterwards. Skips where this user may not."""
    if shutil.which("mount") is None:
        pytest.skip("there is no mount command here")
    made = subprocess.run(["mount", "--bind", source, target], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"this user may mount nothing: {made.stderr.strip()}")
    try:
        yield
    finally:
        # Wherever the mount is by now.
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        for point in [line.split(" ")[4] for line in lines]:
            path = point.replace("\\040", " ")
            if Path(path).is_relative_to(below):
                subprocess.run(["umount", path], check=True)
