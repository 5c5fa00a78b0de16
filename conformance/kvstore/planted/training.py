"""Faults in steps of the fused optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from conformance.harness import PlantedBug, swap, wrap
from conformance.kvstore.planted.planting import BOTH, _packages
from refimpl import optimizers as formulas
from twinproof.optimizers import OPTIMIZERS


def _told_adam(original: Any, *arguments: Any) -> Any:
    message = original(*arguments)
    is_lamb = message.optimizer == OPTIMIZERS["lamb"].code
    return message._replace(optimizer=OPTIMIZERS["adam"].code) if is_lamb else message


@contextmanager
def _never_scaled() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(swap("refimpl.optimizers:FORMULAS", formulas.FORMULAS | {"lamb": formulas.adam})())
        if "fastimpl" in _packages():
            stack.enter_context(wrap("fastimpl.kvstore.native:_table_message", _told_adam)())
        yield


PLANTED = (PlantedBug("steps_never_scaled", "LAMB steps as Adam does.", ("KV-160",), BOTH, _never_scaled),)
