"""Programs in README and docs run as they stand, commands parse, links lead somewhere, and prose keeps its width."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from conformance.harness import cli
from conformance.harness.capabilities import WORDS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))

import page_commands  # noqa: E402
from checks import DOCUMENTED_PROGRAMS  # noqa: E402
from documents import OTHERS, STEMS, Block, blocks, dead_links, foreign, sentences, too_wide  # noqa: E402

PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
MADE = {ROOT / f"docs/{stem}-reference.md" for stem in STEMS} | {ROOT / "docs/requirements.md"}
WRITTEN = [page for page in PAGES if page not in MADE | OTHERS]
LANGUAGES = {"python", "cpp", "diff", "text", ""}
_FORKED = """
import os, sys, traceback, warnings
import torch, torch.distributed.checkpoint
import fastimpl.checkpoint, fastimpl.kvstore, fastimpl.offload, fastimpl.pipeline
for name, folder in zip(sys.argv[1::2], sys.argv[2::2]):
    text = open(name, encoding="utf-8").read()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.chdir(folder)
            exec(compile(text, name, "exec"), {"__name__": "__main__"})
            code = 0
        except BaseException:
            print(f"FAILED {name}", file=sys.stderr)
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print("RAN", name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def _programs() -> Iterator[tuple[Block, list[Block]]]:
    """Each program of a page that the suite does not run, and the page's blocks that are files."""
    for page in PAGES:
        of_suite = DOCUMENTED_PROGRAMS.get(str(page.relative_to(ROOT)))
        said = (ROOT / of_suite).read_text(encoding="utf-8") if of_suite else None
        files = [block for block in blocks(page) if block.title]
        yield from ((block, files) for block in blocks(page) if block.language == "python" and block.text != said)


def test_programs_run(tmp_path: Path) -> None:
    # torch is imported once, and each program gets a process and a folder of its own. One that fails has to be seen.
    programs = {f"{re.sub('[/:]', '-', block.place)}.py": (block.text, files) for block, files in _programs()}
    assert len(programs) >= 12
    programs["fails.py"] = ("assert fastimpl\n", [])
    words: list[str] = []
    for number, (name, (text, files)) in enumerate(programs.items()):
        (folder := tmp_path / str(number)).mkdir()
        for file in files:
            (folder / file.title).write_text(file.text, encoding="utf-8")
        (path := tmp_path / name).write_text(text, encoding="utf-8")
        words += [str(path), str(folder)]
    command = [sys.executable, "-P", "-W", "ignore", "-c", _FORKED, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    ran = dict(re.findall(r"^RAN .*/(\S+) (-?\d+)$", done.stdout, re.MULTILINE))
    assert ran == {**dict.fromkeys(programs, "0"), "fails.py": "1"}, done.stderr[-6000:]
    assert "NameError" in done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_languages_are_known(page: Path) -> None:
    unknown = [block.place for block in blocks(page) if block.language not in LANGUAGES]
    assert unknown == [], f"expected one of {sorted(LANGUAGES)}"


def test_scripts_exist() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for script in re.findall(r"(?:bash |python )((?:ci|examples)/[\w./-]+)", text):
            assert (ROOT / script).is_file(), f"{page.relative_to(ROOT)}: {script}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert list(dead_links(page)) == []


def test_a_dead_link_is_seen(tmp_path: Path) -> None:
    (page := tmp_path / "page.md").write_text("[a](page.md#x) [b](https://example.org) [c](gone.md)\n")
    assert list(dead_links(page)) == ["page.md: gone.md"]


def test_width() -> None:
    assert [place for page in PAGES if page not in OTHERS for place in too_wide(page)] == []


def test_what_is_too_wide(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{'a ' * 60}\n| {'a ' * 60}\n```\n{'a ' * 60}\n```\n- b\n{'c' * 120}\n")
    assert [place.rpartition(":")[2] for place in too_wide(page)] == ["1"]


# A sentence has about 25 words at most; a list of cases, held together by colons and semicolons, may have more.
WORDS_MAX, WORDS_MEAN = 40, 25


@pytest.mark.parametrize("page", [*WRITTEN, ROOT / "CONTRIBUTING.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_short(page: Path) -> None:
    found = sentences(page)
    assert [" ".join(words) for words in found if len(words) > WORDS_MAX] == []
    assert sum(map(len, found)) <= WORDS_MEAN * len(found)


def test_what_a_sentence_is(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = "# Head\n\nOne `a b c` two.\nThree [four](page.md): Five\n- six\n- seven\n\n| a | b |\n```\nno. No\n```\n"
    page.write_text(text)
    found = [["One", "Code", "two."], ["Three", "four"], ["Five"], ["six"], ["seven"]]
    assert sentences(page) == found


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_generated_pages_are_current() -> None:
    command = [sys.executable, "-P", str(ROOT / "ci/documents.py"), "--check"]
    environment = {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_pages_of_another_tree_are_not_made(tmp_path: Path) -> None:
    assert foreign() == []
    # A tree in which a file has another text, and one that has none of them.
    (package := tmp_path / "twinproof").mkdir()
    (package / "__init__.py").write_text("# Another one.\n", encoding="utf-8")
    import twinproof

    found = foreign(tmp_path)
    assert f"twinproof from {twinproof.__file__}" in found
    assert any(name.startswith("twinproof.errors from ") for name in found)


def _help(words: tuple[str, ...]) -> str:
    text = io.StringIO()
    with pytest.raises(SystemExit) as done, redirect_stdout(text):
        sys.exit(cli.main([*words, "--help"]))
    assert done.value.code in (0, None), words
    return text.getvalue()


def test_commands_have_their_options() -> None:
    # Of each line of a block, the options that it gives are ones that its command's help names.
    wanted: dict[tuple[str, ...], set[str]] = {}
    for page in PAGES:
        for block in blocks(page):
            for line in block.text.splitlines() if block.language == "" else ():
                words = line.partition("#")[0].split()
                if words[:1] == ["twinproof"] and len(words) > 1:
                    deeper = words[1] == "bench" and words[2] in ("compare", "history", "plot", "figures")
                    command = tuple(words[1 : 2 + deeper])
                    wanted.setdefault(command, set()).update(word for word in words if word.startswith("--"))
    assert {("verify",), ("bench",), ("bench", "compare"), ("new-impl",)} <= wanted.keys()
    for command, options in wanted.items():
        text = _help(command)
        assert [option for option in sorted(options) if option.partition("=")[0] not in text] == [], command


def test_pages_with_shell_lines_are_run_at_night() -> None:
    # docs/first-hour.md has a script of its own, the recipe of docs/simt.md a test of the suite.
    of_others = {"docs/first-hour.md", "docs/simt.md"}
    shown = {
        str(page.relative_to(ROOT))
        for page in [*WRITTEN, ROOT / "conformance/README.md"]
        for block in blocks(page)
        if block.language == "" and block.text.split()[0] in page_commands.COMMANDS
    }
    assert shown - of_others == set(page_commands.PAGES)
    lines = [line for name in page_commands.PAGES for block in blocks(ROOT / name) for line in block.text.splitlines()]
    said = {line.partition("  #")[0].strip() for line in lines}
    assert page_commands.ELSEWHERE.keys() <= said, "an exception that no page needs"


def test_a_line_that_fails_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```\npython -c 'print(40 + 2)'\n```\n\n```\n42\n```\n", encoding="utf-8")
    assert page_commands.run_page(page, tmp_path) == []
    for before, after, said in (("42\n", "43\n", "nothing printed '43'"), ("print(40 + 2)", "exit(3)", "status 3")):
        page.write_text(page.read_text(encoding="utf-8").replace(before, after), encoding="utf-8")
        assert said in page_commands.run_page(page, tmp_path)[0]


def test_no_run_stands_twice(tmp_path: Path) -> None:
    out = tmp_path / "hour/out"
    out.mkdir(parents=True)
    (out / "mine.json").touch()
    (out / "kvstore.json").write_text(json.dumps({"version": 1, "created": "2026-11-28T23:58:00+00:00"}))
    page_commands.prepare(tmp_path / "hour", tmp_path)
    for side in ("before", "after"):
        runs = [json.loads(path.read_text(encoding="utf-8")) for path in (tmp_path / "runs" / side).iterdir()]
        assert len({run["created"] for run in runs}) == 3
        assert all(run["version"] == 1 for run in runs)


def test_the_page_has_the_words_of_capabilities() -> None:
    page = (ROOT / "docs/test-your-own.md").read_text(encoding="utf-8").splitlines()
    rows = [f"| {stem} | `{word}` | {said} |" for stem, words in WORDS.items() for word, said in words.items()]
    begin = page.index("| component | word | what the suite asks where it is declared |") + 2
    assert page[begin : begin + len(rows) + 1] == [*rows, ""]
