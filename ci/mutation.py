"""Machine-made mutants: how many small changes of the sources does the suite notice?

``map`` runs the suite of each component on fastimpl once, under coverage, and keeps which test runs which line. ``run``
draws mutants in an order that a seed fixes, until a budget of seconds is spent: cosmic-ray's of Python and slips of its
statements (``slips.py``), and of C++ and CUDA headers universalmutator's. Of a Python mutant the tests that run its
line decide, the fastest first, on fastimpl, and where it survives in ``twinproof`` on the reference, too; of a C++ one
the kernels' own tests, then the proofs of the SIMT prover that include its header, then the suite on a library that has
it. ``report`` prints the score by file.

``faults FOLDER`` judges a component's faults that somebody wrote by hand, as patches (``hand_faults.py``).

All work is done on a copy of the tree. A verdict stands until the file changes, so that a run goes on where the last
one ended; a survivor is judged again once the suite has changed. A survivor is killed by a new requirement, or stands
in ``ci/mutants.toml`` with the reason why nobody can see it. ``record`` writes the score by file to
``ci/mutation.json`` and to the table of ``docs/mutants.md``.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import tomllib

# This folder is no package.
sys.path.insert(0, str(Path(__file__).resolve().parent))
from cpp_code import code_digest, has_changed
from hand_faults import judge_folder
from mutants import Mutant, changed, drawn, native_mutants, python_mutants
from python_code import runs_on_import

ROOT = Path(__file__).parents[1]
STATE = ROOT / "build" / "mutate"
LISTED = ROOT / "ci" / "mutants.toml"
SCORES = ROOT / "ci" / "mutation.json"
PAGE = ROOT / "docs" / "mutants.md"
COMPONENTS = ("checkpoint", "kvstore", "offload", "pipeline")
# Headers that all kernels share have no suite of their own: those that use them most decide.
COMMON = "common"
_ROOMS_OF_COMMON = ("kvstore", "pipeline")
SCORE_MIN = 0.9
# Tests of one mutant: no more than this is expected of them. A run that takes much longer hangs, and is a kill.
_TESTS_S, _STARTING_S = 90.0, 60.0
_MEMORY_BYTES = 12 << 30
_KILLED, _SURVIVED, _INVALID, _UNSEEN = "killed", "survived", "invalid", "not covered"
# Tests that look at declarations run no line of a module that was imported before them.
_OF_DECLARATIONS = "/test_declarations.py::"


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant; ``digest`` is that of the changed file, ``suite`` that of the component's tests."""

    key: str
    component: str
    file: str
    line: int
    operator: str
    before: str
    after: str
    verdict: str
    by: str
    seconds: float
    digest: str
    suite: str = ""


def digest_of(path: Path) -> str:
    """The digest of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


# --- Which tests run which line


@dataclass(frozen=True)
class Coverage:
    """Of a component: the tests that run each line of each file, what each test takes, and those that use ranks."""

    lines: Mapping[str, Mapping[str, Sequence[str]]]
    seconds: Mapping[str, float]
    on_ranks: Sequence[str]

    def tests_of(self, file: str, line: int) -> list[str]:
        """The tests that may notice a change of a line: those that run it, the fastest first, then those on ranks.

        A line that only the import runs may be noticed by whatever runs the file, and by tests of declarations.
        """
        by_line = self.lines.get(file, {})
        found = {test for test in by_line.get(str(line), ()) if test}
        if not found and by_line:
            found = {test for tests in by_line.values() for test in tests if test}
            found |= {test for test in self.seconds if _OF_DECLARATIONS in test}
        # Ranks end without a word to coverage.
        return [*self._fastest(found), *self._fastest(set(self.on_ranks) - found)]

    def _fastest(self, tests: set[str]) -> list[str]:
        return sorted(tests & set(self.seconds), key=lambda test: (self.seconds[test], test))


def within(tests: Sequence[str], seconds: Mapping[str, float], budget_s: float) -> list[str]:
    """The first tests that take no longer together than the budget, and one at least."""
    chosen: list[str] = []
    spent = 0.0
    for test in tests:
        spent += seconds[test]
        if chosen and spent > budget_s:
            break
        chosen.append(test)
    return chosen


def make_map(component: str, tree: Path) -> Coverage:
    """Run a component's suite once, under coverage."""
    folder = STATE / f"coverage-{component}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    settings = folder / "rc"
    settings.write_text(
        "[run]\nparallel = true\npatch = subprocess, _exit\n"
        f"data_file = {folder}/data\nsource_pkgs = twinproof,fastimpl\n"
    )
    words = ["-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest", *_PYTEST]
    words += ["-p", "ci.contexts", f"conformance/{component}"]
    done = run_in(tree, [sys.executable, *words, f"--junitxml={folder}/tests.xml"], limit_s=7200)
    if done.returncode != 0:
        raise SystemExit(f"mutate: the suite of {component} fails without a mutant:\n{done.output[-4000:]}")
    combine = [sys.executable, "-m", "coverage", "combine", f"--rcfile={settings}", "-q"]
    subprocess.run(combine, cwd=folder, check=True, env=_plain())
    data = importlib.import_module("coverage").CoverageData(str(folder / "data"))
    data.read()
    lines = {
        Path(file).relative_to(tree).as_posix(): {
            str(line): sorted(set(contexts)) for line, contexts in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
        if Path(file).is_relative_to(tree)
    }
    found = Coverage(lines, _seconds(folder / "tests.xml"), users_of_ranks(tree, component))
    (STATE / f"map-{component}.json").write_text(json.dumps({"digest": sources_digest(tree), **asdict(found)}))
    return found


def seconds_of(component: str, tree: Path) -> Coverage:
    """What each test takes, of a component or of those that stand for the shared headers: C++ has no lines here."""
    seconds: dict[str, float] = {}
    for room in _ROOMS_OF_COMMON if component == COMMON else (component,):
        path, digest = STATE / f"seconds-{room}.json", sources_digest(tree)
        kept = json.loads(path.read_text()) if path.exists() else {}
        if kept.get("digest") != digest:
            report = STATE / f"seconds-{room}.xml"
            words = [sys.executable, "-m", "pytest", *_PYTEST, *_QUICK, f"conformance/{room}", f"--junitxml={report}"]
            done = run_in(tree, words, limit_s=7200)
            if done.returncode != 0:
                raise SystemExit(f"mutate: the suite of {room} fails without a mutant:\n{done.output[-4000:]}")
            kept = {"digest": digest, "seconds": _seconds(report)}
            path.write_text(json.dumps(kept))
        seconds |= kept["seconds"]
    return Coverage({}, seconds, [])


def _seconds(report: Path) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(report).iter("testcase"):
        module, name = case.attrib["classname"], case.attrib["name"].partition("[")[0]
        seconds[f"{module.replace('.', '/')}.py::{name}"] += float(case.attrib["time"])
    return dict(seconds)


def users_of_ranks(tree: Path, component: str) -> list[str]:
    """The tests of a component that run on a pool of ranks."""
    found = []
    for path in sorted((tree / "conformance" / component).glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and any(arg.arg == "rank_pool" for arg in node.args.args):
                found.append(f"conformance/{component}/{path.name}::{node.name}")
    return found


def suite_digest(component: str, tree: Path) -> str:
    """The digest of a component's tests and planted bugs, and of what all suites share."""
    rooms = _ROOMS_OF_COMMON if component == COMMON else (component,)
    folders = (*rooms, "harness", "provers")
    paths = sorted(path for name in folders for path in (tree / "conformance" / name).rglob("*.py"))
    return hashlib.sha256("".join(map(digest_of, paths)).encode()).hexdigest()[:16]


def sources_digest(tree: Path) -> str:
    """The digest of all Python that a map is about."""
    files = (
        path for layer in ("twinproof", "refimpl", "fastimpl", "conformance") for path in (tree / layer).rglob("*.py")
    )
    names = (f"{path.relative_to(tree)}{digest_of(path)}" for path in sorted(files))
    return hashlib.sha256("".join(names).encode()).hexdigest()


def read_map(component: str, tree: Path) -> Coverage | None:
    """What ``map`` has kept of these very sources."""
    path = STATE / f"map-{component}.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    return Coverage(**kept) if kept.pop("digest", None) == sources_digest(tree) else None


# --- Judging

# The night's tests are for what others leave open; some run a program once for each of its calls.
_PYTEST = [
    *("-m", "not night", "-q", "--no-header", "-p", "conformance.harness.plugin", "-p", "no:cacheprovider"),
    *("--strict-markers", "-W", "error", "--twinproof-impl", "fastimpl"),
]
_REFERENCE = ["--twinproof-impl", "refimpl"]
# Of a C++ mutant no line says which tests may notice it: more tests, with fewer examples each.
_QUICK = ["--twinproof-profile", "quick"]


@dataclass(frozen=True)
class Done:
    """A command that has ended: 124 stands for one that ran past its limit."""

    returncode: int
    output: str


def _plain() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "COVERAGE"))}


def _limited() -> None:
    # A mutant may ask for all memory there is.
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))


def run_in(tree: Path, words: Sequence[str], *, limit_s: float) -> Done:
    """Run a command in the copy of the tree, with temporary files of its own, and end all that it started."""
    scratch = STATE / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    environment = {**_plain(), "PYTHONPATH": str(tree), "TMPDIR": str(scratch)}
    with subprocess.Popen(
        [*words],
        cwd=tree,
        env=environment,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_limited,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
            return Done(process.returncode, output)
        except subprocess.TimeoutExpired:
            return Done(124, "")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def killer(done: Done) -> str:
    """Which test failed, or what else a run says that did not pass; "" where it passed."""
    if done.returncode == 0:
        return ""
    if done.returncode == 124:
        return "time limit"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.output, re.MULTILINE)
    return failed.group(1) if failed is not None else f"exit status {done.returncode}"


def judge_python(mutant: Mutant, tree: Path, coverage: Coverage) -> tuple[str, str]:
    """The verdict of the tests that run the mutant's line."""
    line = 0 if runs_on_import((tree / mutant.file).read_text(encoding="utf-8"), mutant.line) else mutant.line
    every = coverage.tests_of(mutant.file, line)
    if not every:
        return _UNSEEN, ""
    on_ranks = set(coverage.on_ranks)
    tests = within([test for test in every if test not in on_ranks], coverage.seconds, _TESTS_S)
    tests += within([test for test in every if test in on_ranks], coverage.seconds, _TESTS_S)
    limit_s = _STARTING_S + 4 * sum(coverage.seconds[test] for test in tests)
    # Code that both share may be there for the reference, whether fastimpl runs it or not.
    for options in ([], _REFERENCE) if mutant.file.startswith("twinproof/") else ([],):
        words = [sys.executable, "-m", "pytest", *_PYTEST, *options, "-x", *tests]
        if by := killer(run_in(tree, words, limit_s=limit_s)):
            return _KILLED, by
    return _SURVIVED, f"{len(tests)} of {len(every)} tests"


def programs_of(header: str, tree: Path) -> list[str]:
    """The test modules whose proofs include a header of the kernels, at any depth."""
    wanted, folder = header.removeprefix("fastimpl/csrc/"), tree / "conformance" / "meta" / "simt"
    users = {wanted}
    sources = tree / "fastimpl" / "csrc"
    headers = {path.relative_to(sources).as_posix(): path for path in sources.rglob("*.h")}
    # Proofs have headers of their own.
    headers |= {path.name: path for path in folder.glob("*.h")}
    grown = True
    while grown:
        found = {name for name, path in headers.items() if users & set(_includes(path))}
        grown = not found <= users
        users |= found
    programs = [path.stem for path in folder.glob("*.cpp") if users & set(_includes(path))]
    tests = sorted((tree / "conformance" / "meta").glob("test_simt_*.py"))
    return [path.name for path in tests if any(f'"{stem}' in path.read_text() for stem in programs)]


def _includes(path: Path) -> list[str]:
    return re.findall(r'#include "([^"]+)"', path.read_text(encoding="utf-8"))


def judge_native(mutant: Mutant, tree: Path, coverage: Coverage) -> tuple[str, str]:
    """The verdict of the kernels' tests, of the proofs that include the header, then of the suite on a new library.

    Whoever has the same code as without the mutant is not asked. A mutant that nobody has in the code is none.
    """
    tests, library = STATE / "kernels", STATE / "library"
    if not_compiled(mutant.file, tree) or not build_in(tree, "fastimpl/csrc/tests", tests):
        return _INVALID, "does not compile"
    seen = has_changed(tests / "kernel_tests")
    limit_s = _STARTING_S + 4 * float((STATE / "kernel_tests.seconds").read_text())
    if seen and (by := killer(run_in(tree, [str(tests / "kernel_tests")], limit_s=limit_s))):
        return _KILLED, f"kernel_tests: {by}"
    programs = programs_of(mutant.file, tree)
    for name in programs:
        words = ["-m", "pytest", *_PYTEST, "-x", "-m", "not night", "-k", "not planted", f"conformance/meta/{name}"]
        if by := killer(run_in(tree, [sys.executable, *words], limit_s=900)):
            return _KILLED, by
    if not build_in(tree, "fastimpl/csrc", library, *_options()):
        return _INVALID, "does not compile"
    if not has_changed(library / "libfastimpl_ops.so"):
        told = f"{len(programs)} files of proofs; not in the library"
        return (_SURVIVED, told) if programs or seen else (_INVALID, "the same code")
    use_library(tree)
    every = sorted(coverage.seconds, key=lambda test: (coverage.seconds[test], test))
    chosen = within(every, coverage.seconds, 2 * _TESTS_S)
    words = [sys.executable, "-m", "pytest", *_PYTEST, *_QUICK, "-x", *chosen]
    done = run_in(tree, words, limit_s=_STARTING_S + 8 * _TESTS_S)
    by = killer(done)
    return (_KILLED, by) if by else (_SURVIVED, f"{len(chosen)} of {len(every)} tests")


def _options() -> list[str]:
    # Compiling takes longest of all.
    options = "-DCMAKE_BUILD_TYPE=Release -DOPTIMIZE=-O1 -DSTRICT=OFF -DCMAKE_CUDA_COMPILER="
    return [*options.split(), f"-DPython3_EXECUTABLE={sys.executable}"]


def not_compiled(header: str, tree: Path) -> bool:
    """Whether a header by itself is no C++, and was before: most mutants that are none end here, in a second."""
    folders = ("fastimpl/csrc", "fastimpl/csrc/common", "conformance/provers/simt/include")
    words = ["g++", "-std=c++20", "-fsyntax-only", "-w", *(f"-I{name}" for name in folders), "-x", "c++", header]
    return run_in(tree, words, limit_s=300).returncode != 0 and run_in(ROOT, words, limit_s=300).returncode == 0


def build_in(tree: Path, sources: str, folder: Path, *options: str) -> bool:
    """Configure where that was never done, and build; whether it compiled. A build that cannot begin ends the run."""
    if not (folder / "build.ninja").exists():
        done = run_in(tree, ["cmake", "-S", sources, "-B", str(folder), "-G", "Ninja", *options], limit_s=900)
        if done.returncode:
            raise SystemExit(f"mutate: {sources} cannot be configured:\n{done.output[-4000:]}")
    return run_in(tree, ["cmake", "--build", str(folder)], limit_s=1800).returncode == 0


def use_library(tree: Path) -> None:
    """Let the copy of the tree run on the library that was built of it."""
    shutil.copy2(STATE / "library" / "libfastimpl_ops.so", tree / "fastimpl")
    shutil.copy2(STATE / "library" / "build_info.out.json", tree / "fastimpl" / "build_info.json")


def build_plain(tree: Path) -> None:
    """Build what a mutant is judged with, and keep the digests of the code without one."""
    for sources, folder, options in (
        ("fastimpl/csrc/tests", STATE / "kernels", ["-DSTRICT=OFF"]),
        ("fastimpl/csrc", STATE / "library", _options()),
    ):
        if not build_in(tree, sources, folder, *options):
            raise SystemExit(f"mutate: {sources} does not compile without a mutant")
    for product in (STATE / "kernels" / "kernel_tests", STATE / "library" / "libfastimpl_ops.so"):
        product.with_suffix(".plain").write_text(code_digest(product))
    use_library(tree)
    began = time.monotonic()
    if by := killer(run_in(tree, [str(STATE / "kernels" / "kernel_tests")], limit_s=900)):
        raise SystemExit(f"mutate: the kernels' tests fail without a mutant: {by}")
    (STATE / "kernel_tests.seconds").write_text(str(time.monotonic() - began))


def copy_tree() -> Path:
    """The files of this tree and the library that ci/setup has installed, in a folder where they may be changed.

    What is as it was keeps its time: builds go by it, and one that was ended with a mutant in it has to be done again.
    """
    tree = STATE / "tree"
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(words, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    wanted = {tree / name: ROOT / name for name in names if name and (ROOT / name).exists()}
    for path in [path for path in tree.rglob("*") if path.is_file() and path not in wanted]:
        path.unlink()
    for path, source in wanted.items():
        if not path.exists() or path.read_bytes() != source.read_bytes():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, path)
    use_installed_library(tree)
    return tree


def use_installed_library(tree: Path) -> None:
    """Let the copy of the tree run on the library that ci/setup has installed."""
    words = [sys.executable, "-P", "-W", "ignore", "-c", "import fastimpl.ops as o; print(o.library_path() or '')"]
    library = subprocess.run(words, cwd=STATE, env=_plain(), capture_output=True, text=True, check=True).stdout.split()
    if not library:
        raise SystemExit("mutate: ci/setup has installed no library")
    for name in ("libfastimpl_ops.so", "build_info.json"):
        shutil.copy2(Path(library[-1]).parent / name, tree / "fastimpl" / name)


def judge(mutant: Mutant, tree: Path, coverage: Coverage) -> Verdict | None:
    """Put the mutant into the copy, judge it, and take it out again; None where it changes nothing."""
    path = tree / mutant.file
    kept = {name: path.read_bytes() for name, path in _files_of(mutant, tree).items()}
    after = changed(mutant, path.read_text(encoding="utf-8"))
    if after is None:
        return None
    began, digest = time.monotonic(), digest_of(path)
    try:
        path.write_text(after, encoding="utf-8")
        verdict, by = (judge_native if mutant.operator == "line" else judge_python)(mutant, tree, coverage)
    finally:
        for name, content in kept.items():
            (tree / name).write_bytes(content)
    # What is added behind a line is told, and not the line again.
    made = [line.strip() for line in after.splitlines()[mutant.line - 1 : mutant.line + 1]]
    now = next((line for line in made if line != mutant.before), "")
    told = (mutant.key, mutant.component, mutant.file, mutant.line, mutant.operator, mutant.before, now)
    return Verdict(*told, verdict, by, round(time.monotonic() - began, 1), digest)


def _files_of(mutant: Mutant, tree: Path) -> dict[str, Path]:
    names = [mutant.file]
    if mutant.operator == "line":
        names += ["fastimpl/libfastimpl_ops.so", "fastimpl/build_info.json"]
    return {name: tree / name for name in names}


# --- What is kept, and the report


def read_verdicts(root: Path = ROOT, state: Path = STATE) -> dict[str, Verdict]:
    """The verdicts on files that have not changed since, by the mutants' keys."""
    path = state / "verdicts.jsonl"
    found = [Verdict(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
    digests = {file: digest_of(root / file) for file in {each.file for each in found} if (root / file).exists()}
    return {each.key: each for each in found if digests.get(each.file) == each.digest}


def read_listed(path: Path = LISTED, root: Path = ROOT) -> set[tuple[str, str, str]]:
    """File, line before and line after of the survivors that nobody can see.

    Raises:
        SystemExit: an entry without a reason, or whose line is no longer there.
    """
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("survivor", []) if path.exists() else []
    for entry in entries:
        if set(entry) != {"file", "before", "after", "reason"} or not entry["reason"].strip():
            raise SystemExit(f"mutate: {path.name}: an entry needs file, before, after and reason, got {entry}")
        file = root / entry["file"]
        if not file.exists() or entry["before"] not in map(str.strip, file.read_text(encoding="utf-8").splitlines()):
            raise SystemExit(f"mutate: {path.name}: {entry['file']} has no line {entry['before']!r} any more")
    return {(entry["file"], entry["before"], entry["after"]) for entry in entries}


def report(verdicts: Iterable[Verdict], listed: set[tuple[str, str, str]]) -> tuple[str, bool]:
    """A table by component and file, the survivors, and whether every component has its score and nothing is open."""
    judged = [each for each in verdicts if each.verdict != _INVALID]
    dead = {each.key for each in judged if each.verdict == _KILLED}
    excused = {each.key for each in judged if (each.file, each.before, each.after) in listed} - dead
    open_ones = [each for each in judged if each.key not in dead | excused]
    lines, good = [], not open_ones and bool(judged)
    for component in sorted({each.component for each in judged}):
        of_component = [each for each in judged if each.component == component]
        for file in ("", *sorted({each.file for each in of_component})):
            here = [each for each in of_component if file in ("", each.file)]
            killed_count = sum(each.key in dead for each in here)
            counted_count = sum(each.key not in excused for each in here)
            score = killed_count / counted_count if counted_count else 1.0
            lines.append(f"{file or component:<44} {killed_count:>4} of {counted_count:>4} killed {score:7.1%}")
            good = good and (file != "" or score >= SCORE_MIN)
    for each in open_ones:
        lines.append(f"{each.verdict}: {each.file}:{each.line} ({each.by})\n    - {each.before}\n    + {each.after}")
    return "\n".join(lines), good


@dataclass(frozen=True)
class Score:
    """Of a file, or of all of a component: mutants that were killed, judged, and are listed as invisible."""

    killed_count: int
    judged_count: int
    listed_count: int


def scores(verdicts: Iterable[Verdict], listed: set[tuple[str, str, str]]) -> dict[str, dict[str, Score]]:
    """By component and file."""
    found: dict[str, dict[str, list[Verdict]]] = defaultdict(lambda: defaultdict(list))
    for each in verdicts:
        if each.verdict != _INVALID:
            found[each.component][each.file].append(each)
    return {
        component: {file: _score(found[component][file], listed) for file in sorted(found[component])}
        for component in sorted(found)
    }


def _score(judged: Sequence[Verdict], listed: set[tuple[str, str, str]]) -> Score:
    killed = [each for each in judged if each.verdict == _KILLED]
    excused = [each for each in judged if each not in killed and (each.file, each.before, each.after) in listed]
    return Score(len(killed), len(judged), len(excused))


def page_of(found: Mapping[str, Mapping[str, Score]]) -> str:
    """The table of ``docs/mutants.md``."""
    lines = ["| component, file | killed | listed | survived | score |", "| --- | --- | --- | --- | --- |"]
    for component, files in found.items():
        totals = [sum(getattr(score, name) for score in files.values()) for name in Score.__annotations__]
        for name, score in ((f"**{component}**", Score(*totals)), *((f"`{file}`", files[file]) for file in files)):
            counted_count = score.judged_count - score.listed_count
            share = f"{score.killed_count / counted_count:.1%}" if counted_count else ""
            open_count = counted_count - score.killed_count
            lines.append(f"| {name} | {score.killed_count} | {score.listed_count} | {open_count} | {share} |")
    return "\n".join(lines) + "\n"


def record(found: Mapping[str, Mapping[str, Score]], kept: Path = SCORES, page: Path = PAGE) -> None:
    """Keep the scores, those of files that were not judged now as they were, and write the page's table anew."""
    known = read_scores(kept)
    merged = {component: {**known.get(component, {}), **found.get(component, {})} for component in {**known, **found}}
    merged = {component: dict(sorted(merged[component].items())) for component in sorted(merged)}
    text = {component: {file: asdict(score) for file, score in files.items()} for component, files in merged.items()}
    kept.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
    before = page.read_text(encoding="utf-8").partition("| component, file |")[0]
    page.write_text(before + page_of(merged), encoding="utf-8")


def read_scores(path: Path = SCORES) -> dict[str, dict[str, Score]]:
    """What ``record`` has kept."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {component: {file: Score(**score) for file, score in files.items()} for component, files in found.items()}


def run(components: Sequence[str], *, budget_s: float, seed: int, native: bool, operators: str = "") -> None:
    """Judge mutants of each component for its share of the budget: those whose operator begins with ``operators``."""
    tree, listed = copy_tree(), read_listed()
    if native:
        build_plain(tree)
    for component in components:
        coverage = seconds_of(component, tree) if native else read_map(component, tree) or make_map(component, tree)
        suite, known = suite_digest(component, tree), read_verdicts()
        final = {key for key, each in known.items() if each.verdict in (_KILLED, _INVALID) or each.suite == suite}
        final |= {key for key, each in known.items() if (each.file, each.before, each.after) in listed}
        until = time.monotonic() + budget_s / len(components)
        every = native_mutants(component, tree) if native else python_mutants(component, tree)
        mutants = (mutant for mutant in every if mutant.operator.startswith(operators))
        # Survivors first: the suite may know more by now.
        for mutant in sorted(drawn(mutants, seed), key=lambda mutant: mutant.key not in known):
            if time.monotonic() > until:
                break
            if mutant.key in final:
                continue
            verdict = judge(mutant, tree, coverage)
            if verdict is None:
                continue
            verdict = replace(verdict, suite=suite)
            with (STATE / "verdicts.jsonl").open("a") as kept:
                kept.write(json.dumps(asdict(verdict)) + "\n")
            print(f"{verdict.verdict:<12} {verdict.file}:{verdict.line} {verdict.seconds} s {verdict.by}", flush=True)


def run_faults(folder: Path, component: str) -> int:
    """Judge faults written by hand: 0 where the component's suite kills them all."""
    tree = copy_tree()
    coverage = read_map(component, tree) or make_map(component, tree)

    def killer_of(files: set[str], tests: Sequence[str], limit_s: float) -> str:
        is_native = any(file.startswith("fastimpl/csrc/") for file in files)
        if is_native and (by := _killer_of_kernels(tree)):
            return by
        try:
            return killer(run_in(tree, [sys.executable, "-m", "pytest", *_PYTEST, "-x", *tests], limit_s=limit_s))
        finally:
            if is_native:
                use_installed_library(tree)

    return 0 if judge_folder(folder, tree, coverage, killer_of) == 0 else 1


def _killer_of_kernels(tree: Path) -> str:
    """Build the kernels' tests and the library that the suite is to use; which of those tests fails, or ""."""
    for sources, folder, options in (
        ("fastimpl/csrc/tests", STATE / "kernels", ["-DSTRICT=OFF"]),
        ("fastimpl/csrc", STATE / "library", _options()),
    ):
        if not build_in(tree, sources, folder, *options):
            raise SystemExit(f"mutate: {sources} does not compile with this fault")
    use_library(tree)
    by = killer(run_in(tree, [str(STATE / "kernels" / "kernel_tests")], limit_s=900))
    return by and f"kernel_tests: {by}"


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="ci/mutate", description=__doc__)
    parser.add_argument("what", nargs="?", default="all", choices=("all", "map", "run", "report", "record", "faults"))
    parser.add_argument("folder", nargs="?", type=Path, help="of faults: a folder of patches to one component")
    parser.add_argument("--component", nargs="+", default=None, choices=(*COMPONENTS, COMMON))
    parser.add_argument("--budget", type=float, default=7200.0, help="seconds for all components together")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which mutants are drawn")
    parser.add_argument("--operators", default="", metavar="PREFIX", help="of Python: only those, such as slip/")
    parser.add_argument("--native", action="store_true", help="C++ and CUDA headers instead of Python")
    options = parser.parse_args(arguments)
    if options.component is None:
        options.component = [*COMPONENTS, *([COMMON] if options.native else [])]
    if COMMON in options.component and not options.native:
        raise SystemExit("mutate: common has headers alone: --native")
    STATE.mkdir(parents=True, exist_ok=True)
    if options.what == "faults":
        if options.folder is None or not options.folder.is_dir() or len(options.component) != 1:
            raise SystemExit(
                f"mutate: faults needs a folder and one --component, got {options.folder} and {options.component}"
            )
        return run_faults(options.folder, *options.component)
    if options.what == "map":
        for component in options.component:
            make_map(component, copy_tree())
    if options.what in ("all", "run"):
        run(
            options.component,
            budget_s=options.budget,
            seed=options.seed,
            native=options.native,
            operators=options.operators,
        )
    if options.what == "record":
        record(scores(read_verdicts().values(), read_listed()))
    if options.what in ("all", "report"):
        text, good = report(read_verdicts().values(), read_listed())
        print(text)
        return 0 if good else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
