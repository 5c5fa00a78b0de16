"""Where processes that this one starts look for packages: where this one does.

A ``python -m`` or ``python -c`` looks into the current folder first. In the root of a tree it would import the packages
there, in the place of those that are installed and that this process judges: a ``fastimpl`` without its library.
"""

from __future__ import annotations

import os
import sys

__all__ = ["search_path"]


def search_path() -> str:
    """The folders of ``sys.path``, in order, as PYTHONPATH has them."""
    # Of a ``python -c`` the first one is the current folder, by an empty name.
    return os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
