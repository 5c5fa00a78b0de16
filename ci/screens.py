"""Looks at pages of a report in a browser, and at spoilt copies of one, in which each check has to fail.

The browser is Debian's chromium without a window. A page is shown in a frame of a given width by a second page, which
uses it as a reader does and writes down what it saw.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from conformance.harness.page import Sources, to_html
from conformance.meta.pages import bug, case, evidence, parse, report, requirement, ruling

PICTURES = Path(__file__).parent.parent / "build" / "screens"
WIDTHS = (400, 1280)
_BROWSER = ("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr")
_CONSOLE = re.compile(r"CONSOLE.*")

_USER = """<!doctype html><meta charset="utf-8"><pre id="seen"></pre><iframe id="frame" style="border:0"></iframe>
<script>
const seen = {}, frame = document.getElementById("frame");
const after = () => new Promise((done) => setTimeout(done, 50));
const widths = (document) => [document.scrollingElement.scrollWidth, document.scrollingElement.clientWidth];
async function look() {
  const page = frame.contentDocument, rows = [...page.querySelectorAll("[data-outcomes]")];
  const shown = () => rows.filter((row) => row.getClientRects().length).length;
  const search = page.getElementById("search"), outcome = page.getElementById("outcome");
  const stem = page.getElementById("stem");
  const type = async (control, value) => {
    control.value = value;
    control.dispatchEvent(new Event("input", { bubbles: true }));
    await after();
    return shown();
  };
  seen.rows = rows.length;
  seen.all = shown();
  seen.form = page.getElementById("filter").getClientRects().length > 0;
  const id = page.querySelector("tr[data-outcomes][id]").id;
  seen.of_id = await type(search, id);
  seen.with_id = rows.filter((row) => row.textContent.includes(id)).length;
  seen.of_nothing = await type(search, "no such word anywhere");
  seen.headings = [...page.querySelectorAll("h3.stem, h4")].filter((title) => title.getClientRects().length).length;
  await type(search, "");
  seen.failed = await type(outcome, "failed error");
  seen.are_failed = rows.filter((row) => /(^| )(failed|error)( |$)/.test(row.dataset.outcomes)).length;
  await type(outcome, "");
  const wanted = stem.options[stem.options.length - 1].value;
  seen.of_stem = await type(stem, wanted);
  seen.have_stem = rows.filter((row) => row.dataset.stem === wanted).length;
  seen.back = await type(stem, "");
  page.body.dispatchEvent(new KeyboardEvent("keydown", { key: "/", bubbles: true }));
  seen.slash = page.activeElement.id;
  const closed = page.querySelector("details.card:not([open]) > summary");
  if (closed) {
    closed.focus();
    seen.focused = page.activeElement === closed;
  }
  for (const details of page.querySelectorAll("details")) details.open = true;
  await after();
  seen.widths = widths(page);
  const edge = page.documentElement.clientWidth;
  seen.wide = [...page.querySelectorAll("body *")].filter((node) => node.getBoundingClientRect().right > edge + 1)
    .slice(0, 5).map((node) => node.tagName + "." + node.getAttribute("class"));
}
frame.onload = async () => {
  try {
    await look();
  } catch (error) {
    seen.error = String(error);
  }
  document.getElementById("seen").textContent = JSON.stringify(seen);
};
const [name, width] = location.search.slice(1).split(",");
frame.width = width;
frame.height = 900;
frame.src = name;
</script>
"""


class _Server(ThreadingHTTPServer):
    """Serves a folder and keeps what was asked for."""

    def __init__(self, folder: Path) -> None:
        self.asked: set[str] = set()
        super().__init__(("127.0.0.1", 0), partial(_Handler, directory=str(folder)))


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        assert isinstance(self.server, _Server)
        self.server.asked.add(self.path.partition("?")[0])


@contextmanager
def _serving(folder: Path) -> Iterator[_Server]:
    server = _Server(folder)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _browse(*words: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as profile:
        command = [*_BROWSER, f"--user-data-dir={profile}", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)


def _console(done: subprocess.CompletedProcess[str]) -> list[str]:
    return _CONSOLE.findall(done.stderr)


def used(address: str, name: str, width: int) -> list[str]:
    """What is wrong with a page of some width when it is used."""
    done = _browse("--virtual-time-budget=20000", "--dump-dom", f"{address}/user.html?{name},{width}")
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    text = "" if found is None else found[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")
    if not text:
        return [f"{name} at {width} px: nothing was seen"]
    seen = json.loads(text)
    if "error" in seen:
        return [f"{name} at {width} px: {seen['error']}"]
    expected = {
        "all": seen["rows"],
        "form": True,
        "of_id": seen["with_id"],
        "of_nothing": 0,
        "headings": 0,
        "failed": seen["are_failed"],
        "of_stem": seen["have_stem"],
        "back": seen["rows"],
        "slash": "search",
        "focused": True,
    }
    wrong = [
        f"{name} at {width} px: {key} is {seen.get(key, True)}, expected {value}"
        for key, value in expected.items()
        if seen.get(key, True) != value
    ]
    if seen["widths"][0] > seen["widths"][1]:
        wrong.append(f"{name}: {seen['widths'][0]} px wide at {width} px, because of {', '.join(seen['wide'])}")
    return wrong + [f"{name} at {width} px: console: {line}" for line in _console(done)]


def _squeezed(text: str) -> str:
    # A hyphen at the end of a line is taken for one of hyphenation.
    return re.sub(r"[\s-]+", "", text)


def printed(address: str, name: str, page: str) -> list[str]:
    """Which failures a print lacks: the sentence and every part of each."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.pdf"
        _browse("--no-pdf-header-footer", f"--print-to-pdf={path}", f"{address}/{name}")
        text = subprocess.run(["pdftotext", str(path), "-"], capture_output=True, text=True, check=True).stdout
    paper = _squeezed(text)
    wrong = []
    for card in parse(page).every("details", "card"):
        parts = [card.one("span", "sentence"), *card.every("pre")]
        # A page break, with its blank line, may stand within a part of many lines: each line is looked for.
        lines = [line for part in parts for line in part.text.splitlines()]
        lost = [line for line in lines if _squeezed(line) not in paper]
        if lost:
            wrong.append(f"{name}: printed, {card.attributes['data-id']} lacks {lost[0]!r}")
    return wrong


def _pictures(address: str, folder: Path, name: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    for title, width, look in (("wide", 1280, "none"), ("grey", 1280, "grayscale(1)"), ("narrow", 400, "none")):
        # A window has a least width, a frame has none.
        frame = f'<iframe style="border:0;width:{width}px;height:1600px" src="{name}"></iframe>'
        body = f'<!doctype html><body style="margin:0;filter:{look}">{frame}'
        (folder / f"{title}.html").write_text(body, encoding="utf-8")
        size = f"--window-size={width},1600"
        _browse(f"--screenshot={PICTURES / f'{title}.png'}", size, f"{address}/{title}.html")
    _browse("--no-pdf-header-footer", f"--print-to-pdf={PICTURES / 'print.pdf'}", f"{address}/{name}")


def sample() -> str:
    """A page with something in every part, long words and texts of many lines among it."""
    bad = {"message": "1 of 2 elements differ", "got": "3", "expected": "2", "where": "w[0]", "program": "x = 1\ny = 2"}
    steps = {**bad, "got": "5", "program": "\n".join(f"step {number}" for number in range(90))}
    long = {"error": "E" * 900, "cause": "E" * 150, "command": f"pytest --pyargs {'a.' * 120}b::c"}
    bugs = [bug("dies", "killed", "twinproof.kvstore.views:V"), bug("lives", "survived")]
    now = report(
        requirement("KV-001", case(), bugs=bugs),
        requirement("KV-002", case("failed", **bad), case("failed", name="test_x[2]", **bad), sentence="W" * 300),
        requirement("KV-003", case("skipped", text=f"lacks {'y' * 300}")),
        requirement("PIPE-001", case("failed", **steps)),
        requirement("OPT-001", case("error", **long)),
        requirement("CKPT-001", case("xfailed", text="known")),
    )
    before = report(requirement("KV-002", case()), requirement("OPT-001", case()), started="2026-10-01")
    other = report(requirement("KV-001", case()), requirement("KV-002", case()), name=f"other_{'z' * 80}")
    refused = ruling("fail", 0.5, 0.4, 0.6)
    gates = evidence(
        (f"gate-{'g' * 90}", "claim", 1.5, ruling("fail", 0.5, 0.4, 0.6), refused),
        ("kept", "limit", 0.5, ruling("pass", 0.9, 0.8, 1.0), refused),
    )
    return to_html(Sources([before, now, other], [gates], {"twinproof/kvstore/views.py": (5, 6)}))


def _spoilt(page: str) -> dict[str, tuple[str, Callable[[list[str]], bool]]]:
    """Copies of a page with one thing wrong, and what of the complaints shows that it was seen."""
    without_print = page.replace("details::details-content", "details::nothing")
    deaf = _signed(page, "words.every((word) => texts[index].includes(word))", "true")
    return {
        "script changed": (page.replace('"use strict";', '"use strict"; 1;'), _says("console")),
        "search deaf": (deaf, _says("of_id")),
        "rows wide": (_signed(page, "</style>", "tr { min-width: 700px }</style>"), _says("px wide")),
        "print short": (_signed(without_print, '"beforeprint"', '"nothing"'), _says("lacks")),
    }


def _says(word: str) -> Callable[[list[str]], bool]:
    return lambda found: any(word in line for line in found)


def _signed(page: str, before: str, after: str) -> str:
    """A copy with a change and no policy, which would refuse it."""
    assert before in page, before
    return re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page).replace(before, after)


def complaints(server: _Server, folder: Path, name: str, page: str) -> list[str]:
    """All that is wrong with a page; it is printed with and without its script."""
    address = f"http://127.0.0.1:{server.server_address[1]}"
    plain = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    for title, text in ((name, page), (f"plain-{name}", plain)):
        (folder / title).write_text(text, encoding="utf-8")
    found = [line for width in WIDTHS for line in used(address, name, width)]
    return [*found, *printed(address, name, page), *printed(address, f"plain-{name}", plain)]


def main(arguments: list[str]) -> int:
    """Look at a page that is made here and at those named; 1 when something is wrong, or when spoilt pages are not."""
    page = sample()
    with tempfile.TemporaryDirectory() as place, _serving(Path(place)) as server:
        folder = Path(place)
        (folder / "user.html").write_text(_USER, encoding="utf-8")
        found = complaints(server, folder, "sample.html", page)
        for number, path in enumerate(arguments):
            found += complaints(server, folder, f"named-{number}.html", Path(path).read_text(encoding="utf-8"))
        for title, (copy, is_seen) in _spoilt(page).items():
            said = complaints(server, folder, "spoilt.html", copy)
            if not is_seen(said):
                found.append(f"the page with its {title} was not noticed: {said[:3]}")
        _pictures(f"http://127.0.0.1:{server.server_address[1]}", folder, "sample.html")
        known = {f"/{path.name}" for path in folder.iterdir()} | {"/favicon.ico"}
        found += [f"a page asked for {path}" for path in sorted(server.asked - known)]
    print("\n".join(found) or f"screens: {1 + len(arguments)} pages, no complaint; pictures in build/screens")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
