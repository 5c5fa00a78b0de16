"""F. What table-batched lookups are given: bad ids, nothing, other dtypes and strides, edits, refusals."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any

import torch

from conformance.harness import Rank, assert_equal, raises, requirement, succeeds
from conformance.pipeline.batches import Jagged, random_jagged, values_of
from conformance.pipeline.every_module import EVERY, batch_of, whole
from conformance.pipeline.model import Naive, assert_bits, assert_tables, hyper_of, lookups_of, train
from conformance.pipeline.sharding import collection_of, placed, sharded_of
from twinproof.errors import IdRangeError, ShapeError


@requirement(
    "PIPE-040",
    "An id outside its table MUST raise and change nothing under fatal, and be row 0 under warning, with a line in the "
    "log, and under ignore, without.",
)
def test_bad_ids(pipeline: Any, caplog: Any) -> None:
    config = pipeline.EmbeddingBagConfig(6, 4, "t", feature_names=["f"])
    weight = values_of((6, 4), 1)
    for bad in (-1, 6, 2**40, -(2**63)):
        batch, mended = Jagged(["f"], [[[1, bad], [], [2]]]), Jagged(["f"], [[[1, 0], [], [2]]])
        lookups = lookups_of(pipeline, [config], [weight], "adagrad")
        with raises(IdRangeError, mentions=(str(bad), "0 to 5", "table t", "sample 0")):
            lookups(*batch.flat())
        assert_bits(lookups.weight(0), weight, "weight after a refusal")
        for check, lines in (("warning", 1), ("ignore", 0)):
            caplog.clear()
            lookups, naive = (
                lookups_of(pipeline, [config], [weight], "adagrad", bounds_check=check),
                Naive([config], [weight], "adagrad"),
            )
            ids, offsets, _ = batch.flat()
            given_ids = ids.clone()
            pooled = lookups(ids, offsets)
            assert_bits(ids, given_ids, "ids of the caller")
            assert_bits(pooled.detach(), naive.pooled(mended), f"{check} pooled")
            pooled.backward(torch.ones(3, 4))
            naive.step(mended, torch.ones(3, 4), hyper_of(1))
            assert_tables(lookups, naive, check)
            assert_equal(sum(str(bad) in record.getMessage() for record in caplog.records), lines, where=f"{check} log")


@requirement(
    "PIPE-064",
    "Batches with no ids at all, with features that are always empty, with one sample and of changing size MUST work.",
)
def test_empty(pipeline: Any) -> None:
    configs = [pipeline.EmbeddingBagConfig(6, 4, f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]
    weights = [values_of((6, 4), i) for i in range(2)]
    lookups, naive = placed(pipeline, lookups_of(pipeline, configs, weights, "adam")), Naive(configs, weights, "adam")
    steps: list[list[list[list[int]]]] = [
        [[[], []], [[], []]],
        [[[1]], [[]]],
        [[[], [2, 2], []], [[], [], []]],
        [[[0]], [[5]]],
    ]
    for step, bags in enumerate(steps):
        train(lookups, naive, Jagged(["f0", "f1"], bags), step, f"step {step}")


@requirement(
    "PIPE-068",
    "Ids and offsets of int32 and int64, strided ids, and ids that share storage MUST give the same bits, and stay as "
    "they were.",
)
def test_dtypes_of_ids(pipeline: Any) -> None:
    config = pipeline.EmbeddingBagConfig(6, 4, "t", feature_names=["f"])
    weight = values_of((6, 4), 1)
    batch = random_jagged(["f"], [6], 5, 3, weighted=True)
    ids, offsets, scale = batch.flat()
    assert scale is not None
    wide = torch.stack([ids, ids + 100], dim=1)
    forms = {
        "int32": (ids.int(), offsets.int(), scale),
        "mixed": (ids.int(), offsets, scale),
        "strided": (wide[:, 0], offsets, torch.stack([scale, -scale], dim=1)[:, 0]),
    }
    expected = lookups_of(pipeline, [config], [weight])
    first = expected(ids, offsets, scale)
    first.backward(torch.ones(5, 4))
    for name, form in forms.items():
        lookups, copies = lookups_of(pipeline, [config], [weight]), [part.clone() for part in form]
        pooled = lookups(*form)
        assert_bits(pooled.detach(), first.detach(), f"{name} pooled")
        pooled.backward(torch.ones(5, 4))
        assert_bits(lookups.weight(0), expected.weight(0), f"{name} weight")
        for part, copy in zip(form, copies, strict=True):
            assert_bits(part, copy, f"{name} input")


@requirement("PIPE-061", "An edit of a table in place between steps MUST be seen by the next lookup.")
def test_edit(pipeline: Any) -> None:
    config = pipeline.EmbeddingBagConfig(6, 4, "t", feature_names=["f"])
    lookups = lookups_of(pipeline, [config], [values_of((6, 4), 1)])
    flat = Jagged(["f"], [[[2], [3]]]).flat()
    lookups(*flat).backward(torch.ones(2, 4))
    lookups.weight(0)[2] = 7.0
    assert_bits(lookups(*flat).detach()[0], torch.full((4,), 7.0), "the edited row")


@requirement(
    "PIPE-104",
    "Offsets that do not cut the ids, or weights of another number, MUST be refused before anything is read.",
)
def test_refusals(pipeline: Any) -> None:
    configs = [pipeline.EmbeddingBagConfig(6, 4, f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]
    weights = [values_of((6, 4), i) for i in range(2)]
    lookups = lookups_of(pipeline, configs, weights)
    ids = torch.tensor([1, 2, 3])
    for offsets in ([0, 1, 3, 3], [0, 4, 3], [1, 2, 3], [0, 1, 2], [0, 3, 2, 2, 3], []):
        with raises(ShapeError):
            lookups(ids, torch.tensor(offsets, dtype=torch.int64))
    with raises(ShapeError, mentions=("weight",)):
        lookups(ids, torch.tensor([0, 1, 3]), torch.ones(2))
    for index, weight in enumerate(weights):
        assert_bits(lookups.weight(index), weight, "weight")


def _weighted(pipeline: Any, kind: str, check: str, ids: torch.Tensor) -> list[torch.Tensor]:
    """What is pooled of weighted bags of one table, the gradient of the weights, and the table after a step."""
    config, weight = pipeline.EmbeddingBagConfig(6, 4, "t", feature_names=["f"]), values_of((6, 4), 1)
    scale, lengths = values_of((4,), 2).requires_grad_(), torch.tensor([2, 0, 2])
    if kind == "table-batched":
        module = lookups_of(pipeline, [config], [weight], "adagrad", bounds_check=check)
        pooled = module(ids, torch.tensor([0, 2, 2, 4]), scale)
        table = module.weight(0)
    else:
        module = collection_of(pipeline, [config], [weight], is_weighted=True, bounds_check=check)
        table = module.embedding_bags["t"].weight.detach()
        if kind != "collection":
            plan = {"t": pipeline.table_wise(0) if kind == "table_wise" else pipeline.row_wise()}
            module = sharded_of(pipeline, module, plan, "adagrad", device="cpu", bounds_check=check)
            table = module.local_shards()["t"][1]
        pooled = module(pipeline.KeyedJaggedTensor(["f"], ids, scale, lengths=lengths)).values()
    found = pooled.detach().clone()
    pooled.backward(values_of((3, 4), 3))
    gradients = [module.embedding_bags["t"].weight.grad] if kind == "collection" else [table]
    return [found, torch.zeros(4) if scale.grad is None else scale.grad, *gradients]


@requirement(
    "PIPE-434",
    "A weighted batch with ids outside their table MUST be looked up, under warning and ignore, as the same batch with "
    "row 0 in their place: weights scale rows, and get their gradient, in every module.",
)
def test_weights_beside_bad_ids(pipeline: Any) -> None:
    for check in ("warning", "ignore"):
        for kind in ("table-batched", "collection", "table_wise", "row_wise"):
            found = _weighted(pipeline, kind, check, torch.tensor([1, 6, -1, 2]))
            expected = _weighted(pipeline, kind, check, torch.tensor([1, 0, 0, 2]))
            names = ("pooled rows", "gradient of the weights", "the table, or its gradient")
            for name, one, other in zip(names, found, expected, strict=True):
                assert_bits(one, other, f"{kind}, {check}: {name}")


def _every_other(data: torch.Tensor) -> torch.Tensor:
    """The same numbers, with others between them."""
    return torch.stack([data, data + 1], dim=1)[:, 0]


FORMS = ("ids", "lengths", "offsets", "weights")


def _found(pipeline: Any, module: Any, batch: Jagged, weights: torch.Tensor, form: str) -> list[torch.Tensor]:
    """What is looked up of a batch of which one part has gaps, its state after a step, and the weights' gradient."""
    parts = {**dict(zip(("ids", "offsets"), batch.flat()[:2], strict=True)), "weights": weights.requires_grad_()}
    cut_by = "lengths" if form == "lengths" else "offsets"
    parts["lengths"] = parts["offsets"].diff()
    given = {name: _every_other(part) if name == form else part for name, part in parts.items()}
    if isinstance(module, pipeline.TableBatchedEmbeddingBags):
        found = module(given["ids"], given["offsets"], given["weights"])
    else:
        kjt = pipeline.KeyedJaggedTensor(batch.keys, given["ids"], given["weights"], **{cut_by: given[cut_by]})
        result = module(kjt)
        is_rows = isinstance(result, dict)
        found = torch.cat([part.values() for part in result.values()]) if is_rows else result.values()
    rows = found.detach().clone()
    found.backward(values_of(found.shape, 9))
    held = [*module.buffers(), *(param.grad for param in module.parameters() if param.grad is not None)]
    if hasattr(module, "local_shards"):
        held += [
            tensor for _, weight, states in module.local_shards().values() for tensor in (weight, *states.values())
        ]
    return [rows, *held, *([] if weights.grad is None else [weights.grad])]


def _with_gaps(pipeline: Any, make: Callable[[], Any], seed: int, where: str) -> None:
    batch = batch_of(seed)
    count = len(batch.flat()[0])
    expected = _found(pipeline, make(), batch, values_of((count,), 5), "none")
    for form in FORMS:
        with succeeds("a lookup", where=f"{where}, {form} with gaps"):
            found = _found(pipeline, make(), batch, values_of((count,), 5), form)
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_bits(one, other, f"{where}, {form} with gaps: tensor {number}")


def _by_rows(pipeline: Any, group: Any = None) -> Any:
    """Tables that are cut alike, so that a batch is cut as it stands."""
    return sharded_of(
        pipeline, whole(pipeline), {f"t{i}": pipeline.row_wise() for i in range(3)}, "sgd", group, device="cpu"
    )


def _with_gaps_on_ranks(rank: Rank) -> None:
    pipeline = rank.component("pipeline")
    _with_gaps(pipeline, partial(_by_rows, pipeline, rank.group), 3 + rank.rank, f"rank {rank.rank}")


@requirement(
    "PIPE-439",
    "Ids, lengths, offsets and weights that are strided views MUST be looked up and trained on as their copies are, by "
    "every module, on one rank and on several.",
)
def test_strided_parts(pipeline: Any, rank_pool: Any) -> None:
    for make in (*EVERY, _by_rows):
        _with_gaps(pipeline, partial(deepcopy, make(pipeline)), 3, make.__name__)
    rank_pool.run(_with_gaps_on_ranks, 2)


# Of each table: its rows, and its features, of which the last two tables share one.
SEVERAL = {"s": (4, ["a", "b"]), "t": (5, ["c"]), "u": (6, ["d", "e", "f"]), "v": (7, ["g", "f"])}


# Of a plan: the table whose rows are in a store, where any int64 is an id; of "u" a feature is another table's, too.
STORED = {"the first in a store": "s", "the third in a store": "u"}


def _checked_modules(pipeline: Any, kvstore: Any, check: str) -> dict[str, Any]:
    """Every module that checks ids, of such tables."""
    weights = {name: values_of((rows, 4), rows) for name, (rows, _) in SEVERAL.items()}
    parts: dict[str, Any] = {name: {"name": name, "feature_names": each} for name, (_, each) in SEVERAL.items()}
    configs = [pipeline.EmbeddingBagConfig(SEVERAL[name][0], 4, **each) for name, each in parts.items()]
    rows = pipeline.EmbeddingCollection(
        [pipeline.EmbeddingConfig(SEVERAL[name][0], 4, **each) for name, each in parts.items()], bounds_check=check
    )
    rows.load_state_dict({f"embeddings.{name}.weight": weight for name, weight in weights.items()})
    whole = collection_of(pipeline, configs, list(weights.values()), bounds_check=check)
    found = {
        "table-batched": lookups_of(pipeline, configs, list(weights.values()), bounds_check=check),
        "bags": whole,
        "rows": rows,
    }
    kinds = {
        "table_wise": pipeline.table_wise(0),
        "row_wise": pipeline.row_wise(),
        "column_wise": pipeline.column_wise([0]),
        "data_parallel": pipeline.data_parallel(),
    }
    for kind, sharding in kinds.items():
        plan = dict.fromkeys(SEVERAL, sharding)
        found[kind] = sharded_of(pipeline, whole, plan, "sgd", device="cpu", bounds_check=check)
    mixed = dict(zip(SEVERAL, kinds.values(), strict=True))
    found["of all kinds"] = sharded_of(pipeline, whole, mixed, "sgd", device="cpu", bounds_check=check)
    for kind, table in STORED.items():
        layouts = {table: kvstore.RowLayout(4, optimizer="sgd")}
        store = kvstore.KVStore(layouts, optimizer_in_row=True, clock=lambda: 1)
        store.set(table, torch.arange(SEVERAL[table][0]), weights[table])
        plan = {**mixed, table: pipeline.key_value(store, kvstore.Buckets(4))}
        found[kind] = sharded_of(pipeline, whole, plan, "sgd", device="cpu", bounds_check=check)
    return found


def _found_by(pipeline: Any, kind: str, module: Any, batch: Jagged) -> torch.Tensor:
    """What a module looks up, in one tensor."""
    if kind == "table-batched":
        features = [name for _, names in SEVERAL.values() for name in names]
        pooled: torch.Tensor = module(*batch.picked(features).flat()).detach()
        return pooled
    found = module(batch.kjt(pipeline))
    if kind == "rows":
        return torch.cat([bags.values().detach() for bags in found.values()])
    # What is stored is found by its id, whatever that is.
    stored = STORED.get(kind, "")
    own = [] if not stored else [f"{name}{suffix}" for name in SEVERAL[stored][1] for suffix in ("", f"@{stored}")]
    columns = [found[name].detach() for name in found.keys() if name not in own]  # noqa: SIM118 - of columns
    return torch.cat(columns, dim=1)


@requirement(
    "PIPE-626",
    "An id outside its table MUST be told by the name and the rows of the table that its feature is looked up in, of "
    "tables of several features and of features that tables share, in every module: by the error under fatal, and in "
    "the log under warning, where row 0 is taken, as under ignore. Beside a key-value table too, where any is inside.",
)
def test_names_of_several_features(pipeline: Any, kvstore: Any, caplog: Any) -> None:
    names = sorted({name for _, names in SEVERAL.values() for name in names})
    modules = {check: _checked_modules(pipeline, kvstore, check) for check in ("fatal", "warning", "ignore")}
    for feature, bad, kind in product(names, (-1, 7), modules["fatal"]):
        where, checks = f"{kind}, feature {feature}, id {bad}", ["warning", "ignore"]
        tables = [name for name, (_, each) in SEVERAL.items() if feature in each and name != STORED.get(kind)]
        batches = [Jagged(names, [[[1], [2, i if name == feature else 3]] for name in names]) for i in (bad, 0)]
        says: tuple[str, ...] = (str(bad),)
        if tables:
            says = (f"table {tables[0]}, sample 1", f"0 to {SEVERAL[tables[0]][0] - 1}", f"got: {bad}", *says)
            with raises(IdRangeError, mentions=says, where=where):
                _found_by(pipeline, kind, modules["fatal"][kind], batches[0])
        else:
            # Of a store alone, in which nothing is outside.
            checks.insert(0, "fatal")
        for check in checks:
            caplog.clear()
            with succeeds("a lookup", where=f"{where}: {check}"):
                found = _found_by(pipeline, kind, modules[check][kind], batches[0])
            expected = _found_by(pipeline, kind, modules[check][kind], batches[1])
            assert_bits(found, expected, f"{where}: {check}")
            text = "".join(record.getMessage() for record in caplog.records)
            told = [all(part in text for part in says), str(bad) in text]
            assert_equal(told, [check == "warning" and bool(tables)] * 2, where=f"{where}: {check} log")
