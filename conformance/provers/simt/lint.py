"""Kernels written for ``simt.h`` reach threads and memory through it alone; what goes around it is not proven.

Reads text, laid out by clang-format with pointers to the left: ``T* p`` declares, ``*p`` follows, ``a * b`` multiplies.
Files that include ``simt.h`` are kernels; launchers, which hand pointers over, are ``.cu`` and ``.cpp`` files.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["is_kernel", "violations"]

_INCLUDES = re.compile(r'#include\s*[<"](?:\w+/)*simt\.h[>"]')
_COMMENT_OR_TEXT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.DOTALL)
_FORBIDDEN = (
    (re.compile(r"\b(?:threadIdx|blockIdx|blockDim|gridDim|warpSize)\b"), "a number of threads"),
    (re.compile(r"\b__(?:sync|shfl|ballot|any_|all_|activemask|match|reduce|threadfence|ld|st)\w*"), "an intrinsic"),
    (re.compile(r"\b__(?:builtin_\w+|ffs|popc|clz)\b"), "a function of one compiler"),
    (re.compile(r"\b__(?:shared|global|device|constant|host)__\b|__CUDA\w+"), "a word of CUDA"),
    (re.compile(r"\b(?:atomic[A-Z]\w*|cuda::|cooperative_groups|cub::)"), "an access of the device's own library"),
    (re.compile(r"\b(?:asm|volatile|reinterpret_cast|const_cast|memcpy|memset|memmove|malloc|new)\b"), "a way around"),
    (re.compile(r"->"), "a pointer that is followed"),
    (re.compile(r"(?:^|[=(,;{}!|?:+\-/<>&\s])\*\w", re.MULTILINE), "a pointer that is followed"),
    (re.compile(r"\b\w+(?:<[^<>;]*>)?\*+(?=[\s)>,&])"), "a pointer that is declared"),
    (re.compile(r"\.data\(\)"), "a pointer that is asked for"),
)  # fmt: skip
_ARRAY = re.compile(r"\b[\w:]+(?:<[^;{}()]*>)?\s+(\w+)\[[^\]]*\](?=\s*(?:=|;|\{|,|\[))")
_SUBSCRIPT = re.compile(r"(\.?)\b(\w+)\[")
# Elements of a simt::Vector, which is a value.
_VALUES = "values"


def is_kernel(text: str) -> bool:
    """Whether a header is written for ``simt.h``."""
    return _INCLUDES.search(text) is not None


def _blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", found.group())


def violations(text: str) -> Iterator[tuple[int, str]]:
    """(line, what) for each place of a kernel's source that goes around ``simt.h``."""
    code = re.sub(r"^#.*$", _blank, _COMMENT_OR_TEXT.sub(_blank, text), flags=re.MULTILINE)
    found = [(match.end(), what) for pattern, what in _FORBIDDEN for match in pattern.finditer(code)]
    arrays = {match.group(1) for match in _ARRAY.finditer(code)}
    for match in _SUBSCRIPT.finditer(code):
        is_member, name = bool(match.group(1)), match.group(2)
        if name != _VALUES and (is_member or name not in arrays):
            found.append((match.start(), f"an element of {name}, which is no array of this file"))
    lines = text.splitlines()
    for place, what in sorted(found):
        number = code.count("\n", 0, place) + 1
        yield number, f"{what}: {lines[number - 1].strip()}"


def main(names: Iterable[str]) -> int:
    """Prints one line per violation in those of the files that are kernels; returns 1 if there is any."""
    has_any = False
    for name in names:
        text = Path(name).read_text(encoding="utf-8")
        if Path(name).suffix != ".h" or not is_kernel(text):
            continue
        for number, what in violations(text):
            has_any = True
            sys.stdout.write(f"{name}:{number}: a kernel goes around simt.h, {what}\n")
    return 1 if has_any else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
