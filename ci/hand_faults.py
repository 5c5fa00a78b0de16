"""Faults written by hand, one patch a file, judged as ``ci/mutation.py`` judges mutants: ``ci/mutate faults FOLDER``.

A patch applies with ``git apply`` in the root of the tree; what stands before its first ``diff --git`` says what is
wrong. The tests that run a changed line are asked first, the fastest first, then the rest of the component's suite, so
that a survivor has passed all of it. A patch of the C++ sources is compiled first, and the kernels' tests are asked
before the suite. ``verdicts.txt`` in the folder gets a line for each fault; a fault that stands
there is not judged again.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

VERDICTS = "verdicts.txt"
_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? ")
# Examples of a property take other times on another day, and a fault may make a test wait.
_STARTING_S, _FACTOR = 120.0, 6


class TestsOfLines(Protocol):
    """What is needed of a map of coverage: see ``mutation.Coverage``."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """What each test takes."""

    def tests_of(self, file: str, line: int) -> list[str]:
        """The tests that may notice a change of a line."""


def changed_lines(patch: str) -> Iterator[tuple[str, int]]:
    """The file, and the lines before the change, that a patch takes out or adds something behind."""
    file, line = "", 0
    for text in patch[max(patch.find("diff --git"), 0) :].splitlines():
        hunk = _HUNK.match(text)
        if text.startswith("--- "):
            file = text[4:].removeprefix("a/").strip()
        elif hunk is not None:
            line = int(hunk.group(1))
        elif text.startswith("-"):
            yield file, line
            line += 1
        elif text.startswith("+"):
            if not text.startswith("+++"):
                yield file, max(line - 1, 1)
        elif text.startswith(" "):
            line += 1


def tests_for(patch: str, coverage: TestsOfLines) -> list[str]:
    """All tests of a component: first those that run a changed line, the fastest first."""
    wanted = dict.fromkeys(test for file, line in changed_lines(patch) for test in coverage.tests_of(file, line))
    near = sorted(wanted, key=lambda test: coverage.seconds[test])
    rest = sorted(set(coverage.seconds) - set(near), key=lambda test: coverage.seconds[test])
    return [*near, *rest]


def judge_folder(
    folder: Path, tree: Path, coverage: TestsOfLines, killer: Callable[[set[str], Sequence[str], float], str]
) -> int:
    """Judge each ``*.patch`` of a folder that has no verdict yet.

    Args:
        folder: of patches; the verdicts are written there.
        tree: what they are applied to.
        coverage: which tests are asked first.
        killer: called with the files that are changed, tests and a limit in seconds; it names the test that fails, or
            gives "" where none does.

    Returns:
        How many of the folder's faults the suite does not kill.

    Raises:
        SystemExit: there is no patch, one does not apply, or the tree does not come back.
    """
    kept = folder / VERDICTS
    verdicts = dict(line.split(" ", 1) for line in kept.read_text().splitlines()) if kept.exists() else {}
    patches = sorted(folder.glob("*.patch"))
    if not patches:
        raise SystemExit(f"mutate: {folder} has no *.patch")
    for path in patches:
        if path.name in verdicts:
            continue
        patch = path.read_text(encoding="utf-8")
        tests, files = tests_for(patch, coverage), {file for file, _ in changed_lines(patch)}
        _apply(path, tree)
        try:
            by = killer(files, tests, _STARTING_S + _FACTOR * sum(coverage.seconds.values()))
        finally:
            _apply(path, tree, "--reverse")
        verdicts[path.name] = f"killed by {by}" if by else f"survived {len(tests)} tests"
        with kept.open("a", encoding="utf-8") as file:
            file.write(f"{path.name} {verdicts[path.name]}\n")
        print(path.name, verdicts[path.name], flush=True)
    return sum(verdicts[path.name].startswith("survived") for path in patches)


def _apply(path: Path, tree: Path, *options: str) -> None:
    # The tree lies in a folder that its own repository ignores; git would then leave out all files, silently.
    words = ["git", "apply", "-p1", "--whitespace=nowarn", *options, str(path.resolve())]
    environment = {"GIT_CEILING_DIRECTORIES": str(tree.parent), "PATH": "/usr/local/bin:/usr/bin:/bin"}
    done = subprocess.run(words, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"mutate: {path} does not apply: {done.stderr.strip()}")
