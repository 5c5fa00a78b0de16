"""Faults that ``test_mixed_company`` must notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from conformance.harness import fault, mutated, patched, swap
from twinproof.pipeline import modules, sharded


def _twice(kind: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The backward without the wrapper that knows of graphs."""
    found: Callable[..., Any] = kind.backward.__wrapped__  # type: ignore[attr-defined]
    return found


backward_of_graphs = patched(
    "Gradients that a graph goes through are constants to it.",
    swap("twinproof.pipeline.modules:Pooled.backward", staticmethod(_twice(modules.Pooled))),
    swap("twinproof.pipeline.modules:_Rows.backward", staticmethod(_twice(modules._Rows))),
    kills="PIPE-654",
)
weight_gradients_of_graphs = patched(
    "Gradients of weights, and of lookups that are cut, are constants to a graph.",
    swap("twinproof.pipeline.modules:_Lookup.backward", staticmethod(_twice(modules._Lookup))),
    swap("twinproof.pipeline.sharded:_Exchanged.backward", staticmethod(_twice(sharded._Exchanged))),
    swap("twinproof.pipeline.sharded:_SentWeights.backward", staticmethod(_twice(sharded._SentWeights))),
    kills="PIPE-654",
)
dictionaries_of_classes_made_anew = patched(
    "A dictionary of any class is moved as a plain one, and not asked to go.",
    mutated(
        "twinproof.pipeline.stages:move_batch",
        'if hasattr(batch, "to"):',
        'if hasattr(batch, "to") and not isinstance(batch, (dict, tuple)):',
    ),
    kills="PIPE-655",
)


@fault(kills="PIPE-655", at="twinproof.pipeline.stages:with_items")
def attributes_lost(original: Any, batch: Any, change: Any) -> Any:
    """Of a list or a dictionary of a class of its own, the values alone are moved."""
    if isinstance(batch, dict):
        return {key: change(value) for key, value in batch.items()}
    return [change(value) for value in batch]


@fault(kills="PIPE-655", at="twinproof.pipeline.stages:with_tensors")
def subclasses_of_types_stay(original: Any, batch: Any, change: Any) -> Any:
    """Subclasses of batch types are moved nowhere."""
    return original(batch, change) if type(batch).__module__.startswith("twinproof") else batch


versions_of_inference = patched(
    "Tables of inference mode are asked for the versions that they do not have.",
    mutated(
        "twinproof.pipeline.tracing:version_of",
        "object() if tensor.is_inference() else tensor._version",
        "tensor._version",
    ),
    kills="PIPE-656",
    of="fastimpl",
)
edits_of_inference_unseen = patched(
    "Tables without versions count as never written.",
    mutated("twinproof.pipeline.tracing:version_of", "object() if tensor.is_inference()", "0 if tensor.is_inference()"),
    kills="PIPE-656",
    of="fastimpl",
)
taken_over_unseen = patched(
    "A pipeline whose modules another one drives goes on as if it drove them.",
    mutated(
        "twinproof.pipeline.stages:Attachment.is_overlaid",
        "name in self._ahead or now[name] is None or isinstance(now[name], Prepared)",
        "name in self._ahead",
    ),
    kills="PIPE-657",
)
given_back_unseen = patched(
    "A pipeline does not see that another one has given its modules back.",
    mutated("twinproof.pipeline.stages:Attachment.is_overlaid", "now[name] is None or ", ""),
    kills="PIPE-657",
)


@fault(kills="PIPE-658", at="twinproof.pipeline.batches:_check", of="fastimpl")
def names_in_lists(original: Any, features: Any, names: Any, weights: Any) -> None:
    """Each feature is looked for in the list of all."""
    assert all(name in features.keys() for name in names)  # noqa: SIM118 - a list
    original(features, names, weights)


views_of_all_tables = patched(
    "Who looks at one table's part has the parts of all of them made.",
    mutated(
        "twinproof.pipeline.sharded:CutTable.weight",
        "self._parts.view(self._table)",
        'self._parts.views(states=False)[f"embedding_bags.{self._table}.weight"]',
    ),
    kills="PIPE-658",
    of="fastimpl",
)


@fault(kills="PIPE-658", at="fastimpl.pipeline.columns:Columns.take_apart", of="fastimpl")
def slots_gone_through(original: Any, columns: Any, *given: Any) -> torch.Tensor:
    """Each step finds anew which slots are whose."""
    columns._mean_places = columns._places_of(set(columns._mean_features))
    found: torch.Tensor = original(columns, *given)
    return found


assigned_as_given = patched(
    "A load that assigns takes any dtype and any order of memory.",
    mutated(
        "twinproof.pipeline.modules:TableBatchedEmbeddingBags._load_from_state_dict",
        "self._buffers[held].to(dtype).contiguous()",
        "self._buffers[held]",
    ),
    kills="PIPE-659",
)
names_of_features_unchecked = patched(
    "Names of features are left to torch's own error.",
    swap("twinproof.pipeline.modules:check_attributes", lambda *_: None),
    kills="PIPE-660",
)
empty_groups_concatenated = patched(
    "Groups of nothing are left to torch's own error.",
    mutated("twinproof.pipeline.batches:_regrouped", "+ [1]) == 0", "+ [1]) < 0"),
    kills="PIPE-660",
)
lengths_of_lists = patched(
    "Lengths in a list are asked for their dtype.",
    mutated("twinproof.pipeline.jagged:check_integers", 'not hasattr(tensor, "dtype")', "False"),
    kills="PIPE-660",
)
parts_looked_up = patched(
    "Parts of parameters are given to a lookup.",
    mutated("twinproof.pipeline.sharded:_whole", "if is_dtensor(param):", "if False:"),
    kills="PIPE-661",
)
places_not_compared = patched(
    "Tables on meta are looked up in.",
    swap("twinproof.pipeline.modules:check_places", lambda *_: None),
    kills="PIPE-662",
)
first_rows_decide = patched(
    "Of several tables of rows the first one's place is that of all.",
    mutated(
        "twinproof.pipeline.modules:EmbeddingCollection._looked_up",
        "for param in self.parameters()",
        "for param in [next(self.parameters())]",
    ),
    kills="PIPE-662",
)
groups_of_no_optimizer = patched(
    "No optimizer is asked for its groups.",
    mutated(
        "twinproof.pipeline.driver:Pipeline.is_late",
        'getattr(self._optimizer, "param_groups", ())',
        "self._optimizer.param_groups",
    ),
    kills="PIPE-663",
)


@fault(kills="PIPE-663", at="twinproof.pipeline.driver:clear_gradients")
def gradients_of_nobody(original: Any, optimizer: Any) -> None:
    """Gradients of no optimizer are cleared."""
    if optimizer is not None:
        original(optimizer)
