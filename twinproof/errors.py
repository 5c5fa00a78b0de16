"""The errors of both implementations: one named class per way to be wrong.

Every error says what was got, what was expected and where, as text and as attributes, and survives pickling,
because torch's distributed checkpoint gathers exceptions across ranks.
"""

from __future__ import annotations

import pickle
from typing import Any

__all__ = [
    "CapacityError",
    "CheckpointExistsError",
    "ConfigError",
    "CorruptionError",
    "DeltaBaseError",
    "DetachedStoreError",
    "DistributedError",
    "FormatError",
    "IdRangeError",
    "LengthTypeError",
    "MissingCheckpointError",
    "MissingKeyError",
    "NoDataError",
    "OffloadConflictError",
    "PipelineError",
    "PlanError",
    "ShapeError",
    "StaleMasterError",
    "StorageError",
    "StoreClosedError",
    "TwinproofError",
    "UnstorableError",
    "UnsupportedError",
    "VersionError",
]


# What the system says in an OSError.
_SYSTEM = ("errno", "strerror", "filename")


def _rebuild(cls: type[TwinproofError], message: str, said: dict[str, Any]) -> TwinproofError:
    return cls(message, **said)


class TwinproofError(Exception):
    """Base of every error that this project raises on purpose.

    Args:
        message: one sentence that names the fault.
        got: the value found; None where nothing was there.
        expected: what would have been right.
        where: file, tensor, rank or argument at fault.
    """

    # None of them has a default: a refusal that forgets one is found by the type checker, and by whoever provokes it.
    def __init__(self, message: str, *, got: Any, expected: Any, where: Any) -> None:
        self.message, self.got, self.expected, self.where = message, got, expected, where
        super().__init__(f"{message}; got: {got}; expected: {expected}; where: {where}")

    def __reduce__(self) -> tuple[Any, ...]:
        # Ranks send errors to each other: whoever asks for the errno must find it there as well.
        system = {name: getattr(self, name) for name in _SYSTEM} if isinstance(self, OSError) else None
        said = {"got": self.got, "expected": self.expected, "where": self.where}
        return _rebuild, (type(self), self.message, said), system


class ConfigError(TwinproofError, ValueError):
    """An argument, or a combination of arguments, that cannot be honoured."""


class PlanError(TwinproofError, ValueError):
    """A state dict that cannot be laid out: gaps, overlaps, missing names, ranks that disagree."""


class UnsupportedError(TwinproofError, TypeError):
    """A value that the format cannot hold: a non-tensor leaf, a dtype without a safetensors name, a meta tensor."""


class UnstorableError(UnsupportedError, ValueError):
    """A value that no safetensors file can hold; that library says ValueError."""


class NoDataError(UnstorableError, RuntimeError):
    """A tensor on the meta device, which has no data to store; the safetensors library says RuntimeError."""


class FormatError(TwinproofError, ValueError):
    """A file or index that is not well-formed."""


class CorruptionError(TwinproofError, ValueError):
    """Files that are each well-formed but do not make up the checkpoint they claim to be."""


class MissingKeyError(TwinproofError, KeyError):
    """A name that was asked for and is not there; lists all of them."""

    __str__ = Exception.__str__


class MissingCheckpointError(TwinproofError, FileNotFoundError):
    """A checkpoint that was asked for and is not there."""

    __str__ = Exception.__str__


class CheckpointExistsError(TwinproofError, FileExistsError):
    """A save that would replace a checkpoint, with ``overwrite=False``."""

    __str__ = Exception.__str__


class StorageError(TwinproofError, OSError):
    """The file system refused: carries the original ``errno`` in ``got``."""

    __str__ = Exception.__str__


class DistributedError(TwinproofError, RuntimeError):
    """Another rank failed or died, or ranks disagree; carries the first cause."""


class OffloadConflictError(TwinproofError, RuntimeError):
    """Two offloaders for one optimizer, or one where nothing can be offloaded; names both sides."""


class StaleMasterError(TwinproofError, RuntimeError):
    """A parameter was written behind its master's back; the next step would undo it."""


class ShapeError(TwinproofError, ValueError):
    """A tensor of the wrong rank, width, length, dtype, device or stride."""


class LengthTypeError(ShapeError, AssertionError):
    """Lengths or offsets that are no integers; an AssertionError too, because torchrec's own check is an assertion."""


class CapacityError(TwinproofError, ValueError):
    """One batch with more distinct ids than the store may hold."""


class PipelineError(TwinproofError, RuntimeError):
    """A training pipeline used in a way that it cannot honour, or after a failure that it cannot recover from."""


class IdRangeError(TwinproofError, IndexError):
    """An id outside its table."""


class StoreClosedError(TwinproofError, RuntimeError):
    """A verb of a store or snapshot that was closed."""


class DeltaBaseError(TwinproofError, ValueError):
    """A delta whose base is not what the table was loaded from, or not the part of it that was loaded."""


class DetachedStoreError(TwinproofError, RuntimeError):
    """A view that came from another process and has no rows behind it here."""


class VersionError(FormatError):
    """Files of a format version that this reader does not know."""


def check_flags(**flags: object) -> None:
    """Demand that no flag is text: "false", out of a file of settings, would be true. Raises ConfigError."""
    for name, value in flags.items():
        if isinstance(value, str | bytes):
            raise ConfigError("a flag is no text", got=value, expected="True or False", where=name)


def check_number(value: Any, where: str) -> float:
    """A real number, or a tensor of one, as a float; text that reads as a number is none. Raises ConfigError."""
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except (OverflowError, RuntimeError, TypeError, ValueError):
        pass
    raise ConfigError("not a number", got=value, expected="a real number", where=where)


def check_kind(value: Any, kind: Any, where: str, expected: str) -> None:
    """Demand an object of a class. Raises ConfigError."""
    if not isinstance(value, kind):
        raise ConfigError("not what is taken here", got=type(value).__name__, expected=expected, where=where)


def sendable(error: BaseException | None) -> Any:
    """What a rank sends to others of its error: that, or where it cannot be pickled a DistributedError that names it.

    An exception that cannot be pickled would end an exchange of objects on its own rank, and leave the others waiting.
    """
    if error is None:
        return None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        got = f"{type(error).__name__}: {error}"
        expected = "one that can be pickled"
        told = DistributedError(
            "an error that cannot be sent to other ranks", got=got, expected=expected, where="sendable"
        )
        told.__cause__ = error
        return told
    return error
