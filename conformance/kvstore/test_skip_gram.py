"""Skip-gram saved, killed and resumed, over one module's text; `examples/kvstore_skip_gram.py` takes all of them."""

from __future__ import annotations

import textwrap
from pathlib import Path
from types import ModuleType

import torch

from conformance.harness import RankPool, assert_equal, requirement
from conformance.kvstore.corpus import Corpus, hashed
from conformance.kvstore.skip_gram import Plan
from conformance.kvstore.skip_gram_runs import SkipGramRuns


@requirement(
    "KV-110",
    "A training that is saved, killed and resumed on more ranks MUST end with the same rows, bit for bit, as one that "
    "was never killed, as one of a single rank, and as the reference's; eviction included.",
)
def test_killed_and_resumed(impl: ModuleType, rank_pool: RankPool, tmp_path: Path) -> None:
    plan = Plan.of(12, batch=40)
    corpus = Corpus.of([Path(textwrap.__file__).read_bytes()], plan.sample_count)
    assert_equal(corpus.sample_count, plan.sample_count, where="samples")
    job = SkipGramRuns(rank_pool, plan, corpus, tmp_path)
    job.run_single()
    job.run_prefix(impl.__name__, plan)
    job.run_killed()
    job.check_saved()
    job.run_resumed()
    job.run_recut()
    evicted = [job.facts[name]["evicted"] > 0 for name in ("one rank", "resumed", "never killed")]
    assert_equal(evicted, [True] * 3, where="rows were evicted")


def test_samples_are_a_function_of_the_text() -> None:
    corpus = Corpus.of([b"a b, c", b"a d e"], 10)
    words = [hashed(b"word", word) for word in (b"a", b"b", b"c", b"a", b"d", b"e")]
    assert corpus.words.tolist() == words
    assert corpus.sample_count == 2
    assert corpus.bags[:, 0].tolist() == words[3:5]
    pair = b"".join(word.to_bytes(8, "little", signed=True) for word in (words[1], words[3]))
    assert corpus.bags[0, 2].item() == hashed(b"pair2", pair)
    assert torch.unique(corpus.bags).numel() == 8
    contexts = corpus.contexts(torch.tensor([0, 1]))
    assert contexts[:, 0].tolist() == words[4:]
    assert torch.isin(contexts, corpus.words).all()
    assert torch.equal(corpus.contexts(torch.tensor([1])), contexts[1:])
