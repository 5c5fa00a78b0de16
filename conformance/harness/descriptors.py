"""Few file descriptors, as in a process that has many files open."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["descriptors_left"]


@contextmanager
def descriptors_left(count: int) -> Iterator[int]:
    """This process may open so many files more; gives its limit meanwhile."""
    used = {int(name) for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")}
    limit = [number for number in range(len(used) + count + 1) if number not in used][count]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield limit
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
