"""Steps that cannot hurt each other: each in its own process group, with limits, a bounded log and a synced result.

Prevents a run that ends at its first failure, a hang that eats the time of all that follows, and evidence that is lost
with the process that held it. Nothing here imports torch: a torch that cannot be imported is a step that failed.
"""

from __future__ import annotations

import json
import os
import re
import resource
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

__all__ = ["PASSED", "Outcome", "Step", "StepRunner", "Stopped", "markdown_table", "read_outcomes", "text_table"]

PASSED = "passed"
_NOT_RUN = "not run"
_HEAD_BYTES = _TAIL_BYTES = 256 << 10  # What is kept of a log: its beginning and its end.
_CHUNK_BYTES = 1 << 16
_DYING_S = 3.0  # From the request to say where it hangs to the kill.
_TICK_S = 0.05
_LEAST_S = 1.0  # A step that has less than this left is not begun.
_FILE_BYTES = 32 << 30
_NOTE_CHARS = 100
# What faulthandler prints of each thread; the current one comes last.
_FRAME = re.compile(r"^(?:Current t|T)hread .*most recent call first.*\n  (File .*)", re.MULTILINE)


class Stopped(Exception):
    """The run was asked to end: the step in progress is over, later ones are not begun."""


@dataclass(frozen=True)
class Step:
    """One piece of evidence.

    Args:
        name: letters, digits and ``.-_:``; unique in a run.
        command: program and arguments.
        limit_s: seconds after which its process group is killed.
        phase: the part of a run that it belongs to, from 1.
        needs: names of steps without which it means nothing; it is not begun unless they passed.
        each: its last line of output is a JSON list of names; this step, with ``{}`` replaced by each, comes next.
        always: run it also where it passed before: what it leaves is needed again.
        file_bytes: the most that one file of its may hold.
        environment: variables set for it.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    phase: int = 1
    needs: tuple[str, ...] = ()
    each: Step | None = None
    always: bool = False
    file_bytes: int = _FILE_BYTES
    environment: tuple[tuple[str, str], ...] = ()

    def of(self, name: str) -> Step:
        """This step with ``{}`` replaced in its name and its command."""
        command = tuple(word.replace("{}", name) for word in self.command)
        return replace(self, name=self.name.replace("{}", name), command=command)


@dataclass(frozen=True)
class Outcome:
    """What became of a step.

    Attributes:
        result: ``passed``, ``failed with exit code 1``, ``killed at its limit of 60 s``, ``died of SIGSEGV`` and the
            like, ``stopped``, or ``not run``.
        exit_code: of the process, negative for a signal; None where there was none.
        seconds: from its start to its end.
        note: the last line that it printed, where a signal found it, or why it was not run.
        sources: digest of what it ran on.
        kept: whether it is of an earlier run.
    """

    name: str
    result: str
    exit_code: int | None
    seconds: float
    note: str
    sources: str = ""
    kept: bool = False


class _Log:
    """The beginning and the end of what a process printed, in bounded memory; a file only when it is over."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0

    def add(self, data: bytes) -> None:
        self.size_bytes += len(data)
        room = _HEAD_BYTES - len(self._head)
        self._head += data[:room]
        if data[room:]:
            self._tail.append(data[room:])
            self._tail_bytes += len(data) - room
        while self._tail_bytes - len(self._tail[0] if self._tail else b"") > _TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft())

    def contents(self) -> bytes:
        missing = self.size_bytes - len(self._head) - self._tail_bytes
        cut = f"\n[{missing} bytes are left out]\n".encode() if missing else b""
        return bytes(self._head) + cut + b"".join(self._tail)

    def last_line(self) -> str:
        lines = self.contents()[-4096:].decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""

    def innermost_frame(self) -> str:
        """Where Python was when a signal reached it, if it said so."""
        found = _FRAME.findall(self.contents()[-_TAIL_BYTES:].decode(errors="replace"))
        return f"in {found[-1]}" if found else ""


class StepRunner:
    """Carries out steps one after the other, whatever becomes of each.

    Args:
        folder: for ``steps.jsonl``, a line for each result, synced before the next step begins; and for the logs.
        budget_s: seconds for all of it.
        sources: digest of what is run, kept with each result.
        root: the steps' working folder.
        environment: variables set for every step.
        say: takes a line of progress.

    Attributes:
        outcomes: by name.
        problems: with records, not with steps.
        left_behind: processes that nothing could end.
    """

    def __init__(
        self,
        folder: Path,
        *,
        budget_s: float,
        sources: str,
        root: Path,
        environment: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self.folder, self.sources, self.root, self.environment, self.say = folder, sources, root, environment, say
        self.outcomes: dict[str, Outcome] = {}
        self.problems: list[str] = []
        self.left_behind: list[subprocess.Popen[bytes]] = []
        self._ends_s = time.monotonic() + budget_s
        self._stopped = False
        self._order: list[str] = []
        (folder / "logs").mkdir(parents=True, exist_ok=True)

    @property
    def left_s(self) -> float:
        """Seconds of the budget."""
        return self._ends_s - time.monotonic()

    @property
    def results(self) -> list[Outcome]:
        """Of the steps that were asked for, in their order."""
        return [self.outcomes[name] for name in dict.fromkeys(self._order)]

    def keep(self, outcomes: Iterable[Outcome]) -> None:
        """Count results of an earlier run as this one's; their steps are not run again."""
        self.outcomes |= {outcome.name: replace(outcome, kept=True) for outcome in outcomes}

    def run(self, steps: Sequence[Step]) -> None:
        """All steps, in order, and those that they name."""
        waiting = deque(steps)
        while waiting:
            step = waiting.popleft()
            self._order.append(step.name)
            if step.name in self.outcomes and step.each is None and not step.always:
                continue
            outcome, line = self._outcome(step)
            self.outcomes[step.name] = outcome
            self._write(outcome)
            self.say(f"{outcome.name}: {outcome.result}, {outcome.seconds:.1f} s; {outcome.note[:_NOTE_CHARS]}")
            if outcome.result == PASSED and step.each is not None:
                waiting.extendleft(reversed(self._named_by(step, step.each, line)))

    def stop(self) -> None:
        """End the step in progress and begin no other. May be called in a signal handler."""
        self._stopped = True

    def _named_by(self, step: Step, each: Step, line: str) -> list[Step]:
        try:
            names = json.loads(line)
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise TypeError(f"got {line[:_NOTE_CHARS]}")
        except (ValueError, TypeError) as error:
            self.problems.append(f"{step.name}: its last line is no list of names: {error}")
            return []
        return [each.of(name) for name in names]

    def _outcome(self, step: Step) -> tuple[Outcome, str]:
        because = self._reason_against(step)
        if because is not None:
            return Outcome(step.name, _NOT_RUN, None, 0.0, because, self.sources), ""
        begun = time.monotonic()
        log = _Log()
        try:
            result, code = self._carry_out(step, log)
        except Stopped:
            result, code = "stopped", None
        except Exception as error:
            result, code = "could not be started", None
            log.add(f"{type(error).__name__}: {error}\n".encode())
        self._write_log(step, log)
        line = log.last_line()
        note = line if result == PASSED else log.innermost_frame() or line
        seconds = round(time.monotonic() - begun, 3)
        return Outcome(step.name, result, code, seconds, note[:_NOTE_CHARS], self.sources), line

    def _reason_against(self, step: Step) -> str | None:
        missing = [name for name in step.needs if self._result_of(name) != PASSED]
        if missing:
            return f"needs {', '.join(missing)}"
        if self._stopped:
            return "the run was stopped"
        return "no time was left" if self.left_s < _LEAST_S else None

    def _result_of(self, name: str) -> str:
        found = self.outcomes.get(name)
        return found.result if found else _NOT_RUN

    def _carry_out(self, step: Step, log: _Log) -> tuple[str, int | None]:
        limit_s = min(step.limit_s, self.left_s)
        speaking = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        environment = os.environ | speaking | dict(self.environment) | dict(step.environment)
        process = subprocess.Popen(
            step.command,
            cwd=self.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Its own session: a signal to its group reaches its children, and none of ours.
            start_new_session=True,
            preexec_fn=partial(_limit_files, step.file_bytes),
        )
        try:
            in_time = self._follow(process, log, limit_s)
            if not in_time:
                # Python then says in which line each thread is; its children, who would speak at once, are not asked.
                process.send_signal(signal.SIGABRT)
                self._follow(process, log, _DYING_S)
        finally:
            # Also where the step itself is over: what it left behind would disturb the next.
            _signal(process, signal.SIGKILL)
            _wait(process, _DYING_S)
            code = process.poll()
            assert process.stdout is not None
            process.stdout.close()
        if code is None:
            # A driver can hold a process where no signal reaches it; what follows is tried all the same.
            self.left_behind.append(process)
            return f"could not be killed at its limit of {limit_s:.0f} s", code
        if not in_time:
            cut = "" if limit_s == step.limit_s else ", which the budget cut"
            return f"killed at its limit of {limit_s:.0f} s{cut}", code
        return _named(code), code

    def _follow(self, process: subprocess.Popen[bytes], log: _Log, limit_s: float) -> bool:
        """Read what the process prints until it is over or ``limit_s`` have passed; whether it is over.

        A child that it left behind may hold the pipe open: its end is that of the process.
        """
        assert process.stdout is not None
        ends = time.monotonic() + limit_s
        descriptor, is_open = process.stdout.fileno(), True
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while True:
                is_over, left = process.poll() is not None, ends - time.monotonic()
                if self._stopped:
                    raise Stopped
                if is_over and not (is_open and selector.select(0.0) and left > 0):
                    return True
                if left <= 0:
                    return False
                if not is_open:
                    _wait(process, min(left, _TICK_S))
                elif selector.select(min(left, _TICK_S)):
                    data = os.read(descriptor, _CHUNK_BYTES)
                    log.add(data)
                    is_open = bool(data)

    def _write(self, outcome: Outcome) -> None:
        line = json.dumps(asdict(outcome)) + "\n"
        try:
            with open(self.folder / "steps.jsonl", "ab") as file:
                _end_line(file)
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            # A full disk takes the record, not the run: the table at the end still has the result.
            self.problems.append(f"steps.jsonl has no line of {outcome.name}: {error}")

    def _write_log(self, step: Step, log: _Log) -> None:
        try:
            (self.folder / "logs" / f"{step.name.replace(':', '-')}.log").write_bytes(log.contents())
        except OSError as error:
            self.problems.append(f"the log of {step.name} is not written: {error}")


def _end_line(file: Any) -> None:
    """Let a line that a full disk or a kill cut short be one of its own."""
    if file.tell():
        with open(file.name, "rb") as before:
            before.seek(-1, os.SEEK_END)
            if before.read(1) != b"\n":
                file.write(b"\n")


def _limit_files(size_bytes: int) -> None:
    # Beyond it a write fails, or ends the process by SIGXFSZ: the disk stays usable for the steps that follow.
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    most = size_bytes if hard == resource.RLIM_INFINITY else min(size_bytes, hard)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> None:
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return


def _named(code: int) -> str:
    if code == 0:
        return PASSED
    if code > 0:
        return f"failed with exit code {code}"
    try:
        return f"died of {signal.Signals(-code).name}"
    except ValueError:
        return f"died of signal {-code}"


def read_outcomes(folder: Path) -> dict[str, Outcome]:
    """The last result of each step in a folder's ``steps.jsonl``; a line that was cut short is none."""
    found: dict[str, Outcome] = {}
    path = folder / "steps.jsonl"
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            outcome = Outcome(**json.loads(line))
        except (ValueError, TypeError):
            continue
        found[outcome.name] = outcome
    return found


def _rows(outcomes: Iterable[Outcome], sources: str) -> list[tuple[str, str, str, str]]:
    rows = []
    for outcome in outcomes:
        result = outcome.result
        if outcome.kept:
            result += ", kept" if outcome.sources == sources else ", kept from other sources"
        rows.append((outcome.name, result, f"{outcome.seconds:.1f}", outcome.note[:_NOTE_CHARS]))
    return rows


_TITLES = ("step", "result", "s", "last line")


def text_table(outcomes: Iterable[Outcome], sources: str) -> str:
    """For a terminal."""
    rows = [_TITLES, *_rows(outcomes, sources)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_TITLES))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def markdown_table(outcomes: Iterable[Outcome], sources: str) -> str:
    """For the summary of a job."""
    rows = [_TITLES, tuple("---" for _ in _TITLES), *_rows(outcomes, sources)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows) + "\n"
