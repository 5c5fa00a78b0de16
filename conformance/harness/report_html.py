"""The report as one self-contained page: no script, no network, readable when it is mailed or archived.

The picture at the top is the requirement matrix: one row per requirement, its tests in the first band and its planted
bugs in the second, one cell each.
"""

from __future__ import annotations

from html import escape
from typing import Any

__all__ = ["to_html"]

_COLOURS = {
    "passed": "#2f8f4e",
    "killed": "#2f8f4e",
    "failed": "#c4302b",
    "error": "#c4302b",
    "survived": "#c4302b",
    "no kill": "#d9822b",
    "xfailed": "#d9b32b",
    "skipped": "#9aa0a6",
    "none": "#d5d8dc",
}
_INK = "#1f2328"
_CELL, _GAP, _LABEL, _CELLS_MAX = 11, 2, 76, 40
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #1f2328; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .3rem .6rem; vertical-align: top;
border-bottom: 1px solid #d5d8dc; } pre { background: #f4f5f7; padding: .8rem; overflow: auto; white-space: pre-wrap; }
.badge { color: #fff; border-radius: .3rem; padding: .05rem .4rem; white-space: nowrap; } code { font-size: .92em; }
summary { cursor: pointer; } svg { max-width: 100%; height: auto; } .sum { font-size: 1.1rem; }
"""


def to_html(report: dict[str, Any]) -> str:
    """The page, as a complete HTML document."""
    facts = report["implementation"]
    title = escape(f"Conformance of {facts['name']} {facts['version']}")
    context = escape(
        f"{report['started']}, profile {report['profile']}, seed {report['seed']}, {report['duration_s']} s"
    )
    rows = "\n".join(_row(found) for found in report["requirements"])
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{_STYLE}</style></head><body>
<h1>{title}</h1>
<p>{context}</p>
<p class="sum">{_counts(report["summary"]["outcomes"])} {_counts(report["summary"]["planted"])}</p>
<h2>Matrix</h2>
{_picture(report["requirements"])}
<h2>Requirements</h2>
<table><thead><tr><th>id</th><th>outcome</th><th>sentence</th><th>tests</th><th>planted bugs</th></tr></thead>
<tbody>
{rows}
</tbody></table>
<h2>Known deviations</h2>
{_deviations(report["deviations"])}
<h2>Environment</h2>
<table><tbody>{_facts({**facts, **report["environment"]})}</tbody></table>
</body></html>
"""


def _badge(outcome: str, text: str | None = None) -> str:
    colour = _COLOURS.get(outcome, _INK)
    return f'<span class="badge" style="background:{colour}">{escape(text or outcome)}</span>'


def _counts(counts: dict[str, int]) -> str:
    return " ".join(_badge(name, f"{count} {name}") for name, count in counts.items())


def _row(found: dict[str, Any]) -> str:
    bad = [test for test in found["tests"] if test["message"] and test["outcome"] != "passed"]
    details = "".join(
        f"<details><summary>{escape(test['nodeid'])}: {escape(test['outcome'])}</summary>"
        f"<pre>{escape(test['message'])}</pre></details>"
        for test in bad
    )
    bugs = "<br>".join(f"{_badge(bug['verdict'])} <code>{escape(bug['bug'])}</code>" for bug in found["planted"])
    return (
        f'<tr id="{escape(found["id"])}"><td><code>{escape(found["id"])}</code></td><td>{_badge(found["outcome"])}</td>'
        f"<td>{escape(found['sentence'])}{details}</td>"
        f"<td>{len(found['tests'])} in {found['duration_s']:.2f} s</td><td>{bugs or '-'}</td></tr>"
    )


def _picture(requirements: list[dict[str, Any]]) -> str:
    step = _CELL + _GAP
    band = max((min(len(found["tests"]), _CELLS_MAX) for found in requirements), default=0)
    parts: list[str] = []
    columns = 0
    for row, found in enumerate(requirements):
        y = row * step
        parts.append(f'<text x="0" y="{y + _CELL - 2}" font-size="{_CELL - 1}">{escape(found["id"])}</text>')
        tests = [(test["outcome"], test["nodeid"]) for test in found["tests"][:_CELLS_MAX]]
        bugs = [(bug["verdict"], bug["bug"]) for bug in found["planted"]]
        cells = [(column, *cell) for column, cell in enumerate(tests)]
        cells += [(band + 1 + column, *cell) for column, cell in enumerate(bugs)]
        for column, outcome, name in cells:
            columns = max(columns, column + 1)
            title = escape(f"{found['id']} {name}: {outcome}")
            box = f'x="{_LABEL + column * step}" y="{y}" width="{_CELL}" height="{_CELL}"'
            parts.append(f'<rect {box} fill="{_COLOURS.get(outcome, _INK)}"><title>{title}</title></rect>')
    width, height = _LABEL + columns * step, max(1, len(requirements)) * step
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="monospace" role="img" aria-label="requirement matrix">{"".join(parts)}</svg>'
        f"<p>Left: tests (the first {_CELLS_MAX}). Right: planted bugs. Hover for names.</p>"
    )


def _deviations(deviations: list[dict[str, str]]) -> str:
    if not deviations:
        return "<p>None.</p>"
    items = (
        f"<li><code>{escape(entry['requirement'])}</code> {escape(entry['kind'])}: {escape(entry['reason'])} "
        f"({escape(entry['tracker'])})</li>"
        for entry in deviations
    )
    return f"<ul>{''.join(items)}</ul>"


def _facts(facts: dict[str, Any]) -> str:
    return "".join(
        f"<tr><th>{escape(name)}</th><td><code>{escape(_text(value))}</code></td></tr>" for name, value in facts.items()
    )


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_text(inner)}" for name, inner in value.items())
    return " | ".join(_text(inner) for inner in value) if isinstance(value, list) else str(value)
