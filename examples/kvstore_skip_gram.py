"""Train embeddings of a million words and pairs of words whose rows live in a store; save, kill, resume on more ranks.

Shows: `KVEmbeddingBag` over a `KVStore` with eviction, whole-row saves, and a resume on another number of ranks.
The text is the standard library's own source. Two ranks train, save half-way and are killed by SIGKILL; three resume.
Their rows must equal, bit for bit, those of a job that was never killed, and those of a job of one rank. The reference
judges a prefix of the text. The training itself is `conformance/kvstore/skip_gram.py`.

Run it with the extra "test" installed; about a minute and 2 GB of WORK on two cores, less with fewer steps:

    python examples/kvstore_skip_gram.py --work FOLDER [--steps N] [--impl PACKAGE] [--report FILE.json]

Prints a line for each verdict, "yes" or "NO" and why, and then rows, ids a second and seconds of every run. Exits with
1 if any verdict is NO. FOLDER is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from conformance.harness import Mismatch, RankPool, assert_le
from conformance.kvstore.corpus import Corpus, standard_library
from conformance.kvstore.skip_gram import Plan
from conformance.kvstore.skip_gram_runs import SkipGramRuns

STEPS, ROWS_MIN = 120, 1_000_000
# The reference takes some 20 microseconds for each id; this is what a quarter of a minute pays for.
PREFIX = Plan.of(24, batch=4_000)


def check_size(job: SkipGramRuns, rows_min: int) -> str:
    """The store was as large as promised, rows did go, and the model learned something."""
    facts = job.facts["one rank"]
    inputs = job.rows["one rank"]["inputs.ids"].numel()
    assert_le(rows_min, inputs, where="rows of words and pairs")
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
    """Run everything; returns 0 if every verdict is yes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--impl", default="fastimpl")
    parser.add_argument("--steps", type=int, default=STEPS, help="at most, of 20000 samples each")
    parser.add_argument("--report", type=Path)
    options = parser.parse_args(words)
    options.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(2)
    begun = time.perf_counter()
    batch = Plan.of(1).batch
    corpus = Corpus.of(standard_library(), options.steps * batch)
    made = time.perf_counter() - begun
    plan = Plan.of(corpus.sample_count // batch)
    # Fewer steps see proportionally more new words.
    rows_min = ROWS_MIN * min(options.steps, STEPS) // STEPS
    with RankPool(options.impl) as pool:
        job = SkipGramRuns(pool, plan, corpus, options.work)
        print(f"\nskip-gram over the standard library through {options.impl}: {plan.sample_count} samples")
        steps: dict[str, Callable[[], str]] = {
            "one rank, the judge": job.run_single,
            f"{rows_min} rows of words and pairs, some evicted, and it learns": lambda: check_size(job, rows_min),
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
