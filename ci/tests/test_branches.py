"""The judge of branches, on a toy: what gcov counts, what a list may say, and what each difference is called."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_TOY = """#include <stdexcept>
namespace {
int twice(int n) {
  if (n < 0) throw std::runtime_error("negative");
  return 2 * n;
}
template <typename T>
int kind(T n) {
  if (n > 3) return 1;
  return 0;
}
}  // namespace
int main(int count, char**) {
  int sum = 0;
  for (int i = 0; i < count; i++) sum += twice(i);
  return sum + kind(count) + kind(5.0) > 100;
}
"""
_FILE = "fastimpl/csrc/toy/toy.cpp"


@pytest.fixture(name="branches", scope="module")
def _branches(program: Callable[[str], Any]) -> Any:
    return program("branches")


@pytest.fixture(name="root", scope="module")
def _root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree with a toy that was compiled with counters and has run once."""
    root = tmp_path_factory.mktemp("tree")
    source, build = root / _FILE, root / "build"
    source.parent.mkdir(parents=True)
    build.mkdir()
    source.write_text(_TOY)
    flags = ["-O1", "-fno-inline", "--coverage", "-fprofile-abs-path"]
    subprocess.run(["g++", *flags, "-c", source, "-o", "toy.o"], cwd=build, check=True)
    subprocess.run(["g++", "--coverage", "toy.o", "-o", "toy"], cwd=build, check=True)
    subprocess.run(["./toy"], cwd=build, check=True)
    return root


def _never(branches: Any, root: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = branches.never_taken(branches.merged(branches.read_counters(root / "build"), root), root)
    return found


def test_ways_that_nothing_took_are_found_and_those_of_exceptions_are_none(branches: Any, root: Path) -> None:
    never = {place: len(ways) for place, ways in _never(branches, root).items()}
    # No number was negative. Of the template one copy went one way and the other the other: both are taken.
    assert never == {(_FILE, 'if (n < 0) throw std::runtime_error("negative");'): 1}


def test_ways_of_calls_are_left_out(branches: Any) -> None:
    def branch(count: int, *, falls: bool = False, throws: bool = False) -> dict[str, Any]:
        return {"count": count, "fallthrough": falls, "throw": throws}

    call = [branch(7, falls=True), branch(0, throws=True)]
    assert branches.ways_of([*call, branch(3, falls=True), branch(4), *call]) == [3, 4]
    assert branches.ways_of([branch(1), branch(2), branch(0)]) == [1, 2, 0]
    assert branches.ways_of([branch(0, throws=True), branch(5)]) == [5]


def test_copies_that_are_inlined_are_one(branches: Any) -> None:
    assert branches.folded({2: [1, 0], 6: [0, 0, 0, 4, 0, 0]}) == {2: [1, 4]}
    assert branches.folded({2: [1, 0], 3: [5, 0, 0], 4: [0, 0, 0, 0]}) == {2: [1, 0], 3: [5, 0, 0]}
    # Where the line says what one copy has, all copies are one.
    assert branches.folded({4: [0, 0, 0, 7], 6: [1, 0, 0, 0, 0, 0]}, 2) == {2: [1, 7]}
    assert branches.folded({3: [0, 0, 7]}, 2) == {3: [0, 0, 7]}
    # One way alone is what is left of a branch beside an exception: nothing is its multiple.
    assert branches.folded({0: [], 1: [0], 2: [3, 0]}) == {0: [], 1: [0], 2: [3, 0]}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("if (is_first) {", 1),
        ("for (int64_t i = 0; i < count; ++i) {", 1),
        ("if (a == b && (c || d)) return;", 3),
        ("return a > b ? a : b;", 1),
        ("add_row(sum, g, count, is_first);", 0),
        ("if constexpr (kType == Float::kHalf) {", 0),
        ("} while (!done);", 1),
        ("void take(Body&& body) {", 0),
        ('STD_TORCH_CHECK(a >= 0 && b >= 0, "a: got ", a);', 2),
        ("for (const auto& table : store.tables) take(table);", 0),
    ],
)
def test_decisions_of_a_line(branches: Any, text: str, count: int) -> None:
    assert branches.decisions_of(text) == count
    assert branches.decides(text) == (count > 0)
    assert branches.decides("switch (kind) {")


def _way(branches: Any, line: int, index: int) -> Any:
    return branches.Way(line, 2, index)


def test_a_new_way_a_stale_entry_and_what_varies(branches: Any) -> None:
    place, other = ("a.h", "if (x)"), ("a.h", "if (y)")
    entry = branches.Unreachable("a.h", "if (x)", 1, "defence", "x is never null")
    listed = branches.Listed([entry], {other: 2}, 2)
    both = [_way(branches, 9, 0), _way(branches, 9, 1)]
    assert branches.judge({place: both[:1], other: both}, listed) == []
    new = branches.judge({place: both, other: both}, listed)
    assert new == ["new: a.h:9: 2 ways never taken, 1 listed\n    if (x)"]
    stale = branches.judge({place: both[:1], other: both[:1]}, listed)
    assert stale == ["stale: a.h: 1 ways never taken, 2 listed\n    if (y)"]
    assert branches.judge({other: both}, listed) == ["stale: a.h: 0 ways never taken, 1 listed\n    if (x)"]
    unlisted = branches.judge({place: both[:1], other: both, ("b.h", "z"): both[1:]}, listed)
    assert [each.partition(" ")[0] for each in unlisted] == ["new:"]
    varies = branches.Unreachable("a.h", "if (x)", 1, "defence", "only under a race", sometimes=True)
    for ways in (both[:1], []):
        assert branches.judge({place: ways}, branches.Listed([varies])) == []
    assert branches.judge({place: both}, branches.Listed([varies])) != []


def test_lists_that_are_refused(branches: Any, root: Path, tmp_path: Path) -> None:
    good: dict[str, Any] = {"file": _FILE, "line": "int sum = 0;", "ways": 1, "kind": "defence", "reason": "because"}
    crossed = {_FILE: {"return 0;": 2}}
    path = tmp_path / "list.json"

    def read(unreachable: Any, not_crossed: Any, total: int) -> Any:
        text = {"gcc": 12, "unreachable": unreachable, "not_crossed_total": total, "not_crossed": not_crossed}
        path.write_text(json.dumps(text))
        return branches.read_list(path, root)

    assert read([good], crossed, 2).not_crossed == {(_FILE, "return 0;"): 2}
    for unreachable, not_crossed, total, words in (
        ([{**good, "line": "int sum = 1;"}], {}, 0, "has no line"),
        ([{**good, "file": "gone.cpp"}], {}, 0, "has no line"),
        ([], {_FILE: {"return 7;": 1}}, 1, "has no line"),
        ([{**good, "reason": " "}], {}, 0, "needs a reason"),
        ([{**good, "kind": "whatever"}], {}, 0, "needs a reason and a kind"),
        ([{**good, "why": "x"}], {}, 0, "why"),
        ([good, good], {}, 0, "twice"),
        ([{**good, "ways": 0}], {}, 0, "no ways"),
        ([], crossed, 3, "the sum 2"),
    ):
        with pytest.raises(SystemExit, match=words):
            read(unreachable, not_crossed, total)


def test_what_is_not_crossed_may_only_fall(branches: Any, root: Path, tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    place = (_FILE, "return 0;")
    ways = [_way(branches, 10, 0), _way(branches, 10, 1)]
    assert branches.record({place: ways}, branches.Listed(), path) == 2
    listed = branches.read_list(path, root)
    assert branches.judge({place: ways}, listed) == []
    with pytest.raises(SystemExit, match="may only fall"):
        branches.record({place: ways, (_FILE, "int sum = 0;"): ways}, listed, path)
    assert branches.record({place: ways[:1]}, listed, path) == 1
    entry = branches.Unreachable(*place, 1, "defence", "because")
    assert branches.record({place: ways[:1]}, branches.Listed([entry], {}, 1), path) == 0
    assert branches.read_list(path, root).unreachable == [entry]


def test_no_counters_are_an_error(branches: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no counters"):
        list(branches.read_counters(tmp_path))


def test_the_committed_list_is_in_order(branches: Any) -> None:
    listed = branches.read_list(branches.LISTED, branches.ROOT)
    assert sum(listed.not_crossed.values()) == listed.not_crossed_total


def test_a_list_of_another_compiler_is_not_compared(
    branches: Any, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(branches, "ROOT", root)
    path = tmp_path / "list.json"
    words = [str(root / "build"), "--list", str(path)]
    assert branches.main(words) == 1
    assert "1 ways never taken, 0 listed" in capsys.readouterr().out
    assert branches.main([*words, "--record"]) == 0
    assert branches.main(words) == 0
    text = json.loads(path.read_text())
    assert text["not_crossed_total"] == 1
    path.write_text(json.dumps({**text, "gcc": text["gcc"] + 1}))
    capsys.readouterr()
    assert branches.main(words) == 1
    assert "nothing can be compared" in capsys.readouterr().out
