"""Sizes that just fit and those that just do not, and what errors say of them."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import assert_equal, raises, requirement, succeeds
from twinproof.errors import ConfigError, IdRangeError, ShapeError


@requirement("PIPE-371", "First weights MUST lie within 1 / sqrt(rows) of zero unless bounds are given, 0 among them.")
def test_bounds_of_first_weights(pipeline: Any) -> None:
    for rows in (1, 4, 9, 1024):
        config = pipeline.EmbeddingBagConfig(num_embeddings=rows, embedding_dim=8, name="t", feature_names=["f"])
        found = (config.get_weight_init_min(), config.get_weight_init_max())
        assert_equal(found, (-1 / rows**0.5, 1 / rows**0.5), where=f"bounds of {rows} rows")
        for bounds in ((0.0, 0.25), (-0.25, 0.0), (0.0, 0.0)):
            config.weight_init_min, config.weight_init_max = bounds
            found = (config.get_weight_init_min(), config.get_weight_init_max())
            assert_equal(found, bounds, where=f"given bounds of {rows} rows")


@requirement(
    "PIPE-372",
    "Columns and weights MUST be refused where they are fewer or more than widths and ids, and the size be told.",
)
def test_sizes(pipeline: Any) -> None:
    for width in (4, 6):
        with raises(ShapeError, mentions=("[2, 3]", f"(7, {width})"), where=f"{width} columns of 5"):
            pipeline.KeyedTensor(["a", "b"], [2, 3], torch.zeros(7, width))
    with raises(ShapeError, mentions=("[5]",), where="fewer widths than keys"):
        pipeline.KeyedTensor(["a", "b"], [5], torch.zeros(7, 5))
    with succeeds("KeyedTensor", where="5 columns of 5"):
        pipeline.KeyedTensor(["a", "b"], [2, 3], torch.zeros(7, 5))
    table = pipeline.EmbeddingBagConfig(num_embeddings=9, embedding_dim=2, name="t", feature_names=["f"])
    collection = pipeline.EmbeddingBagCollection([table], is_weighted=True)
    for count in (4, 5, 6):
        bags = pipeline.KeyedJaggedTensor(
            ["f"], torch.arange(4), torch.ones(count), lengths=torch.tensor([1, 3], dtype=torch.int32)
        )
        if count == 4:
            with succeeds("a lookup", where="a weight for each id"):
                collection(bags)
            continue
        with raises(ShapeError, mentions=(f"({count},)", "4"), where=f"{count} weights of 4 ids"):
            collection(bags)


@requirement(
    "PIPE-373", "A table MUST be cut by columns over one rank at least, none twice, and one for each column at most."
)
def test_ranks_of_columns(pipeline: Any) -> None:
    from twinproof.pipeline.sharding import ColumnWise

    table = pipeline.EmbeddingBagConfig(num_embeddings=9, embedding_dim=3, name="t", feature_names=["f"])
    fitting: list[tuple[int, ...]] = [(0,), (1, 0), (0, 2, 1)]
    for ranks in fitting:
        with succeeds("column_wise", where=f"ranks {ranks}"):
            ColumnWise().check(table, ranks)
    wrong: list[tuple[int, ...]] = [(), (0, 0), (1, 0, 1), (0, 1, 2, 3)]
    for ranks in wrong:
        with raises(ConfigError, mentions=("t", repr(ranks)), where=f"ranks {ranks}"):
            ColumnWise().check(table, ranks)


@requirement("PIPE-374", "Begins of features that are not those of their lengths MUST be refused, smaller and larger.")
def test_begins_of_features(pipeline: Any) -> None:
    def made(begins: list[int]) -> Any:
        lengths = torch.tensor([1, 0, 2, 1], dtype=torch.int32)
        found = pipeline.KeyedJaggedTensor(["a", "b"], torch.arange(4), lengths=lengths, offset_per_key=begins)
        return found["b"].values().tolist(), found.offset_per_key()

    assert_equal(made([0, 1, 4]), ([1, 2, 3], [0, 1, 4]), where="second of two features")
    for begins in ([0, 0, 4], [0, 2, 4], [0, 1, 3], [0, 1, 5], [1, 1, 4]):
        with raises(ShapeError, mentions=(repr(begins), "[0, 1, 4]"), where=f"begins {begins}"):
            made(begins)


@requirement("PIPE-375", "An id outside its table MUST be told with table, sample and position, of any number of each.")
def test_places_of_ids(pipeline: Any) -> None:
    for table_count in (1, 2, 3, 5):
        rows = [10 + number for number in range(table_count)]
        names = [f"t{number}" for number in range(table_count)]
        tables = [
            pipeline.EmbeddingBagConfig(num_embeddings=count, embedding_dim=2, name=name, feature_names=[f"f{name}"])
            for name, count in zip(names, rows, strict=True)
        ]
        collection = pipeline.EmbeddingBagCollection(tables)
        for stride in (1, 2, 7):
            lengths = torch.full((table_count * stride,), 2, dtype=torch.int32)
            for table in range(table_count):
                sample = (table + 1) % stride
                position = 2 * (table * stride + sample) + 1
                ids = torch.zeros(int(lengths.sum()), dtype=torch.int64)
                ids[position] = rows[table]
                bags = pipeline.KeyedJaggedTensor([f"f{name}" for name in names], ids, lengths=lengths)
                said = (
                    f"table {names[table]}, sample {sample}, position {position}",
                    f"got: {rows[table]};",
                    f"0 to {rows[table] - 1}",
                )
                with raises(IdRangeError, mentions=said, where=f"{table_count} tables, {stride} samples"):
                    collection(bags)


@requirement(
    "PIPE-377", "The text of a table's part MUST say the global shape, and the part's own and its place, or none."
)
def test_texts_of_parts(pipeline: Any) -> None:
    from twinproof.pipeline.sharded import TableShard

    part = TableShard.make((9, 4), torch.float16, torch.zeros(3, 2, dtype=torch.float16), (6, 2))
    assert_equal(repr(part), "TableShard(shape=(9, 4), dtype=torch.float16, local=(3, 2) at (6, 2))", where="a part")
    empty = TableShard.make((9, 4), torch.float32, None)
    assert_equal(repr(empty), "TableShard(shape=(9, 4), dtype=torch.float32, local=None at (0, 0))", where="no part")


@requirement("PIPE-451", "A kind of sharding that there is not MUST be refused with the kinds that there are.")
def test_kinds(pipeline: Any) -> None:
    for kind, ranks in (("table_wise", (0,)), ("row_wise", ()), ("column_wise", (0,)), ("data_parallel", ())):
        with succeeds("TableSharding", where=kind):
            pipeline.TableSharding(kind, ranks)
    kinds = ("row-wise", "table_wise", "row_wise", "column_wise", "data_parallel", "key_value")
    with raises(ConfigError, mentions=kinds):
        pipeline.TableSharding("row-wise")


@requirement("PIPE-452", "More weights than values MUST be refused where a batch is permuted or put together.")
def test_more_weights(pipeline: Any) -> None:
    def made(count: int) -> Any:
        return pipeline.KeyedJaggedTensor(["a", "b"], torch.arange(4), torch.ones(count), torch.tensor([1, 3]))

    uses: dict[str, Any] = {"permute": lambda b: b.permute([1, 0]), "concat": lambda b: type(b).concat([b, made(4)])}
    for name, use in uses.items():
        with succeeds(name, where="a weight for each value"):
            use(made(4))
        for count in (3, 5, 8):
            with raises(ShapeError, mentions=("weight", "4"), where=f"{name}, {count} weights of 4 values"):
                use(made(count))
