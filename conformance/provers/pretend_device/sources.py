"""What CUDA launchers do on the host, read from their sources: which operators there are, their waits and uploads.

A launcher that waits inside of C++ cannot be seen from Python. The sources say it: each call of a function is followed,
and every place that synchronises a stream or copies host memory to the device counts once. A loop counts once too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["Launcher", "launchers_of"]

_WAITS = re.compile(r"\bcuda(?:Stream|Event|Device)Synchronize\(")
_UPLOADS = re.compile(r"\bcudaMemcpyHostToDevice\b")
_HEAD = re.compile(r"^[ \t]*(?:[A-Za-z_][\w:<>,&* ]*[ &*])?(\w+)\(", re.MULTILINE)
_REGISTRATIONS = re.compile(r"STABLE_TORCH_LIBRARY_IMPL\((\w+), CUDA, m\) \{(.*?)^\}", re.MULTILINE | re.DOTALL)
_IMPL = re.compile(r'm\.impl\("(\w+)",\s*TORCH_BOX\(&(\w+)\)\)')
_KEYWORDS = {"if", "for", "while", "switch", "return", "catch", "sizeof"}


@dataclass(frozen=True)
class Launcher:
    """One operator's CUDA launcher: how many places in it wait for the device, and how many upload host memory."""

    wait_count: int
    upload_count: int


def _closing(text: str, at: int) -> int:
    """The place of the bracket that closes the one at ``at``, or -1."""
    pairs = {"(": ")", "{": "}"}
    depth, opening, closing = 0, text[at], pairs[text[at]]
    for place in range(at, len(text)):
        depth += (text[place] == opening) - (text[place] == closing)
        if depth == 0:
            return place
    return -1


def _functions(text: str) -> Iterator[tuple[str, str]]:
    """(name, body) of every function that is defined in the text."""
    for head in _HEAD.finditer(text):
        if head.group(1) in _KEYWORDS:
            continue
        end = _closing(text, head.end() - 1)
        opening = re.compile(r"\s*(?:const\s*)?(?::[^;{]*(?:\{\})?[^;{]*)?\{").match(text, end + 1) if end > 0 else None
        if opening is not None:
            begin = opening.end() - 1
            yield head.group(1), text[begin : _closing(text, begin)]


def _without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*", "", text)


def _places(pattern: re.Pattern[str], name: str, bodies: dict[str, list[str]], above: tuple[str, ...] = ()) -> int:
    """How many places match in the function and in what it calls."""
    count = 0
    for body in bodies[name]:
        count += len(pattern.findall(body))
        for called in re.findall(r"\b(\w+)(?:<[\w:, ]*>)?\(", body):
            if called in bodies and called not in (*above, name):
                count += _places(pattern, called, bodies, (*above, name))
    return count


@cache
def launchers_of(folder: Path) -> dict[str, Launcher]:
    """``library::operator`` -> its launcher, of the ``.cu`` files below the folder; empty where there are none."""
    headers = [_without_comments(path.read_text()) for path in sorted(folder.rglob("*.cuh"))]
    found: dict[str, Launcher] = {}
    for path in sorted(folder.rglob("*.cu")):
        text = _without_comments(path.read_text())
        bodies: dict[str, list[str]] = {}
        for source in (*headers, text):
            for name, body in _functions(source):
                bodies.setdefault(name, []).append(body)
        for library, block in _REGISTRATIONS.findall(text):
            for operator, function in _IMPL.findall(block):
                counts = (_places(pattern, function, bodies) for pattern in (_WAITS, _UPLOADS))
                found[f"{library}::{operator}"] = Launcher(*counts)
    return found
