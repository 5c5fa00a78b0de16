"""The judge of ``ci/coverage``: which branch of the C++ sources never goes one of its ways under the suite?

    python ci/branches.py FOLDER [--list ci/coverage.json] [--record | --table]

``FOLDER`` has the builds with their counters (``*.gcda``); gcov says what each branch took. The ways of a branch that
were never taken are counted by file and text of the line, so that an edit elsewhere moves nothing. What an exception
would take is left out. The committed list has two parts: ``unreachable``, with the reason why nobody can get there, and
``not_crossed``, what no test takes yet, whose total may only fall. A way that stands in neither fails, and so does an
entry of which less is left than it says. ``--record`` writes ``not_crossed`` anew, and refuses a total that rose.

A line counts if its own text decides something. Templates and functions that several programs compile are one: a way
is taken if any copy of the line with the same number of branches takes it, and copies of a function that is always
inlined are one, too. Which branches a line has is the compiler's choice: the list names its release, and is compared
under that one alone.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCES = "fastimpl/csrc"
LISTED = ROOT / "ci" / "coverage.json"
_DECISIONS = re.compile(
    r"\bif (?!constexpr)\(|\bfor \((?!.* : )|\bwhile \(|STD_TORCH_CHECK\(|&&(?! ?\w+[,)])|\|\|| \? "
)
_KINDS = ("allocation", "defence", "hardware", "device", "compiler")

# File and text of a line, stripped.
Place = tuple[str, str]


@dataclass(frozen=True)
class Way:
    """One way of one branch: ``shape`` is how many ways the line has in this copy, ``index`` which of them this is."""

    line: int
    shape: int
    index: int


@dataclass(frozen=True)
class Unreachable:
    """An entry with its reason: ``ways`` are never taken; of ``sometimes`` at most so many, in some runs fewer."""

    file: str
    line: str
    ways: int
    kind: str
    reason: str
    sometimes: bool = False


@dataclass(frozen=True)
class Listed:
    """What is committed: places that nobody reaches, and how many ways of each place no test takes yet."""

    unreachable: Sequence[Unreachable] = ()
    not_crossed: Mapping[Place, int] = field(default_factory=dict)
    not_crossed_total: int = 0
    gcc: int = 0


# --- What gcov says


def ways_of(branches: Sequence[Mapping[str, Any]]) -> list[int]:
    """The counts of a line's branches without those of calls, one way of which is an exception."""
    counts: list[int] = []
    previous_falls = False
    for branch in branches:
        if branch["throw"]:
            if previous_falls:
                counts.pop()
            previous_falls = False
            continue
        counts.append(branch["count"])
        previous_falls = branch["fallthrough"]
    return counts


def merged(documents: Iterable[Mapping[str, Any]], root: Path) -> dict[str, dict[Way, int]]:
    """By file of the sources: how often each way was taken, in all copies together."""
    lines: dict[str, dict[int, dict[int, list[int]]]] = defaultdict(lambda: defaultdict(dict))
    sources = (root / SOURCES).as_posix() + "/"
    for document in documents:
        for file in document["files"]:
            path = Path(document["current_working_directory"], file["file"])
            name = path.as_posix()
            if not name.startswith(sources) or name.startswith(sources + "tests/"):
                continue
            into = lines[path.relative_to(root).as_posix()]
            for line in file["lines"]:
                counts = ways_of(line["branches"])
                known = into[line["line_number"]].setdefault(len(counts), [0] * len(counts))
                for index, count in enumerate(counts):
                    known[index] += count
    texts = {file: lines_of(root / file) for file in lines}
    return {
        file: {
            Way(number, shape, index): count
            for number, shapes in sorted(of_file.items())
            if decides(texts[file][number - 1])
            for shape, counts in folded(shapes, 2 * decisions_of(texts[file][number - 1])).items()
            for index, count in enumerate(counts)
        }
        for file, of_file in lines.items()
    }


def decisions_of(text: str) -> int:
    """How many two-way branches the text of a line has by itself."""
    return len(_DECISIONS.findall(text))


def decides(text: str) -> bool:
    """Whether a line has a branch of the source: what gcov counts in others is the compiler's, or of what they call."""
    return bool(decisions_of(text)) or "switch (" in text


def folded(shapes: Mapping[int, Sequence[int]], wanted: int = 0) -> dict[int, list[int]]:
    """The counts of a line by its number of ways, where a multiple of that number is so many copies in a row.

    A function that is always inlined has its branches once for each call in the caller, one copy behind the other.
    ``wanted``: the ways of one copy where they are known, else 0.
    """
    fits = wanted > 0 and any(shape > 0 and shape % wanted == 0 for shape in shapes)
    found: dict[int, list[int]] = {wanted: [0] * wanted} if fits else {}
    for shape, counts in sorted(shapes.items()):
        base = next((known for known in found if known > 1 and shape % known == 0), shape)
        into = found.setdefault(base, [0] * base)
        for index, count in enumerate(counts):
            into[index % base] += count
    return found


def read_counters(folder: Path) -> Iterator[dict[str, Any]]:
    """What gcov says of each file of counters below a folder.

    Raises:
        SystemExit: there are none, or gcov fails.
    """
    counters = sorted(folder.resolve().rglob("*.gcda"))
    if not counters:
        raise SystemExit(f"coverage: no counters (*.gcda) below {folder}")

    def read(path: Path) -> str:
        words = ["gcov", "--json-format", "--stdout", "--branch-probabilities", "--branch-counts", str(path)]
        done = subprocess.run(words, cwd=path.parent, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"coverage: gcov {path.name} failed:\n{done.stderr[-2000:]}")
        return done.stdout

    with ThreadPoolExecutor(2) as pool:
        for text in pool.map(read, counters):
            for line in text.splitlines():
                if line.startswith("{"):
                    yield json.loads(line)


def gcc_release() -> int:
    """The release of the compiler: another one makes other branches of the same lines."""
    done = subprocess.run(["gcc", "-dumpversion"], capture_output=True, text=True, check=True)
    return int(done.stdout.split(".")[0])


# --- The list


def read_list(path: Path, root: Path) -> Listed:
    """The committed list.

    Raises:
        SystemExit: an entry without a reason or of an unknown kind, twice the same place, a line that is no longer
            there, or a total that is not the sum.
    """
    if not path.exists():
        return Listed()
    text = json.loads(path.read_text(encoding="utf-8"))
    unreachable = [_entry(words, path) for words in text["unreachable"]]
    not_crossed = {(file, line): ways for file, lines in text["not_crossed"].items() for line, ways in lines.items()}
    places = [(each.file, each.line) for each in unreachable]
    for file, line in [*places, *not_crossed]:
        if line not in lines_of(root / file):
            raise SystemExit(f"coverage: {path.name}: {file} has no line {line!r} any more")
    if len(set(places)) < len(places):
        raise SystemExit(f"coverage: {path.name}: a place stands in unreachable twice")
    if any(ways < 1 for ways in [*not_crossed.values(), *(each.ways for each in unreachable)]):
        raise SystemExit(f"coverage: {path.name}: an entry of no ways")
    total, stated = sum(not_crossed.values()), text["not_crossed_total"]
    if total != stated:
        raise SystemExit(f"coverage: {path.name}: not_crossed_total is {stated}, the sum {total}")
    return Listed(unreachable, not_crossed, total, text["gcc"])


def _entry(words: Mapping[str, Any], path: Path) -> Unreachable:
    try:
        entry = Unreachable(**words)
    except TypeError as error:
        raise SystemExit(f"coverage: {path.name}: {error}, got {words}") from None
    if entry.kind not in _KINDS or not entry.reason.strip():
        raise SystemExit(f"coverage: {path.name}: an entry needs a reason and a kind of {_KINDS}, got {words}")
    return entry


def lines_of(path: Path) -> list[str]:
    """The lines of a source, stripped; none where there is no such file."""
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


# --- The verdict


def never_taken(found: Mapping[str, Mapping[Way, int]], root: Path) -> dict[Place, list[Way]]:
    """The ways that nothing took, by file and text of the line."""
    never: dict[Place, list[Way]] = defaultdict(list)
    for file, ways in found.items():
        lines = lines_of(root / file)
        for way, count in sorted(ways.items(), key=lambda item: (item[0].line, item[0].shape, item[0].index)):
            if not count:
                never[file, lines[way.line - 1]].append(way)
    return never


def judge(never: Mapping[Place, Sequence[Way]], listed: Listed) -> list[str]:
    """What is wrong: ways that no list has, and entries of which less is left; empty where all is as listed."""
    most: dict[Place, int] = defaultdict(int)
    least: dict[Place, int] = defaultdict(int)
    for each in listed.unreachable:
        most[each.file, each.line] += each.ways
        least[each.file, each.line] += 0 if each.sometimes else each.ways
    for place, ways in listed.not_crossed.items():
        most[place] += ways
        least[place] += ways
    wrong = []
    for place in sorted({*most, *never}):
        ways, (file, line) = never.get(place, ()), place
        if len(ways) > most[place]:
            where = ", ".join(f"{file}:{number}" for number in sorted({way.line for way in ways}))
            wrong.append(f"new: {where}: {len(ways)} ways never taken, {most[place]} listed\n    {line}")
        elif len(ways) < least[place]:
            wrong.append(f"stale: {file}: {len(ways)} ways never taken, {least[place]} listed\n    {line}")
    return wrong


def table(found: Mapping[str, Mapping[Way, int]]) -> str:
    """How many ways of each file were taken."""
    counts = {file: [*ways.values()] for file, ways in sorted(found.items())}
    counts["all"] = [count for ways in counts.values() for count in ways]
    lines = []
    for name, every in counts.items():
        taken_count = sum(count > 0 for count in every)
        share = taken_count / max(1, len(every))
        lines.append(f"{name:<48} {taken_count:>5} of {len(every):>5} ways taken {share:7.1%}")
    return "\n".join(lines)


def record(never: Mapping[Place, Sequence[Way]], listed: Listed, path: Path) -> int:
    """Write ``not_crossed`` anew, ``unreachable`` as it is; the new total.

    Raises:
        SystemExit: the total would rise.
    """
    known = {(each.file, each.line): each.ways for each in listed.unreachable}
    left = {place: len(ways) - known.get(place, 0) for place, ways in never.items()}
    left = {place: ways for place, ways in sorted(left.items()) if ways > 0}
    total = sum(left.values())
    if path.exists() and total > listed.not_crossed_total:
        raise SystemExit(
            f"coverage: {total} ways are not crossed, and {listed.not_crossed_total} were: this may only fall"
        )
    by_file: dict[str, dict[str, int]] = defaultdict(dict)
    for (file, line), ways in left.items():
        by_file[file][line] = ways
    entries = [
        {name: value for name, value in vars(each).items() if name != "sometimes" or value}
        for each in sorted(listed.unreachable, key=lambda each: (each.file, each.line))
    ]
    text = {"gcc": gcc_release(), "unreachable": entries, "not_crossed_total": total, "not_crossed": by_file}
    path.write_text(json.dumps(text, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return total


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="ci/branches.py", description=__doc__)
    parser.add_argument("folder", type=Path, help="builds with their counters")
    parser.add_argument("--list", type=Path, default=LISTED, help="the committed list")
    parser.add_argument("--record", action="store_true", help="write what is not crossed yet into the list")
    parser.add_argument("--all", action="store_true", help="print each way that was never taken, listed or not")
    parser.add_argument("--table", action="store_true", help="print how many ways were taken, and judge nothing")
    options = parser.parse_args(arguments)
    listed = read_list(options.list, ROOT)
    if listed.gcc and listed.gcc != gcc_release():
        print(f"coverage: the list is of gcc {listed.gcc}, this is {gcc_release()}: nothing can be compared")
        return 1
    found = merged(read_counters(options.folder), ROOT)
    never = never_taken(found, ROOT)
    print(table(found))
    if options.table:
        return 0
    if options.all:
        for (file, line), ways in sorted(never.items()):
            for way in ways:
                print(f"{file}:{way.line}: way {way.index + 1} of {way.shape}: {line}")
    if options.record:
        print(f"coverage: {record(never, listed, options.list)} ways are not crossed yet")
        return 0
    wrong = judge(never, listed)
    for each in wrong:
        print(each)
    nobodys_count = sum(each.ways for each in listed.unreachable)
    print(f"coverage: {nobodys_count} ways unreachable, {listed.not_crossed_total} not crossed yet, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
