"""One deliberate mistake in each component, as in a textbook: what the suite says of an implementation that has it.

Each is the reference with one verb rewritten, and a mistake in it that people make. Run it from the folder above:

    PYTHONPATH=examples twinproof verify --impl mistakes conformance.kvstore.test_values -q

The end of the output groups the failures by their first difference. Each failure names the requirement, what came, what
was expected, and a minimal program. `twinproof new-impl NAME --component kvstore` writes the frame for a component of
your own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

import refimpl.checkpoint
import refimpl.kvstore
import refimpl.offload
import refimpl.pipeline
from twinproof.checkpoint import dcp
from twinproof.checkpoint.catalog import LoadJob
from twinproof.kvstore import store
from twinproof.kvstore.store import LockedRows
from twinproof.offload import offloader
from twinproof.offload.states import Bundle, bindings
from twinproof.pipeline import modules, sharded
from twinproof.pipeline.jagged import Bags


def component(reference: Any, **written: Any) -> SimpleNamespace:
    """A component of these names and, for the rest, the reference's."""
    names = {name: getattr(reference, name) for name in (*reference.__all__, "CAPABILITIES")}
    return SimpleNamespace(**{**names, **written})


# The store: of duplicate ids in one call the first wins, because a dictionary was filled from the back.


class FirstWins(refimpl.kvstore.DictRows):
    """Rows in dictionaries."""

    def write(self, table: str, ids: torch.Tensor, values: torch.Tensor, begin: int, now: int, *, visit: bool) -> None:
        back = torch.arange(ids.numel() - 1, -1, -1)
        super().write(table, ids[back], values[back], begin, now, visit=visit)


class KVStore(store.KVStore, engine=lambda options: LockedRows(FirstWins(options))):
    """A store over these rows."""


kvstore = component(refimpl.kvstore, KVStore=KVStore)


# The checkpoint: values are copied as numbers, and the payloads of NaNs get lost on the way.


class AsNumbers(refimpl.checkpoint.ReadWholeFiles):
    """Reads whole files."""

    def read(self, job: LoadJob) -> None:
        super().read(job)
        for wanted in job.ranges:
            if wanted.target.is_floating_point() and wanted.target.element_size() > 1:
                wanted.target[wanted.target.isnan()] = torch.nan


class HuggingFaceStorageReader(dcp.HuggingFaceStorageReader, engine=AsNumbers):
    """A reader over this engine."""


checkpoint = component(refimpl.checkpoint, HuggingFaceStorageReader=HuggingFaceStorageReader)


# The offloader: states are kept in bfloat16 on the host, to save memory.


class Rounded(refimpl.offload.Blocking):
    """Copies that block."""

    def to_host(self, bundles: Iterable[Bundle], *, only: Any = None, copies: bool = True, binds: bool = True) -> None:
        moved = list(bundles)
        super().to_host(moved, only=only, copies=copies, binds=binds)
        for bundle in moved:
            for _, tensor in bindings(self.plan.optimizer, bundle):
                if tensor.is_floating_point() and self.is_on_host(tensor):
                    tensor.copy_(tensor.to(torch.bfloat16))


class OptimizerStateOffloader(offloader.OptimizerStateOffloader, transfers=Rounded):
    """An offloader over these transfers."""


offload = component(refimpl.offload, OptimizerStateOffloader=OptimizerStateOffloader)


# The tables: a row is updated once for each of its occurrences in a batch, instead of once with their sum.


class OncePerOccurrence(refimpl.pipeline.PlainLookup):
    """One feature after the other."""

    def update(
        self,
        tables: Sequence[Any],
        feature_tables: Sequence[int],
        bags: Bags,
        grad: torch.Tensor,
        optimizer: str,
        hyper: Any,
    ) -> None:
        ends = bags.offsets[1:]
        for position in range(bags.indices.numel()):
            # A batch that holds this one id, in its own bag.
            offsets = torch.cat([ends.new_zeros(1), (ends > position).to(ends.dtype)])
            weights = None if bags.weights is None else bags.weights[position : position + 1]
            one = Bags(bags.indices[position : position + 1], offsets, weights)
            super().update(tables, feature_tables, one, grad, optimizer, hyper)


class TableBatchedEmbeddingBags(modules.TableBatchedEmbeddingBags, engine=OncePerOccurrence):
    """Tables over this lookup."""


class ShardedEmbeddingBagCollection(
    sharded.ShardedEmbeddingBagCollection,
    bags=TableBatchedEmbeddingBags,
    engine=OncePerOccurrence,
    exchange=refimpl.pipeline.ToldEverything,
):
    """The sharded collection over them."""


pipeline = component(
    refimpl.pipeline,
    TableBatchedEmbeddingBags=TableBatchedEmbeddingBags,
    ShardedEmbeddingBagCollection=ShardedEmbeddingBagCollection,
)
