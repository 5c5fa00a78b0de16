"""The main job on real input: skip-gram over the standard library's own source, saved half-way, killed, resumed wider.

``python -m conformance.kvstore.real_stream --work FOLDER`` trains a million rows of words and of pairs of words on two
ranks, with rows evicted on the way; saves them whole; kills the ranks; resumes on three. What comes out must equal, bit
for bit, a job that was never killed and dealt its rows to three ranks in memory, and a job of one rank; a prefix of the
stream is judged by the reference. Prints verdicts and times; exit status 1 when any verdict fails.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from conformance.harness import Mismatch, RankDied, RankPool, assert_equal, assert_le, assert_same_bytes
from conformance.harness.implementation import component
from conformance.kvstore.real_corpus import Corpus, standard_library
from conformance.kvstore.real_job import Done, Job, Plan, killed_run, recut_run, resumed_run, single_run

ROWS_MIN = 1_000_000
TIMEOUT_S = 300.0
# The reference takes some 20 microseconds for each id; this is what a quarter of a minute pays for.
PREFIX = Plan.of(24, batch=4_000)

Rows = dict[str, torch.Tensor]


def rows_of(folder: Path) -> Rows:
    """The rows that all ranks of a job wrote, by ascending id. Raises Mismatch when two ranks have the same id."""
    parts = [safetensors.torch.load_file(path) for path in sorted(folder.glob("rank*.safetensors"))]
    result: Rows = {}
    for name in (name for name in parts[0] if name.endswith(".ids")):
        ids, order = torch.cat([part[name] for part in parts]).sort()
        assert_equal(int((ids[1:] == ids[:-1]).sum()), 0, where=f"ids of {name} on two ranks")
        rows = name.replace(".ids", ".rows")
        result |= {name: ids, rows: torch.cat([part[rows] for part in parts])[order]}
    return result


def assert_same_rows(got: Rows, expected: Rows, where: str) -> None:
    """Demand the same ids, and the same bytes of each row."""
    for name in sorted(expected):
        if name.endswith(".ids"):
            assert_equal(got[name].numel(), expected[name].numel(), where=f"{where}: {name}")
        differ = (got[name] != expected[name]).reshape(got[name].shape[0], -1).any(1).nonzero()[:, 0]
        if differ.numel():
            first, ids = int(differ[0]), expected[name.replace(".rows", ".ids")]
            raise Mismatch(
                f"{differ.numel()} of {ids.numel()} differ",
                got=got[name][first].tolist(),
                expected=expected[name][first].tolist(),
                where=f"{where}: {name}, id {int(ids[first])}",
            )


class RealStream:
    """All runs of one plan over one corpus, in a folder, and what they say.

    Args:
        pool: of ranks that run the implementation under test.
        plan: see Plan.
        corpus: at least as many samples as the plan has.
        work: an empty folder; a few times as large as the rows.
    """

    def __init__(self, pool: RankPool, plan: Plan, corpus: Corpus, work: Path) -> None:
        self._pool, self._plan, self._work = pool, plan, work
        self.facts: dict[str, Any] = {}
        self._corpus = str(work / "corpus.safetensors")
        self.corpus = corpus
        corpus.save(Path(self._corpus))
        self._found: dict[str, Rows] = {}

    def _folder(self, name: str) -> Path:
        folder = self._work / name
        folder.mkdir(exist_ok=True)
        return folder

    def _keep(self, name: str, done: list[Done]) -> list[Done]:
        folder = self._folder(name)
        self._found[name] = rows_of(folder)
        shutil.rmtree(folder)
        id_count, seconds = sum(one.id_count for one in done), max(one.train_seconds for one in done)
        self.facts[name] = {
            "ranks": len(done),
            "rows": sum(one.row_count for one in done),
            "evicted": sum(one.evicted_count for one in done),
            "ids": id_count,
            "ids_per_s": round(id_count / seconds),
            "train_seconds": round(seconds, 2),
            "save_seconds": round(max(one.save_seconds for one in done), 2),
            "load_seconds": round(max(one.load_seconds for one in done), 2),
        }
        return done

    def run_single(self) -> str:
        """The judge: one rank, a plain store."""
        folder, checkpoint = str(self._folder("one rank")), str(self._work / "checkpoint of one rank")
        done = self._pool.run(single_run, 1, self._plan, self._corpus, checkpoint, folder, timeout_s=TIMEOUT_S)
        self._keep("one rank", done)
        self.facts["one rank"]["errors"] = [round(error, 4) for error in done[0].errors]
        return f"{done[0].row_count} rows at the end, {done[0].evicted_count} evicted"

    def run_killed(self) -> str:
        """Two ranks save half-way and die."""
        checkpoint, note = self._work / "checkpoint", self._work / "note"
        try:
            self._pool.run(killed_run, 2, self._plan, self._corpus, str(checkpoint), str(note), timeout_s=TIMEOUT_S)
        except RankDied as death:
            assert_equal(death.exit_code, -signal.SIGKILL, where="how the ranks ended")
        else:
            raise Mismatch("the ranks were not killed")
        notes = [Path(f"{note}.{rank}").read_text().split() for rank in range(2)]
        saved_bytes = sum(path.stat().st_size for path in checkpoint.iterdir())
        self.facts["killed"] = {
            "ranks": 2,
            "saved_bytes": saved_bytes,
            "ids": sum(int(ids) for _, _, ids in notes),
            "train_seconds": round(max(float(trained) for trained, _, _ in notes), 2),
            "save_seconds": round(max(float(saved) for _, saved, _ in notes), 2),
        }
        return f"SIGKILL after step {self._plan.killed_after}, {saved_bytes} bytes saved after {self._plan.saved_after}"

    def check_saved(self) -> str:
        """Two ranks save the bytes that one rank saves."""
        expected = {path.name: path for path in (self._work / "checkpoint of one rank").iterdir()}
        found = {path.name: path for path in (self._work / "checkpoint").iterdir()}
        assert_equal(sorted(found), sorted(expected), where="files of the checkpoint")
        for name, path in expected.items():
            assert_same_bytes(found[name], path.read_bytes(), where=name)
        return f"{len(found)} files"

    def run_resumed(self) -> str:
        """Three ranks go on from the folder; the same rows as the judge's."""
        checkpoint, folder = str(self._work / "checkpoint"), str(self._folder("resumed"))
        self._keep("resumed", self._pool.run(
            resumed_run, 3, self._plan, self._corpus, checkpoint, folder, timeout_s=TIMEOUT_S
        ))  # fmt: skip
        assert_same_rows(self._found["resumed"], self._found["one rank"], "resumed on 3 ranks")
        return "2 ranks saved, 3 resumed"

    def run_recut(self) -> str:
        """Three ranks of which two began; the same rows as after the kill."""
        folder = str(self._folder("never killed"))
        done = self._pool.run(recut_run, 3, self._plan, self._corpus, folder, timeout_s=TIMEOUT_S)
        self._keep("never killed", done)
        assert_same_rows(self._found["resumed"], self._found["never killed"], "resumed against never killed")
        return "2 ranks, then 3"

    def run_prefix(self, implementation: str, plan: Plan) -> str:
        """The reference and the implementation on the first samples, in this process."""
        found = []
        for name in ("refimpl", implementation):
            begun = time.perf_counter()
            job = Job(component(name, "kvstore"), plan, self.corpus)
            job.train(plan.step_count)
            folder = self._folder(f"prefix of {name}")
            done = job.done(str(folder), 0, train_seconds=time.perf_counter() - begun)
            found.append(rows_of(folder))
        assert_same_rows(found[1], found[0], f"{implementation} against refimpl")
        return f"{plan.sample_count} samples, {done.row_count} rows, {done.evicted_count} evicted"

    def check_size(self) -> str:
        """The store was as large as promised, rows did go, and the model learned something."""
        facts = self.facts["one rank"]
        inputs = self._found["one rank"]["inputs.ids"].numel()
        assert_le(ROWS_MIN, inputs, where="rows of words and pairs")
        assert_le(1, facts["evicted"], where="rows evicted")
        first, last = facts["errors"]
        assert_le(last, first, where="error of the last step against the first")
        return f"{inputs} rows of words and pairs at the end; mean error from {first} to {last}"


def verdicts_of(steps: dict[str, Callable[[], str]]) -> dict[str, str]:
    """Run the steps in order; what each said, or why it failed."""
    verdicts = {}
    for name, step in steps.items():
        try:
            verdicts[name] = f"yes ({step()})"
        except Mismatch as error:
            verdicts[name] = f"NO: {error}"
        print(f"  {name}: {verdicts[name]}", flush=True)
    return verdicts


def main(words: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--impl", default="fastimpl")
    parser.add_argument("--steps", type=int, default=120, help="at most, of 20000 samples each")
    parser.add_argument("--report", type=Path)
    options = parser.parse_args(words)
    options.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(2)
    begun = time.perf_counter()
    batch = Plan.of(1).batch
    corpus = Corpus.of(standard_library(), options.steps * batch)
    made = time.perf_counter() - begun
    plan = Plan.of(corpus.sample_count // batch)
    with RankPool(options.impl) as pool:
        job = RealStream(pool, plan, corpus, options.work)
        print(f"\nskip-gram over the standard library through {options.impl}: {plan.sample_count} samples")
        steps: dict[str, Callable[[], str]] = {
            "one rank, the judge": job.run_single,
            "a million rows, some evicted, and it learns": job.check_size,
            "2 ranks save half-way and are killed": job.run_killed,
            "saved by 2 ranks: equal to one rank's, byte for byte": job.check_saved,
            "resumed on 3 ranks: equal to one rank, bit for bit": job.run_resumed,
            "never killed, dealt anew to 3 ranks: equal to resumed, bit for bit": job.run_recut,
            "a prefix: equal to the reference, bit for bit": lambda: job.run_prefix(options.impl, PREFIX),
        }
        verdicts = verdicts_of(steps)
    shutil.rmtree(options.work, ignore_errors=True)
    facts = {"seconds": round(time.perf_counter() - begun, 1), "corpus_seconds": round(made, 1), **job.facts}
    for name, value in facts.items():
        print(f"  {name:14} {value}")
    if options.report is not None:
        options.report.write_text(json.dumps({"verdicts": verdicts, "facts": facts}, indent=1) + "\n")
    return 0 if all(verdict.startswith("yes") for verdict in verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
