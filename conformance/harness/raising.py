"""Expecting errors without being satisfied by the wrong one, or by one that never came.

``pytest.raises`` reports a missing error in a way that the kill matrix cannot tell from a crash. Distributed
checkpointing also hides the error that matters inside ``CheckpointException``, a ``BaseException`` with one failure per
rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from conformance.harness.compare import Mismatch, assert_same_tensor
from twinproof.errors import TwinproofError

__all__ = ["Raised", "assert_refused", "errors_inside", "raises", "succeeds"]

# A comparison inside the block has already said what is wrong; the others are not the block's answer.
_NEVER_AN_ANSWER = (
    Mismatch,
    KeyboardInterrupt,
    SystemExit,
    GeneratorExit,
    pytest.skip.Exception,
    pytest.exit.Exception,
)
# pytest's folder of one test, in a message.
_FOLDER_OF_A_TEST = re.compile(r"[^\s'\"(]*/pytest-of-[^/\s]+/pytest-\d+/[^/\s'\"):;,]+")


@dataclass
class Raised:
    """What :func:`raises` caught: ``error`` is of the expected class, ``outer`` is what was raised around it."""

    error: BaseException | None = None
    outer: BaseException | None = None


def errors_inside(error: BaseException) -> Iterator[BaseException]:
    """Every exception that ``error`` carries, itself first: causes, groups, failures per rank; no implicit contexts.

    Sources: ``CheckpointException.failures`` (rank -> (exception, stack)), ``BaseExceptionGroup.exceptions``, and
    ``RankError.errors`` (rank -> exception).
    """
    seen: set[int] = set()
    queue: list[BaseException] = [error]
    while queue:
        current = queue.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        for table in (getattr(current, "failures", None), getattr(current, "errors", None)):
            if isinstance(table, dict):
                values = [value[0] if isinstance(value, tuple) and value else value for value in table.values()]
                queue += [value for value in values if isinstance(value, BaseException)]
        group = getattr(current, "exceptions", ())
        if isinstance(group, tuple | list):
            queue += [value for value in group if isinstance(value, BaseException)]
        if current.__cause__ is not None:
            queue.append(current.__cause__)


class _Raises(AbstractContextManager[Raised]):
    def __init__(self, classes: tuple[type[BaseException], ...], mentions: tuple[str, ...], where: str) -> None:
        self._classes, self._mentions, self._where = classes, mentions, where
        self._caught = Raised()

    def __enter__(self) -> Raised:
        return self._caught

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        __tracebackhide__ = True
        wanted = " or ".join(cls.__name__ for cls in self._classes)
        if self._mentions:
            wanted += f" mentioning {', '.join(self._mentions)}"
        if error is None:
            raise Mismatch("no error was raised", got="no error", expected=wanted, where=self._where)
        if isinstance(error, _NEVER_AN_ANSWER):
            return False
        self._caught.outer = error
        candidates = [inner for inner in errors_inside(error) if isinstance(inner, self._classes)]
        fitting = [inner for inner in candidates if not self._absent(inner)]
        if not fitting:
            shown = (candidates or [error])[0]
            message = "another error was raised"
            if candidates:
                message = f"the error does not mention {', '.join(map(repr, self._absent(shown)))}"
            got = f"{type(shown).__name__}: {shown}"
            raise Mismatch(message, got=got, expected=wanted, where=self._where) from error
        told = [inner for inner in fitting if not isinstance(inner, TwinproofError) or _says_all(inner)]
        if not told:
            message = "the error says no where, or nothing that was expected"
            raise Mismatch(message, got=str(fitting[0]), expected=wanted, where=self._where)
        self._caught.error = told[0]
        return True

    def _absent(self, error: BaseException) -> list[str]:
        # The folder of a test has numbers and the test's name in it, which an error need not have meant.
        message = str(error)
        said = _FOLDER_OF_A_TEST.sub("", message)
        return [text for text in self._mentions if text not in (message if "/" in text else said)]


def _says_all(error: TwinproofError) -> bool:
    return error.where is not None and error.expected is not None


def raises(
    error_class: type[BaseException] | tuple[type[BaseException], ...],
    *,
    mentions: Iterable[str] = (),
    where: str = "",
) -> _Raises:
    """Demand that the block raises ``error_class``, with every string of ``mentions`` in its message.

    The class is looked for in the raised exception, its causes, and the failures of torch's ``CheckpointException``.
    One of our own named errors has to say where, and what was expected.

    Raises:
        Mismatch: when nothing or another class is raised, the message lacks a mention, or ours does not say all.
        TypeError: when ``mentions`` is a string, whose letters would be looked for.
    """
    if isinstance(mentions, str):
        raise TypeError(f"mentions must be a collection of strings, got the string {mentions!r}")
    return _Raises(error_class if isinstance(error_class, tuple) else (error_class,), tuple(mentions), where)


@contextmanager
def succeeds(what: str, where: str) -> Iterator[None]:
    """Turn any error inside into a mismatch: here it is an answer to the question, not an accident of the test."""
    try:
        yield
    except (Mismatch, KeyboardInterrupt, SystemExit, pytest.skip.Exception):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        got = f"{type(error).__name__}: {error}"
        raise Mismatch(f"{what} fails", got=got, expected="no error", where=where) from error


def assert_refused(operator: Callable[..., object], arguments: Sequence[Any], *, where: str) -> None:
    """The operator MUST raise RuntimeError, and leave every tensor among its arguments, lists included, as it was."""
    tensors = [value for value in tree_leaves(list(arguments)) if isinstance(value, torch.Tensor)]
    before = [tensor.clone() for tensor in tensors]
    with raises(RuntimeError, where=where):
        operator(*arguments)
    for number, (tensor, old) in enumerate(zip(tensors, before, strict=True)):
        assert_same_tensor(tensor, old, where=f"tensor {number} after {where}")
