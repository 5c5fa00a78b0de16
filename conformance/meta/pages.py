"""Reports to draw pages of, and a parser that refuses a page whose elements do not close."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

from conformance.harness.page import Sources, to_html
from conformance.harness.report import KIND

__all__ = ["Node", "bug", "case", "evidence", "page_of", "parse", "report", "requirement", "ruling"]

_NO_END = ("meta", "br", "input")


@dataclass
class Node:
    """An element: its attributes, and its children, of which texts are strings."""

    tag: str
    attributes: dict[str, str]
    children: list[Node | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text inside."""
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    @property
    def classes(self) -> list[str]:
        """Its classes."""
        return self.attributes.get("class", "").split()

    def every(self, tag: str | None = None, class_: str | None = None) -> Iterator[Node]:
        """The elements inside, in order, of a tag and of a class."""
        for child in self.children:
            if isinstance(child, Node):
                if tag in (None, child.tag) and (class_ is None or class_ in child.classes):
                    yield child
                yield from child.every(tag, class_)

    def one(self, tag: str | None = None, class_: str | None = None, **attributes: str) -> Node:
        """The only element of a tag, a class and attributes."""
        found = [
            node
            for node in self.every(tag, class_)
            if all(node.attributes.get(key) == value for key, value in attributes.items())
        ]
        assert len(found) == 1, f"expected one {tag} {class_} {attributes}, got {len(found)}"
        return found[0]


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Node("", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"attributes of {tag} repeat: {names}"
        node = Node(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(node)
        if tag not in _NO_END:
            self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        node = self.open.pop()
        assert node.tag == tag, f"got </{tag}>, expected </{node.tag}>"

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data!r}")


def parse(page: str) -> Node:
    """The tree of a page; an element that is not closed where it should be is an error."""
    parser = _Parser()
    parser.feed(page)
    parser.close()
    assert parser.open == [parser.root], f"not closed: {[node.tag for node in parser.open[1:]]}"
    return parser.root


def page_of(*reports: dict[str, Any], **more: Any) -> Node:
    """The parsed page of some reports; ``bench`` and ``mutants`` go to :class:`Sources`."""
    return parse(to_html(Sources([*reports], **more)))


def case(outcome: str = "passed", *, name: str = "test_x", text: str = "", **failure: str) -> dict[str, Any]:
    """A test of a requirement with its whole text; ``failure`` has the parts of its failure."""
    if failure:
        failure = {"cause": "bytes differ", "command": f"pytest {name}", **failure}
    found = {"nodeid": name, "outcome": outcome, "duration_s": 0.5, "message": text}
    return {**found, "failure": failure} if failure else found


def bug(name: str, verdict: str = "killed", *places: str) -> dict[str, Any]:
    """A planted bug of a requirement."""
    return {
        "bug": name,
        "sentence": f"{name} is wrong.",
        "verdict": verdict,
        "duration_s": 0.1,
        "message": "",
        "places": list(places),
    }


def requirement(
    identifier: str,
    *tests: dict[str, Any],
    bugs: Sequence[dict[str, Any]] = (),
    sentence: str = "",
    area: str = "values",
) -> dict[str, Any]:
    """A requirement with its tests; its outcome is the worst of theirs."""
    order = ("error", "failed", "xfailed", "passed", "skipped", "none")
    stem = {"KV": "kvstore", "PIPE": "pipeline", "OPT": "offload", "CKPT": "checkpoint"}[identifier.rpartition("-")[0]]
    return {
        "id": identifier,
        "stem": stem,
        "sentence": sentence or f"{identifier} MUST hold.",
        "test": f"conformance.{stem}.test_{area}::test_x",
        "outcome": min((each["outcome"] for each in tests), key=order.index, default="none"),
        "duration_s": 1.0,
        "tests": [*tests],
        "planted": [*bugs],
    }


def report(
    *requirements: dict[str, Any], name: str = "mine", started: str = "2026-11-01T00:00:00+00:00", **more: Any
) -> dict[str, Any]:
    """A report, as ``document`` makes it."""
    outcomes = Counter(found["outcome"] for found in requirements)
    verdicts = Counter(each["verdict"] for found in requirements for each in found["planted"])
    is_red = bool(outcomes["failed"] + outcomes["error"] + verdicts["survived"] + verdicts["no kill"])
    return {
        "kind": KIND,
        "schema": 1,
        "started": started,
        "duration_s": 12.5,
        "exit_status": int(is_red),
        "implementation": {"name": name, "version": "1.0", "file": "mine.py", "build": "unavailable"},
        "profile": "ci",
        "seed": "derandomised",
        "planted_mode": "all" if verdicts else "none",
        "deviations": [],
        "environment": {
            "versions": {"python": "3.11", "torch": "2.13", "safetensors": "0.8", "hypothesis": "6"},
            "cpu": {"model": "a CPU", "count": 2, "flags": []},
            "gpus": "none",
            "file_system": {"type": "ext4"},
        },
        "summary": {"outcomes": dict(outcomes), "planted": dict(verdicts)},
        "areas": {found["test"].split("::")[0]: f"About {found['stem']}." for found in requirements},
        "requirements": [*requirements],
        **more,
    }


def ruling(result: str, value: float | None = None, low: float | None = None, high: float | None = None) -> Any:
    """A judgement of a gate's subject or control."""
    return {"result": result, "reason": f"it is {result}", "value": value, "low": low, "high": high}


def evidence(*outcomes: tuple[str, str, float, Any, Any], **more: Any) -> dict[str, Any]:
    """Evidence of a bench: (gate, kind, bound, subject, control) each, with the result of the subject."""
    return {
        "version": 1,
        "implementation": "mine",
        "form": "full",
        "created": "2026-11-01T00:00:00+00:00",
        "environment": {"cpu": {"model": "a CPU", "count": 2}},
        "workloads": {"shape": {"component": "kvstore"}},
        "rounds": {},
        "outcomes": [
            {
                "gate": gate,
                "kind": kind,
                "sentence": f"{gate} MUST be fast.",
                "workload": "shape",
                "bound": bound,
                "result": "fail" if control["result"] == "pass" else subject["result"],
                "reason": "a reason",
                "subject": subject,
                "control": control,
            }
            for gate, kind, bound, subject, control in outcomes
        ],
        **more,
    }
