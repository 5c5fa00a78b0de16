"""One run of the bench: every workload that a gate of this form names, then every gate, the undecided ones twice."""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from conformance.harness import Rank, RankPool
from perf.harness.gates import Gate, Kind
from perf.harness.judge import Machine, Outcome, judge, needs_more_samples
from perf.harness.paired import Round, merge_ranks
from perf.harness.workloads import Workload

__all__ = ["Bench", "Job"]

# A job runs on every rank as (rank, workload, empty folder, round count, seed); ``perf.<component>.JOBS`` names them.
Job = Callable[[Rank, Workload, str, int, int], list[Round]]
_TIMEOUT_S = 900.0


@dataclass
class Bench:
    """Measures and judges.

    Attributes:
        implementation: the module whose contenders are called ``ours``.
        component: a stem.
        form: full, short or test.
        workloads, gates: all that there are.
        machine: classes and file system, for the gates.
        folder: where the jobs write.
        seed: of the order of contenders.
        repeats: whether what noise left undecided is measured once more.
        repeats_until_s: seconds from the beginning by which a repetition has to be over, as the first one's time
            foretells it; None: whenever.
        clock: seconds from any moment on.
        rounds: what was measured so far, by workload.
        repeated: workloads that were measured again because a gate was undecided.
        lacking: by workload that nothing was measured of, the component that the implementation does not have.
    """

    implementation: str
    component: str
    form: str
    workloads: dict[str, Workload]
    gates: Sequence[Gate]
    machine: Machine
    folder: Path
    seed: int = 0
    repeats: bool = True
    repeats_until_s: float | None = None
    clock: Callable[[], float] = time.monotonic
    rounds: dict[str, list[Round]] = field(default_factory=dict)
    repeated: list[str] = field(default_factory=list)
    lacking: dict[str, str] = field(default_factory=dict)

    def chosen_gates(self) -> list[Gate]:
        """The gates that are judged in this form."""
        return [
            gate
            for gate in self.gates
            if gate.kind is not Kind.REGRESSION
            and self.form in gate.workloads
            and self.workloads[gate.workloads[self.form]].component == self.component
        ]

    def needed(self) -> list[str]:
        """The workloads that the gates of this form need, in the order in which they are measured."""
        chosen = self.chosen_gates()
        named = [gate.workloads[self.form] for gate in chosen]
        named += [gate.against[self.form] for gate in chosen if gate.against is not None]
        return list(dict.fromkeys(named))

    def run(self, begins: Callable[[Workload, bool], None] | None = None) -> Iterator[Workload]:
        """Measure everything that the gates of this form need; yields each workload when it is done.

        Args:
            begins: called before each measurement, with whether noise has made it the second one of the workload.
        """
        begins = begins or (lambda workload, is_repeated: None)
        begun = self.clock()
        with RankPool(self.implementation) as pool:
            for name in self.needed():
                workload, began = self.workloads[name], self.clock()
                begins(workload, False)
                self.rounds[name] = self._measure(pool, workload, self.seed)
                may_repeat = name not in self.lacking and self.may_repeat(begun, began, self.clock())
                if may_repeat and self._is_undecided(name):
                    # Once, and all samples count: repeating until the answer pleases is how a coin passes a gate.
                    begins(workload, True)
                    self.rounds[name] += self._measure(pool, workload, self.seed + 1)
                    self.repeated.append(name)
                yield workload

    def may_repeat(self, begun: float, began: float, now: float) -> bool:
        """Whether what has taken from ``began`` until now may be measured again, in a run that begun at ``begun``."""
        if not self.repeats or self.repeats_until_s is None:
            return self.repeats
        return now - begun + (now - began) <= self.repeats_until_s

    def outcomes(self) -> list[Outcome]:
        """Every gate of this form, judged on what was measured."""
        return [self._judge(gate) for gate in self.chosen_gates()]

    def _judge(self, gate: Gate) -> Outcome:
        return judge(gate, self.form, self.workloads, self.rounds, self.machine)

    def _is_undecided(self, name: str) -> bool:
        gates = [gate for gate in self.chosen_gates() if gate.workloads[self.form] == name]
        return any(needs_more_samples(self._judge(gate), gate, self.machine) for gate in gates)

    def _measure(self, pool: RankPool, workload: Workload, seed: int) -> list[Round]:
        job: Job = importlib.import_module(f"perf.{self.component}").JOBS[workload.job]
        with tempfile.TemporaryDirectory(prefix="twinproof-bench-", dir=self.folder) as folder:
            try:
                by_rank = pool.run(
                    job, workload.rank_count, workload, folder, workload.round_count, seed, timeout_s=_TIMEOUT_S
                )
            except pytest.skip.Exception as reason:
                # An implementation need not have every component; a job may need another than its own.
                self.lacking[workload.name] = str(reason)
                return []
        return merge_ranks(by_rank)
