"""Faults at the surface that is replaced: signatures, names, options, messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conformance.checkpoint.planted.making import both, fast, ref
from conformance.harness import swap, wrap
from twinproof.errors import CorruptionError, DistributedError, TwinproofError


def _taken(*arguments: Any, **options: Any) -> None:
    """Whatever is given."""


def _as_it_is(original: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    original(*arguments, **options)


def _begins_late(original: Callable[..., Any], chunk: Any, dtype: str) -> Any:
    return original(chunk._replace(begin=chunk.begin + 1), dtype)


def _as_text(original: Callable[..., Any], reader: Any, *arguments: Any, **options: Any) -> Any:
    try:
        return original(reader, *arguments, **options)
    except TwinproofError as error:
        if "rank" in options:
            raise
        raise CorruptionError(str(error)) from None


def _blames_another(original: Callable[..., Any], tensor: Any, where: str) -> None:
    try:
        original(tensor, where)
    except TwinproofError as error:
        raise DistributedError("another rank failed", got=str(error)) from None


# Each implementation, where it refuses tensors without memory, and what a bug's name ends in.
PLACES = ((ref, "refimpl.checkpoint", ""), (fast, "fastimpl.checkpoint.writer", "_fast"))

PLANTED = (
    both(
        "signature_of_anything",
        "The writer says that it takes any arguments.",
        ("CKPT-425",),
        wrap("twinproof.checkpoint.dcp:HuggingFaceStorageWriter.__init__", _as_it_is),
    ),
    both(
        "storage_data_off_by_one",
        "What storage_data says of a chunk begins a byte late.",
        ("CKPT-426",),
        wrap("twinproof.checkpoint.catalog:_stored", _begins_late),
    ),
    both(
        "metadata_error_as_text",
        "An error of read_metadata comes without what it was got and expected.",
        ("CKPT-427",),
        wrap("twinproof.checkpoint.dcp:HuggingFaceStorageReader.read_metadata", _as_text),
    ),
    *(
        make(
            f"own_failure_is_another_ranks{suffix}",
            "A tensor that cannot be stored is said to be another rank's failure.",
            ("CKPT-428",),
            wrap(f"{module}:check_storable", _blames_another),
        )
        for make, module, suffix in PLACES
    ),
    *(
        make(
            f"any_backend{suffix}",
            "load_file takes any backend.",
            ("CKPT-429",),
            swap("twinproof.checkpoint.shards:check_backend", _taken),
        )
        for make, _, suffix in PLACES
    ),
)
