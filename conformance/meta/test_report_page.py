"""The page of a report: its verdict first, every failure whole, numbers that add up, nothing from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.harness import cli
from conformance.harness.page import Sources, read_sources, to_html
from conformance.harness.report import ReportError, read_json, verdict
from conformance.meta.pages import Node, bug, case, page_of, parse, report, requirement

_FAILURE = {"message": "1 of 2 elements differ", "got": "3", "expected": "2", "where": "w[0]", "program": "x = 1"}


def _cards(page: Node) -> list[Node]:
    return [*page.every("details", "card")]


def test_the_verdict_is_the_first_line_and_the_exit_code() -> None:
    green, red = requirement("KV-001", case()), requirement("KV-002", case("failed", **_FAILURE))
    skipped = requirement("KV-003", case("skipped", text="lacks it"))
    alive = requirement("KV-004", case(), bugs=[bug("lives", "survived"), bug("dies")])
    cases: list[tuple[dict[str, Any], int, str]] = [
        (report(green, skipped), 0, "passed mine 1.0: 1 of 2 requirements hold, 1 skipped"),
        (report(green, red), 1, "failed mine 1.0: 1 of 2 requirements do not hold"),
        (report(green, alive), 1, "failed mine 1.0: 1 of 2 planted bugs were not killed"),
        (report(green, exit_status=1), 1, "failed mine 1.0: a test beside the requirements failed"),
        (report(skipped), 1, "nothing ran mine 1.0: no requirement was run; that proves nothing"),
        (report(), 1, "nothing ran mine 1.0: no requirement was run; that proves nothing"),
        (report(green, exit_status=3), 2, "not finished mine 1.0: the run did not end: an internal error"),
        (
            report(requirement("KV-001", bugs=[bug("dies")]), planted_mode="only"),
            0,
            "passed mine 1.0: 1 of 1 planted bugs killed",
        ),
    ]
    for content, code, line in cases:
        assert verdict(content).exit_code == code, line
        page = page_of(content)
        first = next(page.one("body").every("h1"))
        assert " ".join(first.text.split()[1:]) == line
        assert first.attributes["data-exit-code"] == str(code)
        assert first.classes == ["verdict", "passed" if code == 0 else "failed"]
        assert line.split(" mine")[0] in page.one("title").text
        # Nothing that a reader sees stands before it.
        assert page.one("body").text.strip().startswith(first.text.strip())


@pytest.mark.parametrize(
    ("test", "spoilt"),
    [
        ("(checkpoint): assert_equal(checkpoint.double(1), 2)", "0"),
        ("(checkpoint): assert_equal(checkpoint.double(1), 3)", "0"),
        ("(checkpoint): assert_equal(checkpoint.double(1), 2)", "2 * x"),
        ("(kvstore): pass", None),
    ],
)
def test_the_verdict_of_a_run_is_its_exit_code(
    toy: Callable[..., pytest.RunResult], pytester: pytest.Pytester, test: str, spoilt: str | None
) -> None:
    path = pytester.path / "report.json"
    planted = None
    if spoilt is not None:
        wrong = f'wrap("toy.impl:checkpoint.double", lambda f, x: {spoilt})'
        planted = f'PLANTED = (PlantedBug("b", "is wrong", ("CKPT-001",), "toy.impl", {wrong}),)'
    done = toy(
        f'@requirement("CKPT-001", "MUST hold")\ndef test_it{test}\n',
        *("--twinproof-planted", "all", "--twinproof-report", str(path)),
        planted=planted,
    )
    found = read_json(path)
    assert found["exit_status"] == done.ret
    # A run that only skipped is green for pytest, and proves nothing.
    expected = 1 if planted is None else int(done.ret)
    assert verdict(found).exit_code == expected
    heading = next(parse(to_html(Sources([found]))).every("h1"))
    assert heading.attributes["data-exit-code"] == str(expected)


def test_every_failure_stands_there_whole_and_before_the_rest() -> None:
    raised = case("error", name="test_raises", error="KeyError: 'x'", cause="KeyError: 'x'")
    page = page_of(
        report(
            requirement("KV-001", case()),
            requirement("KV-002", case("failed", **_FAILURE), case("failed", name="test_x[2]", **_FAILURE)),
            requirement("CKPT-001", raised),
            requirement("KV-003", case("failed", name="test_z", **_FAILURE)),
        )
    )
    cards = _cards(page)
    # The difference that most requirements share comes first, and its first card is open.
    assert [card.attributes["data-id"] for card in cards] == ["KV-002", "KV-003", "CKPT-001"]
    assert ["open" in card.attributes for card in cards] == [True, False, True]
    first = {row.one("dt").text: row.one("dd").text for row in cards[0].one("dl").every("div")}
    assert first == {
        "difference": "1 of 2 elements differ",
        "got": "3",
        "expected": "2",
        "where": "w[0]",
        "minimal program": "x = 1",
        "repeat it": "pytest test_x",
    }
    assert cards[0].one("span", "sentence").text == "KV-002 MUST hold."
    assert "1 more of its 2 tests failed" in cards[0].text
    assert "test_x[2]" in cards[0].text
    assert "KeyError: 'x'" in cards[2].text
    titles = [node.attributes["id"] for node in page.every("h2")]
    assert titles == ["components", "failures", "requirements", "environment"]
    assert [link.attributes["href"] for link in page.one("ol", "overview").every("a")] == ["#cause-1", "#cause-2"]


def test_a_failure_of_an_older_report_is_shown_as_its_text() -> None:
    old = case("failed", text="requirement  KV-001: MUST\ngot  3")
    page = page_of(report(requirement("KV-001", old)))
    assert "got  3" in _cards(page)[0].text
    assert "older report" in page.one("section", "group").one("h3").text


def test_components_add_up() -> None:
    entries = [
        requirement("KV-001", case()),
        requirement("KV-002", case("failed", **_FAILURE)),
        requirement("KV-003", case("skipped", text="lacks x")),
        requirement("KV-004", case("xfailed", text="known")),
        requirement("OPT-001", case(), bugs=[bug("a"), bug("b", "no kill")]),
    ]
    page = page_of(report(*entries))
    rows = [*page.one("table", "components").one("tbody").every("tr")]
    assert [row.one("th").text for row in rows] == ["kvstore", "offload"]
    words = [[" ".join(cell.text.split()) for cell in row.every("td")] for row in rows]
    assert words == [
        ["1 of 4 ✗ 1 failed 1 skipped, 1 known to deviate", "none planted"],
        ["1 of 1", "1 of 2 ✗ 1 not killed"],
    ]
    # Each requirement has one row, and the numbers of a component are those of its rows.
    table = [*page.every("tr")]
    for row, stem in zip(rows, ("kvstore", "offload"), strict=True):
        mine = [found for found in table if found.attributes.get("data-stem") == stem]
        held = sum("passed" in found.attributes["data-outcomes"].split() for found in mine)
        assert row.text.split()[0].startswith(f"{stem}{held}")
        assert f"{held} of {len(mine)}" in row.text


def test_requirements_stand_in_areas_with_their_sentences_and_what_watches_them() -> None:
    watched = requirement("KV-002", case(), bugs=[bug("late", "killed", "twinproof.kvstore.views:View.get")])
    page = page_of(
        report(requirement("KV-001", case(), area="views"), watched, requirement("CKPT-001", case())),
        mutants={"twinproof/kvstore/views.py": (5, 6), "twinproof/checkpoint/plan.py": (2, 2)},
    )
    areas = [*page.every("section", "area")]
    assert [area.one("b").text for area in areas] == ["views", "values", "values"]
    assert "About kvstore." in areas[0].one("h4").text
    row = page.one("tr", id="KV-002")
    assert "KV-002 MUST hold." in row.text
    assert "late" in row.text
    assert row.one("code", title="late is wrong.").text == "late"
    assert "mutants of twinproof/kvstore/views.py: 5 of 6 (83%)" in row.text
    assert "mutants of" not in page.one("tr", id="KV-001").text
    cells = [cell.text for cell in page.one("table", "components").one("tbody").every("td")]
    assert "5 of 6 (83%)" in cells
    assert "2 of 2 (100%)" in cells


def test_planted_bugs_that_live_have_a_section_of_their_own() -> None:
    page = page_of(report(requirement("KV-001", case(), bugs=[bug("lives", "survived"), bug("loud", "no kill")])))
    section = page.one("section", **{"aria-labelledby": "planted"})
    assert "2 planted bugs not killed" in section.text
    assert "lives is wrong. KV-001 should have noticed; no test of the requirement noticed it." in section.text
    assert "it crashed or raised" in section.text
    assert "survived" in page.one("tr", id="KV-001").attributes["data-outcomes"].split()


def test_skips_say_why() -> None:
    page = page_of(report(requirement("KV-001", case("skipped", text="implementation mine lacks streams"))))
    assert "implementation mine lacks streams" in page.one("tr", id="KV-001").text


def test_nothing_comes_from_elsewhere_and_outcomes_have_words_and_shapes() -> None:
    text = to_html(Sources([report(requirement("KV-001", case("failed", **_FAILURE), bugs=[bug("a")]))]))
    page = parse(text)
    for node in page.every():
        for name, value in node.attributes.items():
            assert not name.startswith("on"), (node.tag, name)
            assert name not in ("src", "srcset", "action", "style", "poster", "data"), (node.tag, name)
            assert name not in ("href", "xlink:href") or value.startswith("#"), value
        assert node.tag not in ("link", "img", "iframe", "object", "embed", "base", "form ")
    assert len([*page.every("script")]) == len([*page.every("style")]) == 1
    for place in (page.one("style").text, page.one("script").text):
        assert not re.search(r"url\(|@import|https?:|//\w|fetch\(|XMLHttp|import\(|sendBeacon|new Image", place), place
    policy = page.one("meta", **{"http-equiv": "Content-Security-Policy"}).attributes["content"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    # Links lead somewhere on the page, and an id is one element's.
    ids = [node.attributes["id"] for node in page.every() if "id" in node.attributes]
    assert len(ids) == len(set(ids))
    assert {node.attributes["href"][1:] for node in page.every("a")} <= set(ids)
    for badge in page.every("span", "badge"):
        assert badge.one("span").text.strip(), badge.text
        assert len(badge.text.split()) >= 2, badge.text


def test_the_script_is_short_and_the_page_complete_without_it() -> None:
    page = page_of(report(requirement("KV-001", case())))
    script = page.one("script").text
    assert len(script.splitlines()) <= 80
    assert "hidden" in page.one("form").attributes, "controls that nothing carries out are hidden"
    assert not [node for node in page.every() if "hidden" in node.attributes and node.tag != "form"]
    for name in ("search", "outcome", "stem", "shown", "filter"):
        assert f'getElementById("{name}")' in script
        assert page.one(None, id=name)


def test_the_command_tells_files_apart_by_what_they_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "list.json": "[1]",
        "number.json": "3",
        "old.json": '{"version": 2, "outcomes": []}',
        "broken.json": '{"version": 1, "outcomes": [{"gate": "x"}]}',
        "score.json": '{"kvstore": {"a.py": {"killed_count": 1}}}',
    }
    expected = {
        "list.json": "is no report",
        "number.json": "is no report",
        "old.json": "has version 2; this reads 1",
        "broken.json": "outcomes[0] of a bench's evidence: kind: got None, expected a text",
        "score.json": "is no report",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        with pytest.raises(ReportError, match=re.escape(name)) as caught:
            read_sources([tmp_path / name])
        assert expected[name] in str(caught.value)
    assert cli.main(["report", str(tmp_path / "old.json"), "--html", str(tmp_path / "x.html")]) == 2
    assert "has version 2" in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()
    with pytest.raises(ReportError, match="neither a report nor evidence"):
        to_html(Sources())
