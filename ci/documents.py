"""Writes the pages of docs/ that are made, not written: names by component, requirements, and errors.

    python ci/documents.py            writes docs/<stem>-reference.md, docs/requirements.md and docs/errors.md
    python ci/documents.py --check    exits with 1, and names them, where they are not what it would write
    python ci/documents.py --fill     also breaks lines of prose in README and docs at 100 columns

The library and the suite have to be those of this tree, by PYTHONPATH; or, as `ci/setup` installs them, the same files.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEMS = ("checkpoint", "kvstore", "offload", "pipeline")
# What docstrings of a component speak of and what is not among its names: what its classes have in common.
SHARED_NAMES = {"pipeline": {"Pipeline": "twinproof.pipeline.driver.Pipeline"}}
PACKAGES = ("twinproof", "refimpl", "fastimpl", "conformance")
WIDTH = 100
OTHERS = {ROOT / "docs/figures.md"}  # Made by `twinproof bench figures`, which has its own check.
_MADE = "<!-- Made by ci/documents.py: change the docstrings instead. -->\n\n"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, the file it is said to be, its text, and where it begins."""

    language: str
    title: str
    text: str
    place: str


def blocks(page: Path) -> Iterator[Block]:
    """Every fenced block of a page. Raises ValueError where one does not end."""
    lines = page.read_text(encoding="utf-8").splitlines(keepends=True)
    began: int | None = None
    for number, line in enumerate(lines, start=1):
        if not line.startswith("```"):
            continue
        if began is None:
            began = number
            continue
        place = f"{page.relative_to(ROOT) if page.is_relative_to(ROOT) else page.name}:{began}"
        language, _, more = lines[began - 1][3:].strip().partition(" ")
        title = re.search(r'title="([^"]+)"', more)
        yield Block(language, title.group(1) if title else "", "".join(lines[began : number - 1]), place)
        began = None
    if began is not None:
        raise ValueError(f"{page}:{began}: a block without an end")


def too_wide(page: Path) -> Iterator[str]:
    """Lines of prose beyond 100 columns; tables, blocks and lines that cannot be broken are none."""
    inside = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```"):
            inside = not inside
        elif not inside and not line.startswith(("|", "<!--", "![")) and len(line) > WIDTH and " " in line.strip():
            yield f"{page.name}:{number}"


def dead_links(page: Path) -> Iterator[str]:
    """Targets of a page's links that are no file; addresses of other places are not looked at."""
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:", target) and not (page.parent / target).exists():
            yield f"{page.name}: {target}"


_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_END = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z\"(*])")
_WORD = re.compile(r"[\w'%/.-]*\w[\w'%/.-]*")


def sentences(page: Path) -> list[list[str]]:
    """The words of each sentence of a page's prose; a piece of code is one word, blocks and tables have none."""
    text = re.sub(r"```.*?```|<!--.*?-->", "\n\n", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    paragraphs, lines = [], list[str]()
    for line in [*text.splitlines(), ""]:
        ends = not line.strip() or line.startswith(("#", "|", "!["))
        if ends or re.match(r"\s*(?:[-*]|\d+\.) ", line):
            paragraphs.append(" ".join(lines))
            lines = []
        if not ends:
            lines.append(re.sub(r"^\s*(?:[-*]|\d+\.) ", "", line).strip())
    plain = [_LINK.sub(r"\1", re.sub(r"`[^`]*`", "Code", paragraph)) for paragraph in paragraphs]
    return [words for paragraph in plain for one in _END.split(paragraph) if (words := _WORD.findall(one))]


def filled(text: str) -> str:
    """A page whose prose is broken at 100 columns; headings, tables and blocks stay."""
    out: list[str] = []
    paragraph: list[str] = []
    inside = False

    def flush() -> None:
        if not paragraph:
            return
        first = paragraph[0]
        marker = re.match(r"\s*(?:[-*]|\d+\.) ", first)
        indent = " " * len(marker.group()) if marker else re.match(r"\s*", first).group()  # type: ignore[union-attr]
        words = " ".join(line.strip() for line in paragraph)
        begins = marker.group() if marker else indent
        body = words[len(begins.strip()) :].strip() if marker else words
        out.extend(
            textwrap.wrap(
                body,
                WIDTH,
                initial_indent=begins,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
        paragraph.clear()

    for line in text.splitlines():
        fence = line.lstrip().startswith("```")
        if inside or fence or not line.strip() or line.startswith(("#", "|", "<!--", "![")):
            flush()
            out.append(line)
            inside ^= fence
        elif re.match(r"\s*(?:[-*]|\d+\.) ", line):
            flush()
            paragraph.append(line)
        else:
            paragraph.append(line)
    flush()
    return "\n".join(out) + "\n"


class _Plain(str):
    """An annotation that prints itself without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _plain(annotation: Any) -> Any:
    return _Plain(annotation) if isinstance(annotation, str) else annotation


def _signature(value: Any, name: str) -> str:
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    parameters = [one.replace(annotation=_plain(one.annotation)) for one in found.parameters.values()]
    text = str(found.replace(parameters=parameters, return_annotation=_plain(found.return_annotation)))
    # What a default or an annotation prints of a module's inside says nothing to a reader.
    text = re.sub(r"<([\w.]+) object at 0x[0-9a-f]+>", r"\1()", text)
    text = re.sub(r"<function ([\w.]+) at 0x[0-9a-f]+>", r"\1", text)
    inside = r"(?:twinproof|fastimpl|refimpl|typing|collections\.abc|pathlib)(?:\.[a-z_]\w*)*\.(?=[A-Z])"
    text = re.sub(r"<class '([\w.]+)'>", r"\1", re.sub(inside, "", text))
    if len(name + text) <= WIDTH:
        return name + text
    inside, _, answer = text[1:].rpartition(")")
    parts = _arguments(inside)
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){answer}"


def _arguments(text: str) -> list[str]:
    """``a: X[b, c], d`` cut at the commas outside of brackets and strings."""
    parts, depth, quote, start = [], 0, "", 0
    for position, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    return [*parts, text[start:].strip()]


# What a class of an implementation says of one that both share.
_SHARED = re.compile(
    r"^(?:Takes the arguments of|.*; see) ``(twinproof\.[\w.]+)``(?: for the arguments)?\.$", re.MULTILINE
)


def _said(value: Any) -> str:
    text = inspect.getdoc(value) or ""
    if found := _SHARED.search(text):
        # A reader of the page has to find the arguments there.
        module, _, name = found[1].rpartition(".")
        shared = inspect.getdoc(getattr(importlib.import_module(module), name)) or ""
        more = shared.partition("\n\n")[2]
        text = text[: found.start()] + more + text[found.end() :] if found[0].startswith("Takes") else shared
    return text.replace("``", "`").strip()


def _members(value: type) -> Iterator[tuple[str, Any]]:
    for name, member in sorted(inspect.getmembers(value)):
        own = getattr(member, "__module__", "") or ""
        if name.startswith("_") or not own.startswith(("twinproof", "refimpl", "fastimpl")):
            continue
        if inspect.isfunction(member) or inspect.ismethod(member):
            yield name, member


def reference(stem: str) -> str:
    """The page of a component's public names, from ``fastimpl``'s signatures and docstrings."""
    module = importlib.import_module(f"fastimpl.{stem}")
    out = [f"# {stem}: names\n\n{_MADE}Names of `fastimpl.{stem}`; `refimpl.{stem}` has the same.\n\n"]
    for name in sorted(module.__all__):
        value = getattr(module, name)
        out.append(f"## {name}\n\n")
        if not callable(value):
            out.append(f"`{type(value).__name__}`\n\n")
            continue
        if inspect.isclass(value) and issubclass(value, enum.Enum):
            out.append(f"One of {', '.join(f'`{member}`' for member in value.__members__)}.\n\n")
        else:
            out.append(f"```text\n{_signature(value, name)}\n```\n\n")
        if said := _said(value):
            out.append(f"{_block(said)}\n\n")
        if inspect.isclass(value):
            for method, member in _members(value):
                first = _said(member).partition("\n\n")[0].replace("\n", " ")
                out.append(f"- `{method}`: {first}\n" if first else f"- `{method}`\n")
            out.append("\n")
    for name, path in SHARED_NAMES.get(stem, {}).items():
        place, _, attribute = path.rpartition(".")
        out.append(f"## {name}\n\n{_block(_said(getattr(importlib.import_module(place), attribute)))}\n")
    return re.sub(r"\n{3,}", "\n\n", "".join(out)).rstrip() + "\n"


def _block(said: str) -> str:
    """A docstring, whose indented parts keep their lines."""
    first, _, rest = said.partition("\n\n")
    return first if not rest else f"{first}\n\n```text\n{rest}\n```"


def requirements() -> str:
    """The page of all requirements: id, sentence, test."""
    from conformance.harness import collect_requirements

    out = [f"# Requirements\n\n{_MADE.replace('the docstrings', '@requirement')}"]
    found = collect_requirements()
    for stem in STEMS:
        of_stem = [requirement for requirement in found if requirement.stem == stem]
        out.append(f"## {stem}: {len(of_stem)}\n\n| id | sentence | test |\n| --- | --- | --- |\n")
        for one in of_stem:
            sentence = " ".join(one.sentence.split()).replace("|", "\\|")
            out.append(f"| {one.id} | {sentence} | `{one.module.rpartition('.')[2]}.{one.function}` |\n")
        out.append("\n")
    return "".join(out).rstrip() + "\n"


_ERRORS = """All derive from `twinproof.TwinproofError` (`twinproof.errors`), and carry `got`, `expected` and `where`.
Each is an error of Python's own kinds too, so that code that catches those goes on to work. DCP wraps what a rank
raises in its `CheckpointException`: there, in `failures`, they keep their class and what they carry. It derives
from `BaseException`: `except Exception` around a save or load passes it by.
"""


def errors() -> str:
    """The page of all errors, from their docstrings."""
    module = importlib.import_module("twinproof.errors")
    lines = ["| error | when | also a |", "| --- | --- | --- |"]
    for name in sorted(set(module.__all__) - {"TwinproofError"}):
        error = getattr(module, name)
        when = _said(error).partition("\n\n")[0].replace("\n", " ")
        parents = [base for base in error.__mro__[1:] if base.__module__ in ("builtins", module.__name__)]
        kind = next(base for base in parents if base is not module.TwinproofError)
        lines.append(f"| `{name}` | {when} | `{kind.__name__}` |")
    return f"# Errors\n\n{_MADE}{_ERRORS}\n" + "\n".join(lines) + "\n"


def made() -> dict[Path, str]:
    """Every page that this program writes, with its text."""
    pages = {ROOT / f"docs/{stem}-reference.md": filled(reference(stem)) for stem in STEMS}
    return {**pages, ROOT / "docs/requirements.md": requirements(), ROOT / "docs/errors.md": filled(errors())}


def foreign(root: Path = ROOT) -> list[str]:
    """Modules of ours that were imported and are not what the tree says: an older wheel's pages are not the tree's."""
    found = []
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] not in PACKAGES or not (file := getattr(module, "__file__", None)):
            continue
        place = root.joinpath(*name.split("."))
        source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if not source.is_file() or source.read_bytes() != Path(file).read_bytes():
            found.append(f"{name} from {file}")
    return found


def main() -> int:
    """1 where a page is not what it has to be, and --check was given; 2 where the packages are not the tree's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--fill", action="store_true")
    arguments = parser.parse_args()
    stale, pages = [], made()
    if wrong := foreign():
        print(f"documents: {len(wrong)} modules are not this tree's, first {wrong[0]}", file=sys.stderr)
        print(f"expected those of {ROOT.name}: PYTHONPATH=. python ci/documents.py, or ci/setup", file=sys.stderr)
        return 2
    for page, text in pages.items():
        if not page.is_file() or page.read_text(encoding="utf-8") != text:
            stale.append(page)
            if not arguments.check:
                page.write_text(text, encoding="utf-8")
    if arguments.fill:
        for page in {ROOT / "README.md", *ROOT.glob("docs/**/*.md")} - OTHERS - pages.keys():
            page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    for page in stale:
        print(f"{page.relative_to(ROOT)}: {'is not current: python ci/documents.py' if arguments.check else 'written'}")
    return 1 if arguments.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
