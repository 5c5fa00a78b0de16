"""Carries out the steps of a phase, most evidence first, and never stops early. ``ci/gpu_run.py`` starts it.

    python ci/gpu_run.py --out FOLDER --budget 540 --phase 1 [--resume]

``FOLDER`` gets ``steps.jsonl`` with a line for each result, synced before the next step begins; ``logs``, what steps
wrote, and ``evidence.tar.gz`` with all of it. The table is printed last. The exit status is 0 when every step of the
phase passed, 1 when one did not or was not run, 2 when nothing could be begun.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import sys
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from perf.gpu.table import PHASES, all_steps
from perf.harness.steps import PASSED, Outcome, Step, StepRunner, markdown_table, read_outcomes, text_table

__all__ = ["main", "read_steps", "tree_digest"]

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("twinproof", "refimpl", "fastimpl", "conformance", "perf")
_SOURCES = (".py", ".cpp", ".cu", ".cuh", ".h", ".txt")
_ARCHIVE = "evidence.tar.gz"


def tree_digest(root: Path) -> str:
    """Of what steps run: a result of other sources is told from one of these."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*")):
            if path.suffix in _SOURCES and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(root)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def read_steps(path: Path) -> list[Step]:
    """A table of steps in a JSON file: a list of objects with the fields of ``Step``.

    Raises:
        ValueError, TypeError: it is none.
    """
    return [_step(found) for found in json.loads(path.read_text(encoding="utf-8"))]


def _step(found: dict[str, object]) -> Step:
    each = found.pop("each", None)
    made = Step(**found)  # type: ignore[arg-type]
    made = replace(made, command=tuple(made.command), needs=tuple(made.needs))
    return replace(made, each=_step(each)) if isinstance(each, dict) else made


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_run", description="Evidence of one GPU, in phases of a few minutes.")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where evidence is kept")
    parser.add_argument("--budget", type=float, default=540.0, metavar="S", help="seconds for all of it (default: 540)")
    parser.add_argument("--phase", type=int, nargs="+", default=[1], choices=PHASES, help="which steps (default: 1)")
    parser.add_argument("--resume", action="store_true", help="keep what passed before, and run the rest")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps alone, and what they need")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="append the table there as Markdown")
    parser.add_argument("--device", default="cuda", help="cpu: a rehearsal, which says nothing of a GPU")
    parser.add_argument("--steps", type=Path, metavar="FILE", help="a table in JSON in place of this one")
    return parser


def _chosen(steps: Iterable[Step], phases: Sequence[int], only: Sequence[str] | None) -> list[Step]:
    found = [step for step in steps if step.phase in phases]
    # Several phases in one run: what each of them needs first is done once.
    found = [step for number, step in enumerate(found) if step.name not in {before.name for before in found[:number]}]
    if only is None:
        return found
    wanted = set(only)
    for step in reversed(found):
        if step.name in wanted:
            wanted |= {*step.needs, *(step.each.needs if step.each is not None else ())}
    return [step for step in found if step.name in wanted]


def _placed(step: Step, out: Path) -> Step:
    """With the folder for its files in its command."""
    each = _placed(step.each, out) if step.each is not None else None
    return replace(step, command=tuple(word.replace("{out}", str(out)) for word in step.command), each=each)


def _archive(out: Path) -> str | None:
    """All evidence as one file; why not, or None."""
    try:
        with tarfile.open(out / _ARCHIVE, "w:gz") as archive:
            archive.add(out, arcname="evidence", filter=lambda member: None if _ARCHIVE in member.name else member)
    except OSError as error:
        return f"{_ARCHIVE} is not written: {error}"
    return None


def _report(runner: StepRunner, outcomes: Sequence[Outcome], summary: Path | None) -> int:
    """Print the table, last; the exit status is computed from what it shows."""
    problem = _archive(runner.folder)
    problems = [*runner.problems, *([problem] if problem else [])]
    if summary is not None:
        try:
            with summary.open("a", encoding="utf-8") as file:
                file.write(markdown_table(outcomes, runner.sources))
        except OSError as error:
            problems.append(f"{summary} is not written: {error}")
    passed = sum(outcome.result == PASSED for outcome in outcomes)
    print("\n" + text_table(outcomes, runner.sources))
    print("\n".join(f"problem: {line}" for line in problems), end="\n" if problems else "")
    print(
        f"{len(outcomes)} steps, {passed} passed, {len(outcomes) - passed} not; evidence in {runner.folder}", flush=True
    )
    return 0 if outcomes and passed == len(outcomes) and not problems else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run a phase; see the module for the exit status."""
    parser = _parser()
    given = parser.parse_args(argv)
    out = given.out.resolve()
    try:
        table = read_steps(given.steps) if given.steps else all_steps(device=given.device)
        steps = [_placed(step, out) for step in _chosen(table, given.phase, given.only)]
        (out / "logs").mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError, TypeError) as error:
        print(f"gpu_run: {error}", file=sys.stderr)
        return 2
    if not steps:
        parser.error(f"no step of phase {given.phase}{f' among {given.only}' if given.only else ''}")
    runner = StepRunner(
        out,
        budget_s=given.budget,
        sources=tree_digest(_ROOT),
        root=_ROOT,
        environment={"PYTHONPATH": str(_ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        say=_say,
    )
    if given.resume:
        runner.keep(outcome for outcome in read_outcomes(out).values() if outcome.result == PASSED)
    with _ended_by_signals(runner):
        runner.run(steps)
        return _report(runner, runner.results, given.summary)


@contextmanager
def _ended_by_signals(runner: StepRunner) -> Iterator[None]:
    """Whoever ends the run still gets its table."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: runner.stop()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
