"""What the requirements of schedules go through: schedules by name, their options, and loaders that fail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

FUSED = "TrainPipelineFusedSparseDist"
EVAL_FUSED = "EvalPipelineFusedSparseDist"
EXACT = ("TrainPipelineBase", "TrainPipelineSparseDist", FUSED)
TRAINING = (*EXACT, "PrefetchTrainPipelineSparseDist", "TrainPipelineSemiSync")
WITHOUT_PREFETCH = (*EXACT, "TrainPipelineSemiSync")
# So many ids and bags are a part for a thread; so many words are worth a thread that sorts them.
PART_IDS, SPLIT_WORDS = 512, 65536
# So many bytes are worth a thread that copies them; a row of so many occurrences is summed by columns.
COPIED_BYTES, LONG_ROW = 65536, 4096
EVALUATION = ("EvalPipelineSparseDist", EVAL_FUSED)

Variants = tuple[tuple[str, dict[str, Any]], ...]
PLACEMENTS: tuple[dict[str, Any], ...] = (
    {},
    {"emb_lookup_stream": "new"},
    {"emb_lookup_stream": "current"},
    {"embedding_lookup_after_data_dist": True},
    {"embedding_lookup_before_optimizer": True},
    {"emb_lookup_stream": "new", "embedding_lookup_before_optimizer": True},
    {"use_emb_lookup_stream": True, "embedding_lookup_after_opt": True},
)
VARIANTS: Variants = (
    *((name, {}) for name in EXACT),
    *((FUSED, options) for options in PLACEMENTS[1:]),
    ("TrainPipelineSemiSync", {"start_batch": 10**6}),
)


class Context:
    """What a pipeline's ``context_type`` may be."""

    def __init__(self, *, index: int, version: int) -> None:
        self.index, self.version = index, version


class LoaderError(Exception):
    """A loader's own."""


class Breaking(Iterator[Any]):
    """Batches; raises in place of each number in ``at``, once."""

    def __init__(self, batches: list[Any], at: set[int], error: BaseException) -> None:
        self._batches, self._at, self._error, self._number = batches, at, error, -1

    def __next__(self) -> Any:
        if self._number + 1 in self._at:
            self._at.discard(self._number + 1)
            raise self._error
        self._number += 1
        if self._number >= len(self._batches):
            raise StopIteration
        return self._batches[self._number]


def with_bad_id(pipeline: Any, ids: Any) -> Any:
    """The ids of a batch, and one that no table has in the first bag."""
    lengths = ids.lengths().clone()
    lengths[0] += 1
    return pipeline.KeyedJaggedTensor(ids.keys(), torch.cat([torch.tensor([10**6]), ids.values()]), lengths=lengths)
