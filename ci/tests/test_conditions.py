"""The judge of conditions: what a program decides, in all of its processes, and what it does not."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = '''
"""What is noted."""
from __future__ import annotations
import os


def both(a, b):
    if a and b > 1:
        return [x for x in (1, 2) if x > 1]
    elif not a:
        raise ValueError("no a")
    for _ in range(b):
        a = a or b
    return a if b else None


both(True, 2)
both(True, 1)
try:
    both(False, 0)
except ValueError:
    pass
if not os.fork():
    both(3, 0)
    os._exit(0)
os.wait()
'''


@pytest.fixture(scope="module")
def conditions() -> ModuleType:
    spec = importlib.util.spec_from_file_location("conditions", ROOT / "ci" / "conditions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["conditions"] = module
    spec.loader.exec_module(module)
    return module


def _run(conditions: Any, tree: Path, program: str) -> list[str]:
    for layer in ("twinproof", "fastimpl"):
        (tree / layer / "offload").mkdir(parents=True)
    (tree / "twinproof" / "__init__.py").touch()
    path = tree / "twinproof" / "offload" / "sample.py"
    path.write_text(program, encoding="utf-8")
    conditions.prepare(tree, "offload")
    subprocess.run([sys.executable, str(path)], check=True, env={"PYTHONPATH": str(tree)}, timeout=60)
    found: list[str] = conditions.read(tree)
    return [each.removeprefix("twinproof/offload/sample.py: ") for each in found]


def test_what_is_not_decided_is_named(conditions: Any, tmp_path: Path) -> None:
    """Also in a process that ends without a word: there b is false. ``a or b`` was never asked with a false a."""
    assert _run(conditions, tmp_path, _PROGRAM) == ["always true: a"]
    assert _run(conditions, tmp_path / "alone", _PROGRAM.replace("    both(3, 0)\n", "")) == [
        "always true: a",
        "always true: b",
    ]


def test_numbers_that_are_never_equal_are_named(conditions: Any, tmp_path: Path) -> None:
    """Nothing is said of what is no number; of a chain each pair is one, and what a false one hides is not noted."""
    program = """
def within(low, value, high):
    return low <= value < high

assert [within(1, 2, 3), within(1, 1, 3), within(1, 0, 0)] == [True, True, False]
assert [{1} < {1, 2}, "a" < "b"] == [True, True]

class Many:
    __bool__ = None
    def __lt__(self, other):
        return self

assert type(Many() < 1) is Many
"""
    found = _run(conditions, tmp_path, program)
    assert found == ["never equal: value < high"]
    assert _run(conditions, tmp_path / "more", program + "assert within(1, 3, 3) is False\n") == []


def test_arguments_that_are_never_given_are_named(conditions: Any, tmp_path: Path) -> None:
    """And functions that are never called, but for those that say nothing."""
    program = """
def named(a, b=1, *, c=None, d="x"):
    return a

def alone():
    return 1

def declared():
    ...

named(0)
named(0, 2, d="y")
"""
    found = _run(conditions, tmp_path, program)
    assert found == ["always the default: named(c=None)", "never, called: alone"]
    assert _run(conditions, tmp_path / "more", program + "named(1, 3, c=alone())\n") == []
    changed = program.replace("named(0)\n", "named(0, 2, c=alone(), d='y')\n")
    assert _run(conditions, tmp_path / "given", changed)[0] == "never the default: named(b=1)"


def test_what_never_happens_is_named(conditions: Any, tmp_path: Path) -> None:
    found = _run(conditions, tmp_path, _PROGRAM.replace("both(False, 0)", "both(True, 2)"))
    assert "always true: a" in found
    assert "never, true, if: not a" in found
    assert "never, except: ValueError" in found
    assert "never, raise: raise ValueError('no a')" in found


def test_what_another_user_may_not_note_is_noted_later(conditions: Any, tmp_path: Path) -> None:
    scope: dict[str, Any] = {}
    exec(conditions._NOTED.format(folder=str(tmp_path)), scope)
    own = scope["_open"]

    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    scope["_open"] = refused
    for what in ("1 True", "2 False"):
        scope["note"](what)
    assert list(tmp_path.iterdir()) == []
    scope["_open"] = own
    for _ in range(2):
        # Known by then, and written once.
        scope["note"]("1 True")
    (path,) = tmp_path.iterdir()
    assert sorted(path.read_text(encoding="utf-8").splitlines()) == ["1 True", "2 False"]


def test_a_run_that_noted_nothing_is_no_result(conditions: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="nothing was noted"):
        _run(conditions, tmp_path, "print('no condition')\n")


def test_the_list_is_what_is_undecided(conditions: Any) -> None:
    listed = conditions.Listed
    assert conditions.judge(["x", "y"], listed(["y", "x"])) == []
    assert conditions.judge(["x", "x"], listed(["x"])) == ["no test decides it: x"]
    assert conditions.judge(["x"], listed(["x", "z"])) == ["decided by now, take it out: z"]


def test_a_reason_is_given_and_holds_for_every_place(conditions: Any) -> None:
    listed = conditions.Listed
    assert conditions.judge(["x", "x", "y"], listed(["y"], {"x": "on a GPU alone"})) == []
    assert conditions.judge(["y"], listed(["y"], {"x": "on a GPU alone"})) == ["decided by now, take it out: x"]
    assert conditions.judge(["x"], listed([], {"x": " "})) == ["no reason is given: x"]


def test_what_is_open_does_not_become_more(conditions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reason is not lost by ``--record``."""
    kept = tmp_path / "listed.json"
    _run(conditions, tmp_path / "tree", _PROGRAM.replace("    both(3, 0)\n", ""))
    monkeypatch.setattr(conditions, "LISTED", kept)
    reasons = {"twinproof/offload/sample.py: always true: b": "by hand"}
    rooms = {"offload": {"open": [], "nobody_can": reasons}, "kvstore": {}}
    kept.write_text(json.dumps(rooms), encoding="utf-8")
    with pytest.raises(SystemExit, match="0 were open, now 1"):
        conditions.main(["judge", str(tmp_path / "tree"), "offload", "--record"])
    kept.write_text(json.dumps({**rooms, "offload": {"open": ["one"], "nobody_can": reasons}}), encoding="utf-8")
    assert conditions.main(["judge", str(tmp_path / "tree"), "offload", "--record"]) == 0
    found = json.loads(kept.read_text(encoding="utf-8"))
    assert found["offload"] == {"open": ["twinproof/offload/sample.py: always true: a"], "nobody_can": reasons}
    assert conditions.main(["judge", str(tmp_path / "tree"), "offload"]) == 0
    assert conditions.main(["judge", str(tmp_path / "tree"), "kvstore"]) == 1
