"""Skip-gram saved, killed and resumed, over one module's text; `examples/pipeline_skip_gram.py` takes all of them."""

from __future__ import annotations

import textwrap
from pathlib import Path

from conformance.harness import RankPool, requirement
from conformance.kvstore.corpus import Corpus
from conformance.pipeline.skip_gram import RANKS, Plan, prove


@requirement(
    "PIPE-146",
    "A Fused training of table-, row- and key-value-sharded tables with an offloaded dense optimizer that is saved "
    "with batches in flight, killed and resumed MUST end as the loop that was never stopped, bit for bit, eviction "
    "included.",
)
def test_killed_and_resumed(rank_pool: RankPool, tmp_path: Path) -> None:
    plan = Plan(batch=12, step_count=9, row_count=101, hidden=8, evict_every=4)
    corpus = Corpus.of([Path(textwrap.__file__).read_bytes()], plan.batch * RANKS * plan.step_count)
    prove(rank_pool, plan, corpus, 5, tmp_path)
