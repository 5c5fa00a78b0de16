"""What differs from upstream, test by test, and what passed, file by file: strict both ways."""

from __future__ import annotations

import fnmatch
import hashlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Counts", "Ledger", "blob_of", "judge", "read_ledger"]


@dataclass(frozen=True)
class Counts:
    """Tests of one file that passed, for upstream and for ours among those."""

    upstream: int
    ours: int


@dataclass(frozen=True)
class Ledger:
    """A project's: files by (name, git blob), and differences by test name, a pattern, with their reasons."""

    project: str
    files: dict[tuple[str, str], Counts] = field(default_factory=dict)
    differences: dict[str, str] = field(default_factory=dict)


def blob_of(path: Path) -> str:
    """The name that git gives to a file's content, whatever folder it lies in."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()[:12]


def read_ledger(project: str) -> Ledger:
    """The ledger beside this module; an empty one where there is none.

    Raises:
        ValueError: an entry without a reason, or one that stands twice.
    """
    path = Path(__file__).with_name(f"{project}.toml")
    content: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    files = {(f["name"], f["blob"]): Counts(f["upstream"], f["ours"]) for f in content.get("file", [])}
    differences: dict[str, str] = {}
    for entry in content.get("difference", []):
        for test in entry["tests"]:
            if test in differences or not entry["reason"].strip():
                raise ValueError(f"{path.name}: {test} stands twice, or has no reason")
            differences[test] = entry["reason"]
    return Ledger(project, files, differences)


def judge(
    ledger: Ledger, blobs: dict[str, str], upstream: dict[str, str], ours: dict[str, str]
) -> tuple[dict[str, Counts], list[str]]:
    """Counts by file, and a sentence for everything that is not as the ledger says.

    ``blobs`` are of the files that were run, by name; ``upstream`` and ``ours`` are outcomes by ``file::Class::test``.
    """
    counts: dict[str, Counts] = {}
    wrong: list[str] = []
    used: set[str] = set()
    for name, blob in blobs.items():
        wanted = [test for test, outcome in upstream.items() if outcome == "passed" and test.startswith(f"{name}::")]
        passed = [test for test in wanted if ours.get(test) == "passed"]
        counts[name] = Counts(len(wanted), len(passed))
        if not wanted:
            wrong.append(f"{name}: nothing passes for upstream itself, so that nothing was compared")
        known = ledger.files.get((name, blob))
        if known is not None and known != counts[name]:
            wrong.append(f"{name}: {counts[name]} where the ledger has {known}")
        for test in wanted:
            pattern = next((p for p in ledger.differences if fnmatch.fnmatchcase(test, p)), None)
            if pattern is not None:
                used.add(pattern)
            if (test in passed) == (pattern is not None):
                wrong.append(f"{test}: {'is mended, take it out of the ledger' if pattern else 'differs, by no entry'}")
    for pattern in ledger.differences:
        name = pattern.split("::")[0]
        if pattern not in used and (name, blobs.get(name, "")) in ledger.files:
            wrong.append(f"{pattern}: matches no test that passes for upstream")
    return counts, wrong
