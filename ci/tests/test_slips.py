"""Slips of statements, and faults written by hand: what is drawn, what it becomes, and who is asked about it."""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]
_TEXT = '''\
def save(rows, *, sync=True):
    """Save."""
    file = open_new(rows, mode="x", bytes_per_row=4)
    with lock:
        file.write(rows)
        self.count = rows
    if sync and rows > 0:
        fsync(file)
    publish(file)
    rows = 0
    return [row for row in rows if row]
'''


@pytest.fixture(name="slips", scope="module")
def _slips(program: Callable[[str], Any]) -> Any:
    return program("slips")


@pytest.fixture(name="by_hand", scope="module")
def _by_hand(program: Callable[[str], Any]) -> Any:
    return program("hand_faults")


def _changed(slips: Any, text: str, operator: str) -> list[list[str]]:
    """By slip: the lines that are no longer there, and, behind them, those that are new."""
    count = sum(slip.operator == operator for slip in slips.slips_of(text))
    made = [slips.with_slip(text, operator, position).splitlines() for position in range(count)]
    before = text.splitlines()
    gone = [[f"-{line.strip()}" for line in before if line not in after] for after in made]
    new = [[f"+{line.strip()}" for line in after if line not in before] for after in made]
    return [*map(list.__add__, gone, new)]


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        (
            "leave-out",
            [
                ["-publish(file)", "+pass"],
                # A parameter that keeps its value is a program still; without ``file`` there is none.
                ["-rows = 0", "+pass"],
                ["-file.write(rows)", "+pass"],
                ["-self.count = rows", "+pass"],
                ["-fsync(file)", "+pass"],
            ],
        ),
        ("no-context", [["-with lock:", "+if True:"]]),
        ("always", [["-if sync and rows > 0:", "+if True:"], [_TEXT.splitlines()[-1].strip()]]),
        ("never", [["-if sync and rows > 0:", "+if False:"]]),
        (
            "operand",
            [["-if sync and rows > 0:", "+if ((rows > 0)):"], ["-if sync and rows > 0:", "+if ((sync)):"]],
        ),
    ],
)
def test_each_slip_changes_what_it_names(slips: Any, operator: str, expected: list[list[str]]) -> None:
    found = _changed(slips, _TEXT, f"slip/{operator}")
    if operator == "always":
        expected = [expected[0], [f"-{expected[1][0]}", "+return [row for row in rows if True]"]]
    assert found == expected


def test_an_argument_goes_with_its_comma(slips: Any) -> None:
    text = "def f():\n    g(a=1, b=2)\n    h(0, c=3)\n    k(d=4)\n"
    made = [slips.with_slip(text, "slip/keyword", position).splitlines()[1:] for position in range(4)]
    assert made == [
        ["    g(b=2)", "    h(0, c=3)", "    k(d=4)"],
        ["    g(a=1)", "    h(0, c=3)", "    k(d=4)"],
        ["    g(a=1, b=2)", "    h(0)", "    k(d=4)"],
        ["    g(a=1, b=2)", "    h(0, c=3)", "    k()"],
    ]


def test_none_is_taken_for_falsy_and_copies_are_left_out(slips: Any) -> None:
    text = "def f(x, y=None):\n    if y is None:\n        return sorted(x)\n"
    text += "    return x.clone() if x is not None else copy.copy(y)\n"
    assert _changed(slips, text, "slip/falsy") == [
        ["-if y is None:", "+if (not (y)):"],
        [
            "-return x.clone() if x is not None else copy.copy(y)",
            "+return x.clone() if ((x)) else copy.copy(y)",
        ],
    ]
    assert [made[-1] for made in _changed(slips, text, "slip/same")] == [
        "+return (x)",
        "+return (x) if x is not None else copy.copy(y)",
        "+return x.clone() if x is not None else (y)",
    ]


def test_neighbours_change_places_where_both_have_an_effect(slips: Any) -> None:
    found = [slip for slip in slips.slips_of(_TEXT) if slip.operator == "slip/swap"]
    # ``file`` is read by what follows; ``rows`` is read by what stands before it is set, and by the return.
    assert [slip.line for slip in found] == [4, 7, 5]
    made = slips.with_slip(_TEXT, "slip/swap", 1).splitlines()
    assert made[6:9] == ["    publish(file)", "    if sync and rows > 0:", "        fsync(file)"]


def test_shortcuts_are_added(slips: Any) -> None:
    """Behind what a function has found, but not where it returns that anyway; what a method asked for is remembered."""
    text = (
        "class Rows:\n    def send(self):\n        ids = self.find(1)\n        count = 1\n        push(ids)\n"
        "    def all(self):\n        rows = sorted(self.rows)\n        return rows\n"
        "def one(rows):\n    first = rows[:1]\n    pair = (1, first)\n    return sum(pair)\n"
    )
    empty = '+if not ({0}.numel() if hasattr({0}, "numel") else {0}): return{1}'
    assert _changed(slips, text, "slip/shortcut") == [[empty.format("first", " first")], [empty.format("ids", "")]]
    assert [made[-1] for made in _changed(slips, text, "slip/remember")] == [
        '+ids = self.__dict__.setdefault("kept_3", self.find(1))',
        '+rows = self.__dict__.setdefault("kept_7", sorted(self.rows))',
    ]


@pytest.mark.night
def test_every_slip_of_the_sources_is_a_program_with_another_meaning(slips: Any, program: Callable[[str], Any]) -> None:
    meaning, count = program("python_code").meaning, Counter[str]()
    for name in ("twinproof/offload/offloader.py", "fastimpl/checkpoint/consolidate.py"):
        text = (_ROOT / name).read_text(encoding="utf-8")
        found = [*slips.slips_of(text)]
        plain, content, lines = meaning(text), text.encode(), text.splitlines()
        for slip in found:
            made = (content[: slip.start] + slip.text.encode() + content[slip.end :]).decode()
            ast.parse(made)
            assert slip.operator == "slip/always" or meaning(made) != plain, (name, slip)
            assert 0 < slip.line <= len(lines)
            count[slip.operator] += 1
    names = ("leave-out", "swap", "keyword", "always", "never", "operand", "shortcut", "remember")
    assert {f"slip/{name}" for name in names} <= set(count)


_PATCH = """\
The count is one too many; whoever counts sees it.

diff --git a/toy.py b/toy.py
--- a/toy.py
+++ b/toy.py
@@ -1,3 +1,4 @@
 def f(n):
-    return n
+    n += 1
+    return n
 A = 1
"""


def _coverage(seconds: dict[str, float], lines: dict[int, list[str]]) -> Any:
    return SimpleNamespace(seconds=seconds, tests_of=lambda file, line: lines.get(line, []) if file == "toy.py" else [])


def test_tests_of_changed_lines_come_first_and_all_others_behind_them(by_hand: Any) -> None:
    assert set(by_hand.changed_lines(_PATCH)) == {("toy.py", 2)}
    coverage = _coverage({"far": 0.1, "slow": 3.0, "near": 1.0, "later": 9.0}, {2: ["slow", "near"]})
    assert by_hand.tests_for(_PATCH, coverage) == ["near", "slow", "far", "later"]


def _toy(folder: Path) -> Path:
    """A tree inside of a repository that ignores it, as the copy of the judge is."""
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    (folder / ".gitignore").write_text("build/\n")
    tree = folder / "build" / "tree"
    tree.mkdir(parents=True)
    (tree / "toy.py").write_text("def f(n):\n    return n\nA = 1\n")
    return tree


def test_a_folder_of_faults_is_judged_once(by_hand: Any, tmp_path: Path) -> None:
    tree, folder = _toy(tmp_path), tmp_path / "faults"
    folder.mkdir()
    (folder / "1.patch").write_text(_PATCH)
    (folder / "2.patch").write_text(_PATCH.replace("n += 1", "n += 2"))
    seen: list[str] = []

    def killer(files: set[str], tests: Sequence[str], limit_s: float) -> str:
        assert (files, [*tests]) == ({"toy.py"}, ["near"])
        assert limit_s > 1.0
        seen.append((tree / "toy.py").read_text())
        return "near" if "n += 1" in seen[-1] else ""

    coverage = _coverage({"near": 1.0}, {2: ["near"]})
    assert by_hand.judge_folder(folder, tree, coverage, killer) == 1
    assert (folder / "verdicts.txt").read_text() == "1.patch killed by near\n2.patch survived 1 tests\n"
    assert ["n += 1" in seen[0], "n += 2" in seen[1]] == [True, True]
    assert (tree / "toy.py").read_text() == "def f(n):\n    return n\nA = 1\n"
    # What has a verdict is counted, and not judged again.
    assert by_hand.judge_folder(folder, tree, coverage, killer) == 1
    assert len(seen) == 2


def test_a_patch_that_does_not_apply_is_no_verdict(by_hand: Any, tmp_path: Path) -> None:
    tree, folder = _toy(tmp_path), tmp_path / "faults"
    folder.mkdir()
    with pytest.raises(SystemExit, match=r"has no \*\.patch"):
        by_hand.judge_folder(folder, tree, _coverage({}, {}), lambda *_: "")
    (folder / "1.patch").write_text(_PATCH.replace("-    return n", "-    return m"))
    with pytest.raises(SystemExit, match=r"1\.patch does not apply"):
        by_hand.judge_folder(folder, tree, _coverage({}, {}), lambda *_: "")
    assert not (folder / "verdicts.txt").exists()
