"""A planted bug that is one changed expression: it is there for whoever imported the function, and gone afterwards."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from conformance.harness import mutated, patched


def _doubled(n: int, *, by: int = 2) -> int:
    """``n`` times ``by``."""
    return n * by


_imported_elsewhere = _doubled


class _Base:
    def seen(self) -> int:
        return 3


class _Subject(_Base):
    __hidden = 5

    def seen(self) -> int:
        return super().seen() + self.__hidden

    @property
    def size(self) -> int:
        return 1 + 1

    @functools.cached_property
    def kept(self) -> int:
        return 2 + 2

    @staticmethod
    def fixed() -> int:
        return 3 + 3

    @classmethod
    def named(cls) -> str:
        return cls.__name__ + "!"


def _made(extra: int) -> Any:
    def inner(n: int) -> int:
        return n + extra

    return inner


class _Holder:
    inner = staticmethod(_made(1))


def _at(name: str) -> str:
    return f"{__name__}:{name}"


def test_everybody_has_the_mutant_until_it_is_gone() -> None:
    patch = mutated(_at("_doubled"), "n * by", "n + by")
    for _ in range(2):
        with patch():
            assert (_doubled(5), _imported_elsewhere(5), _doubled(5, by=3)) == (7, 7, 8)
        assert (_doubled(5), _imported_elsewhere(5)) == (10, 10)
    with pytest.raises(RuntimeError), patch():
        raise RuntimeError("a test fails")
    assert _doubled(5) == 10


@pytest.mark.parametrize(
    ("name", "before", "after", "value", "mutant"),
    [
        ("seen", "() + self", "() - self", 8, -2),
        ("size", "1 + 1", "1 + 2", 2, 3),
        ("kept", "2 + 2", "2 * 3", 4, 6),
        ("fixed", "3 + 3", "3 - 3", 6, 0),
        ("named", '"!"', '"?"', "_Subject!", "_Subject?"),
    ],
)
def test_methods_of_every_kind(name: str, before: str, after: str, value: Any, mutant: Any) -> None:
    def got() -> Any:
        found = getattr(_Subject(), name)
        return found() if callable(found) else found

    with mutated(_at(f"_Subject.{name}"), before, after)():
        assert got() == mutant
    assert got() == value


def test_a_mutant_is_a_planted_bug() -> None:
    bug = patched(
        "It adds.", mutated("twinproof.errors:TwinproofError", "a", "b"), kills="KV-001", id="sum-for-product"
    ).named("x", __name__)
    assert bug.paths == ("twinproof.errors:TwinproofError",)
    assert bug.targets == ("refimpl", "fastimpl")
    assert bug.shared
    gone = patched("It adds.", mutated(_at("gone"), "a", "b"), kills="KV-001").named("x", __name__)
    assert f"{_at('gone')} names nothing" in gone.unresolved()[0]


@pytest.mark.parametrize(
    ("path", "before", "after", "message"),
    [
        (_at("_doubled"), "n / by", "n + by", "expected 'n / by' once in its source, found 0"),
        (_at("_doubled"), "by", "n", "once in its source, found 3"),
        (_at("_Subject"), "3", "4", "expected a function, got type"),
        (_at("_Holder.inner"), "n + extra", "n - extra", "made inside another function"),
    ],
)
def test_what_is_not_there_is_not_planted(path: str, before: str, after: str, message: str) -> None:
    with pytest.raises(ValueError, match=message), mutated(path, before, after)():
        pass


def test_malformed_mutants() -> None:
    with pytest.raises(ValueError, match="expected 'module:function'"):
        mutated("module", "a", "b")
    with pytest.raises(ValueError, match="a mutant changes something"):
        mutated("a:b", "a", "a")
