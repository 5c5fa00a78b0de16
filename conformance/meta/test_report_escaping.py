"""Whatever an implementation says, the page stays the page: no markup of its own, no line turned round, no flood."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conformance.harness import cli
from conformance.harness.page import Sources, to_html
from conformance.harness.page.markup import TEXT_MAX, Markup, element, plain
from conformance.meta.pages import Node, bug, case, evidence, parse, report, requirement, ruling

_HOSTILE = (
    "</script><script>alert(1)</script>",
    "</style><img src=x onerror=alert(1)>",
    "\"' onmouseover='alert(1)",
    "<!-- -->]]>&amp;&#60;b>",
    "\x00\x07\x1b[31m\x7f\x85\u2028",
    "\u202egnp.exe\u2066\u200f\u061c",
    "\ud800\udfff lone",
    "</title></head><body data-exit-code=0>",
)
_TEXTS = st.one_of(st.sampled_from(_HOSTILE), st.text(st.characters(exclude_categories=()), max_size=40))


def _shape(node: Node) -> list[object]:
    """Tags, classes and names of attributes: what a text must not change."""
    return [
        (child.tag, child.classes, sorted(child.attributes), _shape(child))
        for child in node.children
        if isinstance(child, Node)
    ]


def _page(text: str) -> str:
    """A page that has ``text`` at every place where an implementation, a test or a bench may put one."""
    parts = dict.fromkeys(("cause", "message", "got", "expected", "where", "program", "command"), f"x{text}")
    tests = [case("failed", name=f"x{text}", text=f"x{text}", **parts), case("failed", text=f"x{text}")]
    entry = requirement("KV-001", *tests, bugs=[bug("b", "survived")], sentence=f"x{text}")
    entry["planted"][0].update(bug=f"x{text}", sentence=f"x{text}")
    skipped = requirement("KV-002", case("skipped", text=f"x{text}"))
    deviation = {"requirement": "KV-001", "kind": "xfail", "reason": f"x{text}", "tracker": f"x{text}"}
    facts = {"name": f"x{text}", "version": f"x{text}", "file": f"x{text}", "build": {f"x{text}": [f"x{text}"]}}
    found = report(entry, skipped, deviations=[deviation], implementation=facts, profile=f"x{text}", seed=f"x{text}")
    found["areas"] = dict.fromkeys(found["areas"], f"x{text}")
    older = {**found, "started": f"2026-10-01 x{text}"}
    gate = evidence((f"x{text}", "claim", 1.0, ruling("pass", 2.0, 1.5, 3.0), ruling("fail", 0.5, 0.4, 0.6)))
    gate["implementation"] = gate["outcomes"][0]["reason"] = gate["outcomes"][0]["sentence"] = f"x{text}"
    return to_html(Sources([older, found], [gate]))


_PLAIN = _shape(parse(_page("plain")))


@given(_TEXTS)
@example(_HOSTILE[0])
@example(_HOSTILE[3])
@example("# 1")
def test_a_text_stays_a_text(text: str) -> None:
    page = _page(text)
    tree = parse(page)
    found = _shape(tree)
    # A cause with "#" is explained; nothing else depends on what a text says.
    if "#" not in text:
        assert found == _PLAIN
    assert [node.text for node in tree.every("script")] == [node.text for node in parse(_page("")).every("script")]
    shown = " ".join(tree.one("body").text.split())
    assert " ".join(plain(f"x{text}").split()) in shown
    # What no reader sees, or what turns a line round, is written out; a file of it can be written.
    assert all(c.isprintable() or c in "\n\t" for c in page.replace("\r", ""))
    page.encode("utf-8")


def test_a_flood_is_cut_and_says_so() -> None:
    flood = "<&\u202e" * 350_000
    began = time.perf_counter()
    page = to_html(Sources([report(requirement("KV-001", case("failed", error=flood, cause=flood[:160])))]))
    assert time.perf_counter() - began < 20
    assert len(page) < 12 * TEXT_MAX + 60_000
    assert f"and {len(flood) - TEXT_MAX} more characters, which the JSON report has" in page


def test_attributes_and_children_are_escaped_unless_they_are_markup() -> None:
    assert element("p", "<b>", Markup("<i></i>"), title='"<') == '<p title="&quot;&lt;">&lt;b&gt;<i></i></p>'
    assert element("input", hidden=True, value=None, disabled=False) == "<input hidden>"
    assert plain("a\tb\n\x00\u202e\u00e9\u05d0") == "a\tb\n\\x00\\u202e\u00e9\u05d0"


@pytest.mark.parametrize("text", _HOSTILE)
def test_a_report_of_hostile_texts_goes_through_the_command(tmp_path: Path, text: str) -> None:
    source, out = tmp_path / "r.json", tmp_path / "r.html"
    source.write_text(json.dumps(report(requirement("KV-001", case("failed", error=text)))), encoding="utf-8")
    assert cli.main(["report", str(source), "--html", str(out), "--junit", str(tmp_path / "j.xml")]) == 0
    assert "KV-001" in parse(out.read_text(encoding="utf-8")).text
