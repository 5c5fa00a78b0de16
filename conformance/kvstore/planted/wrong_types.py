"""Faults that ``test_wrong_types`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault
from twinproof.errors import ConfigError


@fault(kills="KV-230", at="twinproof.kvstore.disk:check_store")
def argument_not_named(original: Any, store: Any) -> None:
    """What is no store is refused without the argument that it was given for."""
    try:
        original(store)
    except ConfigError as error:
        raise ConfigError(error.message, got=error.got) from None
