"""Options of an offloader, refused before anything is taken over."""

from __future__ import annotations

import math

from torch.optim import Optimizer

from twinproof.errors import ConfigError
from twinproof.offload.cpu_step import check_cpu_step

__all__ = ["check_options", "either"]


def check_options(
    optimizer: Optimizer, fraction: float, chunk_bytes: int, slots: int, step_device: str, release: str | None
) -> None:
    """Refuse values that mean nothing, and pairs of them that contradict each other. Raises ConfigError."""
    if not (isinstance(fraction, (int, float)) and math.isfinite(fraction) and 0 <= fraction <= 1):
        raise ConfigError("not a fraction", got=fraction, expected="0 to 1", where="fraction")
    for name, value, least in (("chunk_bytes", chunk_bytes, 0), ("slots", slots, 1)):
        if type(value) is not int or value < least:
            raise ConfigError("not a count", got=value, expected=f"an int >= {least}", where=name)
    if step_device not in ("device", "cpu"):
        raise ConfigError("no place to step", got=step_device, expected="device or cpu", where="step_device")
    if release not in (None, "at_offload", "on_request"):
        raise ConfigError("no moment", got=release, expected="at_offload or on_request", where="release")
    if step_device == "cpu":
        check_cpu_step(optimizer)
        if release == "on_request":
            raise ConfigError(
                "states never come to the device", got="on_request", expected="at_offload", where="step_device='cpu'"
            )


def either(name: str, value: bool, other_name: str, other: bool | None) -> bool:
    """A flag that has two names. Raises ConfigError when both are given and contradict each other."""
    if other is None:
        return value
    if not value and other:
        raise ConfigError(f"{name} and {other_name} are one flag", got=(value, other), where="offload")
    return other
