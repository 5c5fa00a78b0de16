"""Train a sharded model through the Fused pipeline, its dense optimizer offloaded; kill it at any step, and resume.

Shows: `TrainPipelineFusedSparseDist` over table-, row- and key-value-sharded tables on two ranks, rows evicted on the
way, `OptimizerStateOffloader` for the dense part, and one checkpoint of all of it, saved with batches in flight.
What the resumed ranks hold must equal, bit for bit, what a sequential loop holds that was never stopped. The training
itself is `conformance/pipeline/skip_gram.py`; it reads the standard library's own source.

Run it with the extra "test" installed; about a minute on two cores:

    python examples/pipeline_skip_gram.py --work FOLDER [--stop STEP] [--impl PACKAGE] [--report FILE.json]

The step to stop after is drawn at random unless it is given. Prints the verdict, "yes" or "NO" and why, and then steps,
samples, tensors compared, pairs and rows evicted. Exits with 1 if the verdict is NO. FOLDER is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from pathlib import Path

import torch

from conformance.harness import Mismatch, RankPool
from conformance.kvstore.corpus import Corpus, standard_library
from conformance.pipeline.skip_gram import RANKS, Plan, prove

PLAN = Plan(batch=512, step_count=40, row_count=100_003, hidden=768, evict_every=10)


def main(words: list[str] | None = None) -> int:
    """Run everything; returns 0 if the verdict is yes."""
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
