"""What ``ci/test`` leaves to the night is there: a name that nobody has would leave out nothing, in silence."""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def _names() -> set[str]:
    """Planted bugs and tests of all components."""
    found: set[str] = set()
    for path in _ROOT.glob("conformance/*/planted/*.py"):
        found.update(re.findall(r"^(?:def )?(\w+)(?:\(| = patched\()", path.read_text(), re.M))
    for path in _ROOT.glob("conformance/*/test_*.py"):
        found.update(re.findall(r"^def (test_\w+)\(", path.read_text(), re.M))
        found.add(path.stem)
    return found


def test_every_word_is_of_a_planted_bug_or_a_test() -> None:
    lines = (_ROOT / "ci/planted_at_night").read_text().splitlines()
    words = [line for line in lines if not line.startswith("#")]
    names = _names()
    assert len(names) > 2000
    assert len(words) == len(set(words))
    assert all(re.fullmatch(r"\w+", word) for word in words)
    assert [word for word in words if not any(word in name for name in names)] == []
