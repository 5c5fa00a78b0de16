"""Runs of the skip-gram training over ranks: one rank, saved and killed, resumed on more, never killed; and their rows.

Whatever way a job takes, its rows must be the same, bit for bit.
"""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from conformance.harness import Mismatch, RankDied, RankPool, assert_equal, assert_same_bytes
from conformance.harness.implementation import component
from conformance.kvstore.corpus import Corpus
from conformance.kvstore.skip_gram import Done, Job, Plan, killed_run, recut_run, resumed_run, single_run

__all__ = ["SkipGramRuns", "assert_same_rows", "rows_of"]

TIMEOUT_S = 300.0

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


class SkipGramRuns:
    """All runs of one plan over one corpus, in a folder, and what they say.

    Args:
        pool: of ranks that run the implementation under test.
        plan: see Plan.
        corpus: at least as many samples as the plan has.
        work: an empty folder; a few times as large as the rows.

    Attributes:
        facts: of each run, by its name: ranks, rows, rows evicted, ids looked up, seconds.
        rows: what each run left, by its name.
    """

    def __init__(self, pool: RankPool, plan: Plan, corpus: Corpus, work: Path) -> None:
        self._pool, self._plan, self._work = pool, plan, work
        self.facts: dict[str, Any] = {}
        self.rows: dict[str, Rows] = {}
        self._corpus = str(work / "corpus.safetensors")
        self.corpus = corpus
        corpus.save(Path(self._corpus))

    def _folder(self, name: str) -> Path:
        folder = self._work / name
        folder.mkdir(exist_ok=True)
        return folder

    def _keep(self, name: str, done: list[Done]) -> list[Done]:
        folder = self._folder(name)
        self.rows[name] = rows_of(folder)
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
        assert_same_rows(self.rows["resumed"], self.rows["one rank"], "resumed on 3 ranks")
        return "2 ranks saved, 3 resumed"

    def run_recut(self) -> str:
        """Three ranks of which two began; the same rows as after the kill."""
        folder = str(self._folder("never killed"))
        done = self._pool.run(recut_run, 3, self._plan, self._corpus, folder, timeout_s=TIMEOUT_S)
        self._keep("never killed", done)
        assert_same_rows(self.rows["resumed"], self.rows["never killed"], "resumed against never killed")
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
