"""Runs each shell line of README and docs as it stands, in a folder where the first hour of a new user is over.

A line has to end with 0, or with 1 where the page shows a failing implementation. A block without a command is what
the page's commands print, and has to be found there. What other scripts run, and what a GPU is needed for, is named
with the reason; a line that is none of these is an error, so that a new one cannot stay unrun.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

# This folder is no package.
sys.path.insert(0, str(Path(__file__).resolve().parent))
from documents import blocks

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "conformance/README.md", "docs/test-your-own.md", "docs/bench.md", "docs/gpu.md")
COMMANDS = ("twinproof", "bash", "pip", "python", "torchrun", "PYTHONPATH=examples")
ELSEWHERE = {
    "pip install torch && pip install .": "ci/install",
    "pip install torch && pip install . ./conformance": "docs/first-hour.md",
    "pip install . ./conformance": "docs/first-hour.md",
    "bash ci/verify": "too long to run twice: by hand, before a release",
    "bash ci/test": "every change",
    "bash ci/bench main": "two builds and minutes for each pair: by hand",
    "bash ci/bench v0.1.0 kvstore checkpoint --pairs 5": "two builds and minutes for each pair: by hand",
    "twinproof verify --impl fastimpl": "ci/nightly",
    "bash ci/gpu --out evidence --phase 1 --budget 540": "perf/tests, without a GPU",
    "bash ci/gpu --out evidence --phase 1 --budget 540 --resume": "perf/tests, without a GPU",
}
# What fails on purpose: verbs that nobody has written yet, and the examples' mistakes.
FAILING = ("--impl mine", "--impl mistakes")


def prepare(hour: Path, folder: Path) -> None:
    """The files that the pages name, from what the first hour has written."""
    (folder / "examples").symlink_to(hour / "examples")
    (folder / "your_package.py").write_text("from fastimpl import kvstore as kvstore\n", encoding="utf-8")
    report, evidence = hour / "out/mine.json", hour / "out/kvstore.json"
    copies = {
        report: ["mine.json", "fastimpl.json", "older/mine.json"],
        evidence: ["before.json", "after.json", "bench.json"],
    }
    for source, names in copies.items():
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, folder / name)
    # One run may not stand twice in a side: each is of its own minute.
    run = json.loads(evidence.read_text(encoding="utf-8"))
    created = datetime.fromisoformat(run["created"])
    for number, side in enumerate(("before", "after") * 3):
        run["created"] = (created + timedelta(minutes=number)).isoformat()
        path = folder / "runs" / side / f"{number // 2 + 1}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(run), encoding="utf-8")


def run_page(page: Path, folder: Path) -> list[str]:
    """What went wrong in the page's blocks, in order."""
    wrong, said, shown = [], "", []
    for block in blocks(page):
        if block.language or block.title:
            continue
        lines = [line.partition("  #")[0].strip() for line in block.text.splitlines()]
        if lines[0].split()[0] not in COMMANDS:
            shown += [(block.place, line) for line in lines if line and "─" not in line]
            continue
        for line in lines:
            if line in ELSEWHERE:
                print(f"{page.name}: {line}: not here, {ELSEWHERE[line]}", flush=True)
                continue
            began = time.monotonic()
            done = subprocess.run(
                ["bash", "-c", line], cwd=folder, env=os.environ, capture_output=True, text=True, check=False
            )
            said += done.stdout + done.stderr
            expected = int(any(words in line for words in FAILING))
            seconds = f"{time.monotonic() - began:.0f} s"
            print(f"{page.name}: {line}: exit status {done.returncode}, {seconds}", flush=True)
            if done.returncode != expected:
                wrong.append(
                    f"{block.place}: {line}: exit status {done.returncode}, expected {expected}\n{said[-2000:]}"
                )
    return wrong + [f"{place}: nothing printed {line!r}" for place, line in shown if line not in said]


def main() -> None:
    """Run all pages; the exit status is 1 where a line or a block is wrong."""
    hour = Path(sys.argv[1]).resolve()
    wrong = []
    for name in PAGES:
        folder = hour / "pages" / name.replace("/", "-")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        prepare(hour, folder)
        wrong += run_page(ROOT / name, folder)
    print("\n".join(wrong) or "every line and block as its page says")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
