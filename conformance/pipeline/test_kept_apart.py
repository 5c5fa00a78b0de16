"""What a caller gives stays the caller's: who goes on editing it changes no batch, no columns and no module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from conformance.harness import assert_equal, requirement, succeeds
from conformance.pipeline.model import assert_bits

_HERE = torch.device("cpu")


def _given() -> dict[str, Any]:
    """All that can be said of a batch of two features, of one sample and of two."""
    return {
        "keys": ["a", "b"],
        "stride_per_key": [1, 2],
        "length_per_key": [1, 3],
        "lengths_offset_per_key": [0, 1, 3],
        "offset_per_key": [0, 1, 4],
        "index_per_key": {"a": 0, "b": 1},
        "inverse_indices": (["a", "b"], torch.tensor([[0, 0], [0, 1]])),
    }


def _edit(parts: Any) -> None:
    """Other things in every list and dictionary."""
    for part in parts:
        if isinstance(part, tuple):
            _edit(part)
        elif isinstance(part, list):
            part[:] = [part[-1], part[0], part[0]]
        elif isinstance(part, dict):
            part.update(dict.fromkeys(part, 1), more=2)


def _facts_of(batch: Any) -> list[Any]:
    names = ("keys", "stride_per_key", "length_per_key", "lengths_offset_per_key", "offset_per_key", "index_per_key")
    facts = [getattr(batch, name)() for name in names]
    parts = [(key, part.values().tolist(), part.lengths().tolist()) for key, part in batch.to_dict().items()]
    return [*facts, batch.inverse_indices()[0], parts]


def _columns(pipeline: Any) -> dict[str, tuple[Any, list[Any]]]:
    """Columns of two features, by each way to make them, and the lists that they were made of."""
    keys, widths, begins, places = ["a", "b"], [1, 2], [0, 1, 3], {"a": 0, "b": 1}
    names, values = ["a", "b"], torch.arange(6.0).reshape(2, 3)
    made = pipeline.KeyedTensor(keys, widths, values, 1, begins, places)
    parts = [values[:, :1], values[:, 1:]]
    first = pipeline.KeyedTensor(["a", "b"], [1, 2], values)
    moved = first.to(_HERE)
    return {
        "its constructor": (made, [keys, widths, begins, places]),
        "from_tensor_list": (pipeline.KeyedTensor.from_tensor_list(names, parts), [names, parts]),
        "to": (moved, [first.keys(), first.length_per_key(), first.offset_per_key()]),
    }


@requirement(
    "PIPE-627",
    "Lists and dictionaries that a batch or columns were made of MUST stay the caller's, and those of one that was "
    "moved its own: an edit of them afterwards changes nothing that the other says.",
)
def test_lists_of_the_caller(pipeline: Any) -> None:
    expected = _facts_of(pipeline.KeyedJaggedTensor(**_given_with_parts(_given())))
    for name in _given():
        given = _given()
        batch = pipeline.KeyedJaggedTensor(**_given_with_parts(given))
        _edit([given[name]])
        with succeeds("questions", where=f"{name} was edited"):
            found = _facts_of(batch)
        assert_equal(found, expected, where=f"{name} was edited")
    first = pipeline.KeyedJaggedTensor(**_given_with_parts(_given()))
    moved = first.to(_HERE)
    _edit([first.keys(), first.stride_per_key(), first.length_per_key(), first.inverse_indices()[0]])
    assert_equal(_facts_of(moved), expected, where="a batch that was moved before")
    for way, (columns, parts) in _columns(pipeline).items():
        _edit(parts)
        with succeeds("questions", where=f"columns by {way}"):
            facts = (columns.keys(), columns.length_per_key(), columns.offset_per_key(), columns["b"].tolist())
        assert_equal(facts, (["a", "b"], [1, 2], [0, 1, 3], [[1.0, 2.0], [4.0, 5.0]]), where=f"columns by {way}")


def _given_with_parts(given: dict[str, Any]) -> dict[str, Any]:
    sizes = torch.tensor([[1], [2]], dtype=torch.int32)
    return {
        **given,
        "values": torch.arange(4),
        "lengths": torch.tensor([1, 1, 2]),
        "stride_per_key_per_rank": sizes,
    }


def _modules(pipeline: Any) -> dict[str, tuple[Any, Callable[[Any], Any]]]:
    """The kind of a table, and what makes a module of it."""
    bags, rows = pipeline.EmbeddingBagConfig, pipeline.EmbeddingConfig
    return {
        "bags": (bags, lambda table: pipeline.EmbeddingBagCollection(tables=[table])),
        "rows": (rows, lambda table: pipeline.EmbeddingCollection(tables=[table])),
        "table-batched": (bags, lambda table: pipeline.TableBatchedEmbeddingBags([table])),
        "sharded": (
            bags,
            lambda table: pipeline.ShardedEmbeddingBagCollection(
                pipeline.EmbeddingBagCollection(tables=[table]), {table.name: pipeline.table_wise(0)}
            ),
        ),
    }


def _found(pipeline: Any, module: Any, feature: str) -> torch.Tensor:
    if isinstance(module, pipeline.TableBatchedEmbeddingBags):
        found: torch.Tensor = module(torch.tensor([1, 2]), torch.tensor([0, 2])).detach()
        return found
    batch = pipeline.KeyedJaggedTensor([feature], torch.tensor([1, 2]), lengths=torch.tensor([2]))
    result = module(batch)
    values: torch.Tensor = (result[feature] if isinstance(result, dict) else result).values().detach()
    return values


@requirement(
    "PIPE-628",
    "A table's configuration MUST be as the caller gave it when a module was made of it, features that were left out "
    "included; what is assigned to it afterwards MUST be of the modules that are made of it later, and of no other.",
)
def test_configurations_of_the_caller(pipeline: Any) -> None:
    for name, (kind, make) in _modules(pipeline).items():
        table = kind(num_embeddings=6, embedding_dim=4, name="first")
        before = {**vars(table), "feature_names": list(table.feature_names)}
        module = make(table)
        assert_equal(vars(table), before, where=f"{name}: the configuration")
        expected = _found(pipeline, module, "first")
        table.name, table.num_embeddings = "second", 3
        with succeeds("a lookup of what is made now", where=name):
            found = _found(pipeline, make(table), "second")
        assert_equal(found.shape, expected.shape, where=f"{name}: what is made later")
        table.feature_names.append("another")
        table.embedding_dim = 8
        with succeeds("a lookup of what was made before", where=name):
            found = _found(pipeline, module, "first")
        assert_bits(found, expected, f"{name}: what was made before")
        tables = module.tables if hasattr(module, "tables") else _configs_of(module)
        facts = [(each.name, each.num_embeddings, each.embedding_dim, each.feature_names) for each in tables]
        assert_equal(facts, [("first", 6, 4, ["first"])], where=f"{name}: its tables")


def _configs_of(module: Any) -> Any:
    return module.embedding_bag_configs() if hasattr(module, "embedding_bags") else module.embedding_configs()


def _batch_of_one(pipeline: Any) -> Any:
    values, lengths, weights = torch.tensor([1, 2, 3]), torch.tensor([1, 2]), torch.ones(3)
    return pipeline.KeyedJaggedTensor(keys=["a"], values=values, lengths=lengths, weights=weights)


@requirement(
    "PIPE-647",
    "What is put together, of one part too, MUST be memory of its own, columns that are regrouped and batches that are "
    "joined: who changes it in place changes neither its parts nor another group.",
)
def test_put_together_of_one(pipeline: Any) -> None:
    columns, batches = pipeline.KeyedTensor, pipeline.KeyedJaggedTensor
    groups = [["a"], ["a", "b"], ["a"]]
    regroups: dict[str, Callable[[Any], Any]] = {
        "regroup": lambda given: columns.regroup([given], groups),
        "regroup_as_dict": lambda given: list(columns.regroup_as_dict([given], groups, ["x", "y", "z"]).values()),
        "regroup_kts": lambda given: pipeline.regroup_kts([given], groups),
        "permute_multi_embedding": lambda given: pipeline.permute_multi_embedding([given], groups),
    }
    for where, regroup in regroups.items():
        given = columns(["a", "b"], [2, 2], torch.ones(2, 4))
        first, *others = regroup(given)
        first.zero_()
        for name, each in (("columns", given.values()), ("another group", others[0]), ("a group alike", others[1])):
            assert_bits(each, torch.ones_like(each), f"{name} behind a change of one group, {where}")
    part = torch.ones(2, 2)
    columns.from_tensor_list(["a"], [part]).values().zero_()
    assert_bits(part, torch.ones(2, 2), "a part behind a change of from_tensor_list")
    joins: dict[str, Callable[[Any], Any]] = {
        "concat": lambda given: batches.concat([given]),
        "from_jt_dict": lambda given: batches.from_jt_dict(given.to_dict()),
        "permute": lambda given: given.permute([0]),
    }
    for where, join in joins.items():
        given = _batch_of_one(pipeline)
        joined = join(given)
        for name in ("values", "lengths", "weights"):
            getattr(joined, name)().zero_()
            assert_bits(getattr(given, name)(), getattr(_batch_of_one(pipeline), name)(), f"{name}, {where}")
