"""The judge of machine-made mutants, on a toy: what it draws, which tests it asks, and what it says of each."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(name="mutation", scope="module")
def _mutation(program: Callable[[str], Any]) -> Any:
    return program("mutation")


def _mutant(mutation: Any, **changes: Any) -> Any:
    fields = {"component": "kvstore", "file": "toy.py", "line": 2, "operator": "line", "occurrence": 0}
    return mutation.Mutant(**{**fields, "before": "return n + 1", "after": "    return n - 1\n", **changes})


def _verdict(mutation: Any, verdict: str, **changes: Any) -> Any:
    fields = {"key": "k", "component": "kvstore", "file": "toy.py", "line": 2, "operator": "o", "before": "a"}
    rest = {"after": "b", "by": "test", "seconds": 1.0, "digest": ""}
    return mutation.Verdict(**{**fields, **rest, **changes, "verdict": verdict})


def test_a_changed_annotation_has_no_meaning(program: Callable[[str], Any]) -> None:
    meaning = program("python_code").meaning
    text = "x: int | None = 1\ndef f(a: int | str = 2) -> int | None:\n    return a | 1\n"
    assert meaning(text) == meaning(text.replace("int | None", "int + None").replace("| str", "& str"))
    assert meaning(text) != meaning(text.replace("a | 1", "a & 1"))
    assert meaning(text) != meaning(text.replace("= 2", "= 3"))


def test_a_changed_threshold_has_no_meaning(program: Callable[[str], Any]) -> None:
    meaning = program("python_code").meaning
    text = "LEAST = regime(1 << 9, 3)\nother = limit(1 << 9, 3)\n"
    assert meaning(text) == meaning(text.replace("regime(1 << 9", "regime(1 + 9"))
    assert meaning(text) != meaning(text.replace("limit(1 << 9", "limit(1 + 9"))


def test_the_order_is_fixed_and_a_new_mutant_changes_no_other(mutation: Any) -> None:
    mutants = [_mutant(mutation, occurrence=number) for number in range(50)]
    order = mutation.drawn(mutants, 0)
    assert order == mutation.drawn(reversed(mutants), 0)
    assert order != mutation.drawn(mutants, 1)
    more = mutation.drawn([*mutants, _mutant(mutation, file="other.py")], 0)
    assert [each for each in more if each.file == "toy.py"] == order


def test_the_tests_that_run_the_line_are_asked_the_fastest_first(mutation: Any) -> None:
    lines = {"toy.py": {"1": ["slow", "fast"], "2": [""], "4": ["slow"]}}
    declared = "a/test_declarations.py::test"
    seconds = {"slow": 9.0, "fast": 1.0, "ranks": 5.0, declared: 2.0}
    coverage = mutation.Coverage(lines, seconds, ["ranks"])
    # What ranks run is unknown: they are asked of every line, and last.
    assert coverage.tests_of("toy.py", 1) == ["fast", "slow", "ranks"]
    # Line 2 runs while the module is imported.
    assert coverage.tests_of("toy.py", 2) == ["fast", declared, "slow", "ranks"]
    assert coverage.tests_of("toy.py", 3) == ["fast", declared, "slow", "ranks"]
    assert coverage.tests_of("other.py", 1) == ["ranks"]
    assert mutation.Coverage(lines, {"slow": 9.0}, []).tests_of("other.py", 1) == []
    assert mutation.within(["fast", "ranks", "slow"], coverage.seconds, 6.0) == ["fast", "ranks"]
    assert mutation.within(["slow"], coverage.seconds, 6.0) == ["slow"]


def test_contexts_are_the_tests_whoever_calls_them(
    program: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts = program("contexts")
    said: list[str] = []
    running = SimpleNamespace(switch_context=said.append)
    for current, expected in ((running, ["a/test_b.py::test_c", "test", ""]), (None, ["test"])):
        coverage = SimpleNamespace(Coverage=SimpleNamespace(current=lambda current=current: current))
        monkeypatch.setitem(sys.modules, "coverage", coverage)  # type: ignore[arg-type]
        said.clear()
        around = contexts.pytest_runtest_protocol(SimpleNamespace(nodeid="a/test_b.py::test_c[1-2]"))
        next(around)
        said.append("test")
        with pytest.raises(StopIteration) as stopped:
            around.send(True)
        assert (said, stopped.value.value) == (expected, True)


def test_ranks_are_asked_beside_the_tests_of_the_line(
    mutation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(mutation, "run_in", lambda tree, words, **_: asked.append(words) or mutation.Done(0, ""))
    monkeypatch.setattr(mutation, "_TESTS_S", 10.0)
    coverage = mutation.Coverage({"toy.py": {"2": ["a", "b"]}}, {"a": 9.0, "b": 9.0, "r": 9.0, "s": 9.0}, ["r", "s"])
    (tmp_path / "toy.py").write_text("def f():\n    return 1\n")
    assert mutation.judge_python(_mutant(mutation), tmp_path, coverage) == ("survived", "2 of 4 tests")
    assert asked[0][-2:] == ["a", "r"]


def test_survivors_are_judged_again_when_the_suite_has_changed(
    mutation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy.py").write_text("a\n")
    mutants = [_mutant(mutation, occurrence=number) for number in range(5)]
    judged: list[int] = []

    def judge(mutant: Any, tree: Path, coverage: Any) -> Any:
        judged.append(mutant.occurrence)
        return _verdict(mutation, "killed", key=mutant.key)

    digest = mutation.digest_of(tmp_path / "toy.py")
    kept = [
        _verdict(mutation, "killed", key=mutants[0].key, digest=digest, suite="old"),
        _verdict(mutation, "survived", key=mutants[1].key, digest=digest, suite="old"),
        _verdict(mutation, "survived", key=mutants[2].key, digest=digest, suite="new"),
        _verdict(mutation, "survived", key=mutants[4].key, digest=digest, suite="old", before="x", after="y"),
    ]
    (tmp_path / "verdicts.jsonl").write_text(
        "".join(mutation.json.dumps(mutation.asdict(each)) + "\n" for each in kept)
    )
    known = mutation.read_verdicts(tmp_path, tmp_path)
    for name, value in {
        "STATE": tmp_path,
        "copy_tree": lambda: tmp_path,
        "read_map": lambda component, tree: object(),
        "suite_digest": lambda component, tree: "new",
        "read_verdicts": lambda: known,
        "read_listed": lambda: {("toy.py", "x", "y")},
        "python_mutants": lambda component, tree: mutants,
        "judge": judge,
    }.items():
        monkeypatch.setattr(mutation, name, value)
    mutation.run(["kvstore"], budget_s=60.0, seed=0, native=False)
    # The survivor of the old suite first, then what was never judged; never again what nobody can see.
    assert judged == [1, 3]
    monkeypatch.undo()
    assert {each.suite for each in mutation.read_verdicts(tmp_path, tmp_path).values()} == {"old", "new"}


def test_scores_are_kept_by_file(mutation: Any, tmp_path: Path) -> None:
    kept, page = tmp_path / "scores.json", tmp_path / "page.md"
    page.write_text("# Mutants\n\n| component, file | old\n")
    verdicts = [
        _verdict(mutation, "killed", key="1"),
        _verdict(mutation, "survived", key="2", before="x", after="y"),
        _verdict(mutation, "survived", key="3"),
        _verdict(mutation, "not covered", key="4", file="other.py"),
        _verdict(mutation, "invalid", key="5", file="other.py"),
    ]
    found = mutation.scores(verdicts, {("toy.py", "x", "y")})
    assert found == {"kvstore": {"other.py": mutation.Score(0, 1, 0), "toy.py": mutation.Score(1, 3, 1)}}
    mutation.record(found, kept, page)
    assert page.read_text() == (
        "# Mutants\n\n| component, file | killed | listed | survived | score |\n| --- | --- | --- | --- | --- |\n"
        "| **kvstore** | 1 | 1 | 2 | 33.3% |\n| `other.py` | 0 | 0 | 1 | 0.0% |\n| `toy.py` | 1 | 1 | 1 | 50.0% |\n"
    )
    # What was not judged this time stays.
    mutation.record({"kvstore": {"toy.py": mutation.Score(2, 2, 0)}}, kept, page)
    assert mutation.read_scores(kept)["kvstore"] == {
        "other.py": mutation.Score(0, 1, 0),
        "toy.py": mutation.Score(2, 2, 0),
    }


def test_the_page_has_the_kept_scores(mutation: Any) -> None:
    assert mutation.PAGE.read_text(encoding="utf-8").endswith("\n\n" + mutation.page_of(mutation.read_scores()))


def test_lines_that_the_import_runs(mutation: Any) -> None:
    text = "A = 1\n\n\ndef f(n=A):\n    g = lambda: n\n    return g\n\n\nclass B:\n    c = A\n"
    found = [line for line in range(1, 11) if mutation.runs_on_import(text, line)]
    assert found == [1, 2, 3, 4, 7, 8, 9, 10]
    assert not mutation.runs_on_import("A = \n", 1)


def test_a_line_that_no_test_runs_is_not_covered(mutation: Any, tmp_path: Path) -> None:
    coverage = mutation.Coverage({}, {}, [])
    (tmp_path / "toy.py").write_text("A = 1\n")
    assert mutation.judge_python(_mutant(mutation), tmp_path, coverage) == ("not covered", "")


@pytest.mark.parametrize("line", ["2", "3"])
@pytest.mark.parametrize("file", ["twinproof/kvstore/toy.py", "fastimpl/kvstore/toy.py"])
def test_the_reference_is_asked_about_what_survives_in_shared_code(
    mutation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, line: str
) -> None:
    asked: list[bool] = []

    def run_in(tree: Path, words: list[str], *, limit_s: float) -> Any:
        asked.append(words[words.index("-x") - 1] == "refimpl")
        return mutation.Done(0, "")

    monkeypatch.setattr(mutation, "run_in", run_in)
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("def f():\n    return 1\n")
    coverage = mutation.Coverage({file: {line: ["test"]}}, {"test": 0.1}, [])
    verdict = mutation.judge_python(_mutant(mutation, file=file), tmp_path, coverage)
    assert verdict == ("survived", "1 of 1 tests")
    assert asked == ([False, True] if file.startswith("twinproof") else [False])


@pytest.mark.parametrize(
    ("asserted", "after", "expected"),
    [
        ("f(1) == 2", "    return n - 1\n", "killed"),
        ("f(1) > -9", "    return n - 1\n", "survived"),
        ("f(1) == 2", "    return n +\n", "killed"),
        ("f(1) == 2", "    while True: pass\n", "killed"),
    ],
    ids=["noticed", "unnoticed", "no Python", "endless"],
)
def test_verdicts(
    mutation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asserted: str, after: str, expected: str
) -> None:
    text = "def f(n):\n    return n + 1\n"
    (tmp_path / "toy.py").write_text(text)
    (tmp_path / "test_toy.py").write_text(f"import toy\nf = toy.f\ndef test_toy():\n    assert {asserted}\n")
    test = "test_toy.py::test_toy"
    # A busy machine starts Python slowly: only what never ends has a short limit.
    limit_s = 4.0 if "while True" in after else 60.0
    for name, value in {"STATE": tmp_path / "state", "_PYTEST": ["-q"], "_STARTING_S": limit_s}.items():
        monkeypatch.setattr(mutation, name, value)
    monkeypatch.setattr(mutation, "judge_native", mutation.judge_python)
    coverage = mutation.Coverage({"toy.py": {"2": [test]}}, {test: 0.1}, [])
    monkeypatch.setattr(mutation, "_files_of", lambda mutant, tree: {mutant.file: tree / mutant.file})
    verdict = mutation.judge(_mutant(mutation, after=after), tmp_path, coverage)
    assert (verdict.verdict, verdict.before, verdict.after) == (expected, "return n + 1", after.strip())
    # The tree is as it was, and so is what the verdict belongs to.
    assert (tmp_path / "toy.py").read_text() == text
    assert verdict.digest == mutation.digest_of(tmp_path / "toy.py")


def test_proofs_are_found_through_their_own_headers(mutation: Any) -> None:
    found = mutation.programs_of("fastimpl/csrc/offload/slot_kernel.h", mutation.ROOT)
    assert found == ["test_simt_slot.py"]
    assert "test_simt_pool.py" in mutation.programs_of("fastimpl/csrc/pipeline/pool_kernel.h", mutation.ROOT)


def test_a_build_that_cannot_begin_is_no_verdict(
    mutation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutation, "run_in", lambda *_, **__: mutation.Done(1, "no cmake"))
    with pytest.raises(SystemExit, match="cannot be configured:\nno cmake"):
        mutation.build_in(tmp_path, "sources", tmp_path / "build")
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "build.ninja").touch()
    assert not mutation.build_in(tmp_path, "sources", tmp_path / "build")
    monkeypatch.setattr(mutation, "STATE", tmp_path)
    monkeypatch.setattr(mutation, "build_in", lambda *_: False)
    with pytest.raises(SystemExit, match="does not compile without a mutant"):
        mutation.build_plain(tmp_path)


@pytest.mark.usefixtures("mutation")
@pytest.mark.parametrize(
    ("before", "after", "sensible"),
    [
        ("if (a < b) return;", "if (a <= b) return;", True),
        ("if (a < b) return;", "if ( a<b ) return;  // x", False),
        ("int64_t n = 1;", "int63_t n = 1;", False),
        ("int64_t n = 1;", "int64_t n = 0;", True),
        ("std::vector<int64_t> n(2);", "std::vector<=int64_t> n(2);", False),
        ("x = static_cast<int64_t>(y);", "x = static_cast<int64_t<=(y);", False),
        ("x = _mm_or_si128(a, b);", "x = _mm_or_si(128+1)(a, b);", False),
        ("++n;", "+-n;", True),
        ("a += b;", "a +> b;", False),
    ],
)
def test_lines_that_are_no_program_are_not_judged(before: str, after: str, sensible: bool) -> None:
    cpp_code = sys.modules["cpp_code"]
    assert cpp_code.is_sensible(before, after) is sensible


_TOY = "inline int twice(int n) { return 2 * n; }\ninline int unused(int n) { return 3 * n; }\n"


def test_a_mutant_of_c_is_asked_about_where_its_code_is(
    mutation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A toy of two programs: kernels' tests that call one function, and a library that calls none."""
    header = tmp_path / "fastimpl" / "csrc" / "kvstore" / "toy.h"
    header.parent.mkdir(parents=True)
    (tmp_path / "conformance" / "meta" / "simt").mkdir(parents=True)
    header.write_text(_TOY)
    main = '#include "kvstore/toy.h"\nint main(int count, char**) { return twice(2 * count) != 4; }\n'
    (tmp_path / "main.cpp").write_text(main)
    (tmp_path / "other.cpp").write_text("int main() { return 0; }\n")
    products = {"kernels": ("main.cpp", "kernel_tests"), "library": ("other.cpp", "libfastimpl_ops.so")}

    def build(tree: Path, _: str, folder: Path, *options: str) -> bool:
        source, name = products[folder.name]
        folder.mkdir(exist_ok=True)
        words = ["g++", "-O1", "-I", "fastimpl/csrc", source, "-o", str(folder / name)]
        return bool(mutation.run_in(tree, words, limit_s=60).returncode == 0)

    monkeypatch.setattr(mutation, "STATE", tmp_path / "state")
    monkeypatch.setattr(mutation, "build_in", build)
    monkeypatch.setattr(mutation, "use_library", lambda _: None)
    (tmp_path / "state").mkdir()
    mutation.build_plain(tmp_path)
    nothing = mutation.Coverage({}, {}, [])
    verdicts = {}
    for name, text in {
        "wrong": _TOY.replace("2 * n", "3 * n"),
        "unused": _TOY.replace("3 * n", "4 * n"),
        "none": _TOY.replace("2 * n", "2 * * n"),
        "same value": _TOY.replace("2 * n", "n * 2"),
        "right": _TOY.replace("2 * n", "n == 8 ? 7 : 2 * n"),
    }.items():
        header.write_text(text)
        mutant = _mutant(mutation, file="fastimpl/csrc/kvstore/toy.h")
        verdicts[name] = mutation.judge_native(mutant, tmp_path, nothing)
    assert verdicts == {
        "wrong": ("killed", "kernel_tests: exit status 1"),
        "unused": ("invalid", "the same code"),
        "none": ("invalid", "does not compile"),
        "same value": ("invalid", "the same code"),
        "right": ("survived", "0 files of proofs; not in the library"),
    }


def test_verdicts_end_with_the_text_they_are_about(mutation: Any, tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text("a\n")
    digest = mutation.digest_of(tmp_path / "toy.py")
    kept = [_verdict(mutation, "killed", digest=digest), _verdict(mutation, "survived", key="old", digest="other")]
    lines = [mutation.json.dumps(mutation.asdict(each)) for each in kept]
    (tmp_path / "verdicts.jsonl").write_text("\n".join(lines))
    assert list(mutation.read_verdicts(tmp_path, tmp_path)) == ["k"]


def test_the_report_counts_what_is_open(mutation: Any) -> None:
    killed = [_verdict(mutation, "killed", key=str(number)) for number in range(9)]
    survived = _verdict(mutation, "survived", key="s", before="x", after="y")
    text, good = mutation.report([*killed, survived, _verdict(mutation, "invalid", key="i")], set())
    assert "9 of   10 killed   90.0%" in text
    assert "survived: toy.py:2 (test)\n    - x\n    + y" in text
    assert not good
    text, good = mutation.report([*killed, survived], {("toy.py", "x", "y")})
    assert "9 of    9 killed  100.0%" in text
    assert good
    # A run that judged nothing is not good, nor is a line that no test runs.
    assert not mutation.report([], set())[1]
    assert not mutation.report([*killed, _verdict(mutation, "not covered", key="n")], set())[1]


def test_the_committed_list_is_strict(mutation: Any, tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text("    x = 1\n")
    listed = tmp_path / "mutants.toml"
    entry = '[[survivor]]\nfile = "toy.py"\nbefore = "{}"\nafter = "x = 2"\nreason = "{}"\n'
    listed.write_text(entry.format("x = 1", "Nobody reads x."))
    assert mutation.read_listed(listed, tmp_path) == {("toy.py", "x = 1", "x = 2")}
    listed.write_text(entry.format("x = 1", " "))
    with pytest.raises(SystemExit, match="an entry needs file, before, after and reason"):
        mutation.read_listed(listed, tmp_path)
    listed.write_text(entry.format("x = 3", "Nobody reads x."))
    with pytest.raises(SystemExit, match="has no line 'x = 3' any more"):
        mutation.read_listed(listed, tmp_path)
    # The list of this tree stands.
    mutation.read_listed()


def test_a_copy_takes_out_what_an_ended_run_left_and_touches_nothing_else(
    mutation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, state = tmp_path / "root", tmp_path / "state"
    (root / "fastimpl").mkdir(parents=True)
    state.mkdir()
    for name, text in (("a.h", "1\n"), ("b.h", "2\n"), ("fastimpl/libfastimpl_ops.so", ""), ("build_info.json", "")):
        (root / name).write_text(text)
    (root / "fastimpl" / "build_info.json").write_text("")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    library = str(root / "fastimpl" / "libfastimpl_ops.so")
    monkeypatch.setattr(mutation, "ROOT", root)
    monkeypatch.setattr(mutation, "STATE", state)
    monkeypatch.setattr(mutation.sys, "executable", "/bin/echo")
    run = subprocess.run
    plain = SimpleNamespace(stdout=library)
    monkeypatch.setattr(
        mutation.subprocess, "run", lambda words, **rest: run(words, **rest) if words[0] == "git" else plain
    )
    tree = mutation.copy_tree()
    times = {name: (tree / name).stat().st_mtime_ns for name in ("a.h", "b.h")}
    (tree / "a.h").write_text("a mutant\n")
    (tree / "left.txt").write_text("of a test\n")
    mutation.copy_tree()
    assert (tree / "a.h").read_text() == "1\n"
    assert (tree / "a.h").stat().st_mtime_ns > times["a.h"]
    assert (tree / "b.h").stat().st_mtime_ns == times["b.h"]
    assert not (tree / "left.txt").exists()
