"""FBGEMM's generated code on the CPU, without its turns between AVX and SSE.

Row-wise Adagrad of fbgemm 1.8 computes the momentum of a row by legacy SSE instructions, while upper halves of AVX
registers are in use. Some processors pay for each turn: a comparison would measure the processor. Here the same
instructions get VEX encodings: same operands, same results, same length.
"""

from __future__ import annotations

import ctypes
import platform
import re
from pathlib import Path

__all__ = ["reencode", "reencoded"]

# Each legacy instruction of a row's momentum, and its VEX encoding.
_VEX = {
    "f30f10c8": "c5f210c8",  # movss xmm1, xmm0
    "f30f58c1": "c5fa58c1",  # addss xmm0, xmm1
    "f30f5ec1": "c5fa5ec1",  # divss xmm0, xmm1
    "f3430f100c10": "c4817a100c10",  # movss xmm1, [r8 + r10]
    "f3430f110410": "c4817a110410",  # movss [r8 + r10], xmm0
    "f30f51c0": "c5fa51c0",  # sqrtss xmm0, xmm0
}
# The sum's two halves are added. Then four bytes vary, the number of columns; it becomes a float, and the mean of
# squares is added to the momentum. What is not in the table above is VEX already, or moves no vector.
_SUM = ["f30f10c8", "c4e37d19c001", "f30f58c1", "488d6424fc", "c70424"]
_MOMENTUM = [
    "c4e279180c24",
    "c5f85bc9",
    "488d642404",
    "f30f5ec1",
    "f3430f100c10",
    "f30f58c1",
    "f3430f110410",
    "f30f51c0",
]


def _bytes_of(instructions: list[str]) -> bytes:
    return bytes.fromhex("".join(instructions))


_LEGACY = re.compile(re.escape(_bytes_of(_SUM)) + b"([\x00-\xff]{4})" + re.escape(_bytes_of(_MOMENTUM)))
_SUM_VEX, _MOMENTUM_VEX = (_bytes_of([_VEX.get(one, one) for one in part]) for part in (_SUM, _MOMENTUM))


def reencoded(code: bytes) -> tuple[bytes, int]:
    """Code of the same length whose momenta are computed without SSE, and how many of its functions had them."""
    return _LEGACY.subn(lambda found: _SUM_VEX + found[1] + _MOMENTUM_VEX, code)


def reencode() -> int:
    """Re-encode what FBGEMM has generated in this process so far; how many functions changed.

    FBGEMM generates a function for each row length, at the first step that needs it. No step may run meanwhile.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return 0
    return sum(_reencode_range(begin, end) for begin, end in _generated_ranges())


def _generated_ranges() -> list[tuple[int, int]]:
    """Memory that can be written and run, and belongs to no file."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, *rest = line.split(maxsplit=5)
        if access.startswith("rwx") and len(rest) == 3:
            begin, end = (int(address, 16) for address in addresses.split("-"))
            ranges.append((begin, end))
    return ranges


def _reencode_range(begin: int, end: int) -> int:
    code, changed_count = reencoded(ctypes.string_at(begin, end - begin))
    if changed_count:
        ctypes.memmove(begin, code, len(code))
    return changed_count
