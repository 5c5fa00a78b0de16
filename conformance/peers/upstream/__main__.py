"""``python -m conformance.peers.upstream CHECKOUT``: upstream's own tests through ours, judged by a ledger."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from conformance.peers.upstream.ledger import blob_of, judge, read_ledger
from conformance.peers.upstream.names import name_lines
from conformance.peers.upstream.suites import SUITES, Suite, project_of

__all__ = ["main"]

_LIMIT_S = 1800


def _outcomes(suite: Suite, checkout: Path, implementation: str) -> dict[str, dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "outcomes.json"
        command = [sys.executable, "-m", "conformance.peers.upstream.one", f"{suite.project}/{suite.name}"]
        command += [str(checkout), implementation, str(out)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_LIMIT_S)
        if not out.exists():
            raise SystemExit(f"upstream: {suite.name} did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        found: dict[str, dict[str, str]] = json.loads(out.read_text(encoding="utf-8"))
    return found


def _commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.stdout.strip() or "no git checkout"


def main(argv: list[str] | None = None) -> int:
    """0 when everything is as the ledger says; 1 when not; 2 for a folder that is no known checkout."""
    parser = argparse.ArgumentParser(prog="ci/upstream", description=__doc__)
    parser.add_argument("checkout", type=Path, help="of torchrec, PyTorch or safetensors; for --names their names do")
    parser.add_argument("--impl", default="fastimpl")
    parser.add_argument("--only", help="one suite of the project")
    parser.add_argument("--names", action="store_true", help="print which public names ours lack, and run nothing")
    parser.add_argument("--messages", action="store_true", help="print what each difference says")
    arguments = parser.parse_args(argv)
    checkout = arguments.checkout.resolve()
    project = project_of(checkout)
    if arguments.names and str(arguments.checkout) in {suite.project for suite in SUITES}:
        project = str(arguments.checkout)
    if project is None:
        parser.error(f"{checkout}: not a checkout of torchrec, PyTorch or safetensors")
    if arguments.names:
        print("\n".join(name_lines(project, arguments.impl)))
        return 0
    suites = [suite for suite in SUITES if suite.project == project and arguments.only in (None, suite.name)]
    if not suites:
        names = ", ".join(suite.name for suite in SUITES if suite.project == project)
        parser.error(f"--only {arguments.only}: {project} has {names}")
    ledger, bad = read_ledger(project), False
    print(f"{project}, {_commit(checkout)}, {arguments.impl}")
    for suite in suites:
        blobs = {n: blob_of(p) for n in suite.files if (p := checkout / suite.folder / n).exists()}
        upstream, ours = (_outcomes(suite, checkout, impl) for impl in ("-", arguments.impl))
        counts, wrong = judge(ledger, blobs, upstream["outcomes"], ours["outcomes"])
        for name, count in counts.items():
            known = "" if (name, blobs[name]) in ledger.files else ", not in the ledger"
            print(f"  {name} ({blobs[name]}{known}): {count.upstream} pass for upstream, {count.ours} of them for ours")
        for sentence in wrong:
            print(f"    {sentence}")
            message = ours["messages"].get(sentence.split(": ")[0])
            if arguments.messages and message:
                print(f"      {message}")
        bad |= bool(wrong)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
