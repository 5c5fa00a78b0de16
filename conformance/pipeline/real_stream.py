"""The main job on real input: skip-gram over the standard library's own source through the Fused pipeline.

``python -m conformance.pipeline.real_stream --work FOLDER`` trains table-, row- and key-value-sharded tables and a
heavy, offloaded dense optimizer on two ranks, saves and kills the ranks at a step that is drawn at random, resumes,
and compares every bit with a sequential loop that was never stopped. Exit status 1 when any verdict fails.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from conformance.harness import Mismatch, RankDied, RankPool, assert_equal, assert_le, assert_same_tensor
from conformance.kvstore.real_corpus import Corpus, standard_library
from conformance.pipeline.real_job import Plan, killed_run, resumed_run, sequential_run

RANKS = 2
TIMEOUT_S = 300.0
PLAN = Plan(batch=512, step_count=40, row_count=100_003, hidden=768, evict_every=10)


def prove(pool: RankPool, plan: Plan, corpus: Corpus, stop: int, work: Path) -> dict[str, Any]:
    """Run the loop, the killed and the resumed pipeline; raises Mismatch. Returns facts for the report."""
    path, folder = str(work / "corpus.safetensors"), str(work / "checkpoint")
    corpus.save(Path(path))
    Path(folder).mkdir()
    judges = pool.run(sequential_run, RANKS, plan, path, timeout_s=TIMEOUT_S)
    try:
        pool.run(killed_run, RANKS, plan, path, stop, folder, timeout_s=TIMEOUT_S)
    except RankDied as death:
        assert_equal(death.exit_code, -signal.SIGKILL, where="how the ranks ended")
    else:
        raise Mismatch("the ranks were not killed")
    resumed = pool.run(resumed_run, RANKS, plan, path, stop, folder, timeout_s=TIMEOUT_S)
    compared = 0
    for number, ((expected, scores, _), (got, again)) in enumerate(zip(judges, resumed, strict=True)):
        assert_equal(again, scores[stop:], where=f"scores of rank {number} behind step {stop}")
        assert_equal(sorted(got), sorted(expected), where=f"names of rank {number}")
        for name, value in expected.items():
            assert_same_tensor(got[name], value, where=f"rank {number}: {name}")
            compared += 1
    assert_le(1, sum(evicted for *_, evicted in judges), where="rows evicted")
    return {
        "steps": plan.step_count,
        "stopped_after": stop,
        "samples": plan.batch * RANKS * plan.step_count,
        "tensors_compared": compared,
        "pairs": sum(state["pairs.ids"].numel() for state, *_ in judges),
        "evicted": sum(evicted for *_, evicted in judges),
        "dense_parameters": sum(v.numel() for name, v in judges[0][0].items() if name.startswith("dense.")),
    }


def main(words: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--impl", default="fastimpl")
    parser.add_argument("--stop", type=int, help="the step to stop after; drawn if it is not given")
    parser.add_argument("--report", type=Path)
    options = parser.parse_args(words)
    options.work.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    stop = random.SystemRandom().randrange(1, PLAN.step_count) if options.stop is None else options.stop
    corpus = Corpus.of(standard_library(), PLAN.batch * RANKS * PLAN.step_count)
    try:
        with RankPool(options.impl) as pool:
            facts = {"verdict": "yes", **prove(pool, PLAN, corpus, stop, options.work)}
    except Mismatch as error:
        facts = {"verdict": "NO", "stopped_after": stop, "reason": str(error)}
    shutil.rmtree(options.work, ignore_errors=True)
    facts["seconds"] = round(time.perf_counter() - begun, 1)
    print(f"Fused and offloaded, killed after step {stop}, resumed: equal to the loop, bit for bit:", facts["verdict"])
    for name, value in facts.items():
        print(f"  {name:18} {value}")
    if options.report is not None:
        options.report.write_text(json.dumps(facts, indent=1) + "\n")
    return 0 if facts["verdict"] == "yes" else 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
