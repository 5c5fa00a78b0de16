"""What stands beside lookups and pipelines: graphs of graphs, batches of any class, other pipelines, many features."""

from __future__ import annotations

import collections
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch

from conformance.harness import Rank, assert_equal, assert_le, raises, requirement, succeeds
from conformance.pipeline.cases import EVAL_FUSED, TRAINING
from conformance.pipeline.jobs import Job, assert_same_state
from conformance.pipeline.model import assert_bits
from conformance.pipeline.sharding import sharded_of
from twinproof.errors import ConfigError, LengthTypeError, UnsupportedError
from twinproof.pipeline import stages
from twinproof.pipeline.sharded import TableShard


def _ids(pipeline: Any, keys: list[str], weights: Any = None) -> Any:
    """Two samples of each feature: ids 0 and 1, then 1."""
    count = len(keys)
    values, lengths = torch.tensor([0, 1, 1] * count), torch.tensor([2, 1] * count)
    return pipeline.KeyedJaggedTensor(keys, values, weights, lengths)


def _bags(pipeline: Any, names: list[str], rows: int = 4, pooling: str = "SUM", **options: Any) -> Any:
    kind = pipeline.PoolingType[pooling]
    tables = [pipeline.EmbeddingBagConfig(rows, 2, name, feature_names=[f"of {name}"], pooling=kind) for name in names]
    return pipeline.EmbeddingBagCollection(tables, **options)


def _lookups(pipeline: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """What was looked up, and what its backward gives a gradient to."""
    weights = [torch.ones(3, requires_grad=True) for _ in range(3)]
    bags, weighted = _bags(pipeline, ["t"]), _bags(pipeline, ["t"], is_weighted=True)
    rows = pipeline.EmbeddingCollection([pipeline.EmbeddingConfig(4, 2, "t", feature_names=["of t"])])
    plain = pipeline.TableBatchedEmbeddingBags(weighted.embedding_bag_configs())
    cut = sharded_of(pipeline, _bags(pipeline, ["t"], is_weighted=True), {"t": pipeline.row_wise()}, "sgd", None)
    replicated = sharded_of(pipeline, _bags(pipeline, ["t"]), {"t": pipeline.data_parallel()}, "sgd", None)
    ids = [_ids(pipeline, ["of t"], each) for each in (None, *weights)]
    looked_up = rows(ids[0])["of t"].values()
    by_weights = plain(torch.tensor([0, 1, 1]), torch.tensor([0, 2, 3]), weights[1])
    return {
        "bags": (bags(ids[0]).values(), bags.embedding_bags["t"].weight),
        "weights of bags": (weighted(ids[1]).values(), weights[0]),
        "rows": (looked_up, rows.embeddings["t"].weight),
        "weights, in the backward": (by_weights, weights[1]),
        "weights, cut": (cut(ids[3]).values(), weights[2]),
        "replicated": (replicated(ids[0]).values(), replicated.embedding_bags["t"].weight),
    }


@requirement(
    "PIPE-654",
    "What differentiates the gradient of a lookup MUST be refused, and never be given a part of it alone; "
    "create_graph=True by itself is taken, and leaves tables without a graph.",
)
def test_second_derivatives(pipeline: Any) -> None:
    for where, (looked_up, param) in _lookups(pipeline).items():
        scale = torch.ones((), requires_grad=True)
        (grad,) = torch.autograd.grad((looked_up * scale).square().sum(), param, create_graph=True)
        with raises(RuntimeError, mentions=["differentiate twice"], where=where):
            torch.autograd.backward(grad.square().sum() + scale)
    plain = pipeline.TableBatchedEmbeddingBags(_bags(pipeline, ["t"]).embedding_bag_configs())
    looked_up = plain(torch.tensor([0, 1, 1]), torch.tensor([0, 2, 3]))
    scale = torch.ones((), requires_grad=True)
    torch.autograd.grad((looked_up * scale).square().sum(), scale, create_graph=True)
    assert_equal([each.requires_grad for each in plain.buffers()], [False] * 2, where="tables and states")


class Named(dict[str, Any]):
    """A dictionary with a constructor and an attribute of its own, which moves by itself."""

    def __init__(self, parts: dict[str, Any], name: str) -> None:
        super().__init__(parts)
        self.name = name

    def to(self, device: Any, non_blocking: bool = False) -> Named:
        """As torchrec's batches have it."""
        return Named({key: part.to(device) for key, part in self.items()}, self.name + ", moved")


class Tagged(list[Any]):
    """A list with an attribute."""

    tag = ""


def _moved(pipeline: Any, batch: Any) -> Any:
    """What a model is called with."""
    seen = list[Any]()

    def forward(given: Any) -> Any:
        seen.append(given)
        return model.weight.sum(), None

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = pipeline.TrainPipelineBase(model, optimizer, torch.device("cpu"), custom_model_fwd=forward)
    schedule.progress(iter([batch]))
    return seen[0]


@requirement(
    "PIPE-655",
    "A batch of a subclass of a dictionary, a list, a tuple or a batch type MUST come to the model as one, with its "
    "attributes; what can move by itself is asked to, and what the loader gave stays as it was.",
)
def test_subclasses_are_moved(pipeline: Any) -> None:
    assert_equal(getattr(_moved(pipeline, Named({"x": torch.ones(1)}, "n")), "name", None), "n, moved", where="to()")
    given = Tagged([torch.ones(1), {"x": 2}])
    given.tag = "t"
    found = _moved(pipeline, given)
    assert_equal((type(found), getattr(found, "tag", None), found is given), (Tagged, "t", False), where="a list")
    with_default = collections.defaultdict(lambda: 3, x=1)
    found = _moved(pipeline, with_default)
    assert_equal((type(found), found.get("x")), (collections.defaultdict, 1), where="a default")
    assert_equal(list(with_default), ["x"], where="the loader's own")

    class Bags(pipeline.JaggedTensor):  # type: ignore[misc]
        """A user's."""

    class Columns(pipeline.KeyedTensor):  # type: ignore[misc]
        """A user's."""

    def doubled(batch: Any) -> Any:
        return stages.move_batch(batch, lambda part: part * 2, torch.device("cpu"))

    bags, columns = Bags(torch.ones(2), None, torch.tensor([1, 1])), Columns(["a"], [1], torch.ones(2, 1))
    for batch in (bags, columns):
        found, where = doubled(batch), type(batch).__name__
        assert_equal(type(found).__name__, where, where="class")
        assert_bits(found.values(), batch.values() * 2, f"{where}: moved")
    packed = doubled(torch.nn.utils.rnn.pack_sequence([torch.ones(2)]))
    assert_equal(packed.batch_sizes.tolist(), [1, 1], where="sizes of packed sequences, which stay on the host")


@requirement(
    "PIPE-656",
    "Tables that were made in inference mode, which have no versions, MUST be evaluated by every schedule, and an edit "
    "be seen by the next batch.",
)
def test_made_in_inference_mode(pipeline: Any) -> None:
    for options in ({}, {"enable_embedding_lookup_prefetch": True}):
        with torch.inference_mode():
            job = Job(pipeline, 5, kinds=("table_wise",))
        loop = Job(pipeline, 5, kinds=("table_wise",))
        loop.model.eval()
        schedule, loader = job.schedule(EVAL_FUSED, **options), iter(job.batches(4))
        for step, batch in enumerate(loop.batches(4)):
            with succeeds("a step", where=f"{options}, step {step}"):
                found = schedule.progress(loader)
            assert_bits(found, loop.step(batch), f"{options}: step {step}")
            for each in (job, loop):
                with torch.inference_mode():
                    each.collections[0].local_weights()[0].mul_(0.5)


@requirement(
    "PIPE-657",
    "Pipelines that take turns in driving one model, with detach() between or without, MUST each have the loop's bits, "
    "and exchange a batch once, or once more where a turn began.",
)
@pytest.mark.parametrize("name", TRAINING)
def test_turns(pipeline: Any, name: str) -> None:
    for detaches in (True, False):
        job, loop = (Job(pipeline, 8, kinds=("table_wise", "row_wise")) for _ in range(2))
        own, exchanged = job.collections[0].input_dist, list[int]()

        def counted(*given: Any, own: Any = own, exchanged: list[int] = exchanged) -> Any:
            exchanged.append(1)
            return own(*given)

        job.collections[0].input_dist = counted
        where = f"detaches={detaches}"
        training, evaluation = job.schedule(name), job.schedule("EvalPipelineSparseDist")
        loader, batches = iter(job.batches(9)), iter(loop.batches(9))
        for turn in range(2):
            for step in range(3):
                exchanged.clear()
                with succeeds("a step", where=f"{where}, turn {turn}, step {step}"):
                    found = training.progress(loader)
                assert_bits(found, loop.step(next(batches)), f"{where}: turn {turn}, step {step}")
                assert_le(len(exchanged), 1 + 2 * (step == 0), where=f"{where}, turn {turn}, step {step}: exchanges")
            shown = job.batches(2, first=20)
            for number, batch in enumerate(shown):
                with succeeds("an evaluation", where=f"{where}, turn {turn}, batch {number}"):
                    found = evaluation.progress(iter([batch]))
                loop.model.eval()
                assert_bits(found, loop.step(batch), f"{where}: turn {turn}, evaluated batch {number}")
                loop.model.train()
            if detaches:
                evaluation.detach()
        assert_same_state(job, loop, where)


class Counted(str):
    """A name that counts how often it is compared with one that is not the same object."""

    __slots__ = ()
    counts: list[int] = [0]  # noqa: RUF012 - of all of them

    def __eq__(self, other: object) -> bool:
        self.counts[0] += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


@requirement(
    "PIPE-658",
    "What a step and a look at a table cost MUST grow with the number of features, and not with its square: the names "
    "that are compared, looks at what is sent where, and parts of tables that are made.",
    needs=("bag_kernels",),
)
def test_many_features(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for count in (8, 16):
        names = [f"t{index}" for index in range(count)]
        whole = _bags(pipeline, names, pooling="MEAN")
        cut = sharded_of(pipeline, whole, {name: pipeline.row_wise() for name in names}, "sgd", None)
        ids = _ids(pipeline, [Counted(f"of {name}") for name in reversed(names)])
        cut(ids).values().sum().backward()
        columns = cut._exchange._columns
        looks = sum(len(slots) for slots in columns.slots)
        columns.slots = [_Looked(slots) for slots in columns.slots]
        Counted.counts[0] = 0
        cut(ids).values().sum().backward()
        made, own = list[int](), TableShard.make

        def make(*given: Any, made: list[int] = made, own: Any = own) -> Any:
            made.append(1)
            return own(*given)

        with monkeypatch.context() as patch:
            patch.setattr(TableShard, "make", staticmethod(make))
            for table in cut.embedding_bags.values():
                _ = table.weight
        assert_equal(sum(slots.looks for slots in columns.slots), 0, where=f"looks at {looks} slots in a step")
        counts.append((Counted.counts[0], len(made)))
    for what, (few, many) in zip(("names compared", "parts made"), zip(*counts, strict=True), strict=True):
        assert_le(many, 2 * few, where=f"{what} for twice as many features")


class _Looked(list[Any]):
    """Slots that count who goes through them."""

    looks = 0

    def __iter__(self) -> Any:
        self.looks += 1
        return super().__iter__()


@requirement(
    "PIPE-659",
    "Tables with their optimizer in the backward, and its states, MUST stay of their own dtypes and in rows where "
    "load_state_dict(assign=True) is given others, with the bits of a load that copies.",
)
def test_assigned_tables(pipeline: Any) -> None:
    options: dict[str, Any] = {"optimizer": pipeline.FusedOptimizer("adagrad", lr=0.5)}
    tables = _bags(pipeline, ["t"]).embedding_bag_configs()
    given = {
        "weight_0": torch.arange(8.0).reshape(2, 4).t() / 8,
        "momentum1_0": torch.ones(4, 2),
        "step": torch.ones(1),
    }
    for dtype in (torch.float16, torch.float64, torch.float32):
        found = []
        for assign in (True, False):
            plain = pipeline.TableBatchedEmbeddingBags(tables, **options)
            plain.load_state_dict({name: value.to(dtype, copy=True) for name, value in given.items()}, assign=assign)
            with succeeds("a step", where=f"{dtype}, assign={assign}"):
                plain(torch.tensor([0, 1, 1]), torch.tensor([0, 2, 3])).sum().backward()
            found.append([plain.weight(0), plain.states(0)["momentum1"]])
        for one, other in zip(*found, strict=True):
            assert_equal(one.dtype, torch.float32, where=f"{dtype}: dtype")
            assert_bits(one, other, f"{dtype}: assigned and copied")


@requirement(
    "PIPE-660",
    "Names of features that torch cannot hold, lists that are none, and groups and lists of nothing MUST be refused by "
    "name where they are given.",
)
def test_refused_by_name(pipeline: Any) -> None:
    weighted = pipeline.EmbeddingBagCollection(
        [pipeline.EmbeddingBagConfig(4, 2, "t", feature_names=["a.b"])], is_weighted=True
    )
    columns = pipeline.KeyedTensor(["a"], [1], torch.ones(2, 1))
    by_name = {"a.b": pipeline.PositionWeightedModule(3)}
    calls: dict[str, tuple[Callable[[], Any], str]] = {
        "a point": (lambda: pipeline.PositionWeightedModuleCollection({"a.b": 3}), "a.b"),
        "an attribute": (lambda: pipeline.PositionWeightedModuleCollection({"keys": 3}), "keys"),
        "a number": (lambda: pipeline.PositionWeightedModuleCollection({5: 3}), "got: 5"),
        "no name": (lambda: pipeline.PositionWeightedModuleCollection({"": 3}), "cannot hold a feature"),
        "a list": (lambda: pipeline.PositionWeightedModuleCollection([3]), "[3]"),
        "by name": (lambda: pipeline.FeatureProcessedEmbeddingBagCollection(weighted, by_name), "a.b"),
        "an empty group": (lambda: pipeline.KeyedTensor.regroup([columns], [["a"], []]), "[['a'], []]"),
        "no batches": (lambda: pipeline.KeyedJaggedTensor.concat([]), "no batches"),
        "a rank": (lambda: pipeline.column_wise(0), "int"),
        "a string": (lambda: pipeline.column_wise("01"), "str"),
        "lengths": (lambda: pipeline.KeyedJaggedTensor(["a"], torch.ones(1), lengths=[1]), "lengths are a tensor"),
        "offsets": (lambda: pipeline.JaggedTensor(torch.ones(1), offsets=[0, 1]), "offsets are a tensor"),
    }
    for where, (call, mention) in calls.items():
        with raises((ConfigError, LengthTypeError), mentions=[mention], where=where):
            call()


def _on_meta(pipeline: Any) -> dict[str, Callable[[], Any]]:
    """Lookups of a batch of the host in tables of which one is on meta."""
    pair = ["s", "t"]
    bags, ids = _bags(pipeline, pair), _ids(pipeline, ["of s", "of t"])
    tables = [pipeline.EmbeddingConfig(4, 2, name, feature_names=[f"of {name}"]) for name in pair]
    rows = pipeline.EmbeddingCollection(tables)
    plain = pipeline.TableBatchedEmbeddingBags(bags.embedding_bag_configs()[:1], device="meta")
    plans = {
        "table-wise": pipeline.table_wise(0),
        "row-wise": pipeline.row_wise(),
        "replicas": pipeline.data_parallel(),
    }
    cuts = {name: sharded_of(pipeline, bags, dict.fromkeys(pair, plan), "sgd", None) for name, plan in plans.items()}
    processed = pipeline.FeatureProcessedEmbeddingBagCollection(
        _bags(pipeline, pair, is_weighted=True),
        pipeline.PositionWeightedModuleCollection(dict.fromkeys(["of s", "of t"], 4), device="meta"),
    )
    for module in (bags.embedding_bags["t"], rows.embeddings["t"], *cuts.values()):
        module.to("meta")
    return {
        "bags": lambda: bags(ids),
        "rows": lambda: rows(ids),
        "bags with an optimizer": lambda: plain(torch.tensor([0, 1, 1]), torch.tensor([0, 2, 3])),
        "weights": lambda: processed(ids),
        **{name: partial(cut, ids) for name, cut in cuts.items()},
    }


@requirement(
    "PIPE-662",
    "A lookup of which a table, or the weights of ids, are on meta and others are not MUST be refused by name: its "
    "result would be whatever its memory held.",
)
def test_some_on_meta(pipeline: Any) -> None:
    for where, look_up in _on_meta(pipeline).items():
        with raises(ConfigError, mentions=["meta"], where=where):
            look_up()


@requirement(
    "PIPE-663",
    "A training pipeline without an optimizer MUST evaluate, whatever its tables, and refuse to train by name.",
)
def test_without_optimizer(pipeline: Any) -> None:
    for kind in ("table_wise", "data_parallel"):
        for name in TRAINING:
            job, loop = (Job(pipeline, 6, kinds=(kind,)) for _ in range(2))
            job.optimizer = cast("Any", None)
            job.model.eval()
            loop.model.eval()
            where, (first, second) = f"{name}, {kind}", job.batches(2)
            with succeeds("an evaluation", where=where):
                schedule = job.schedule(name)
                found = schedule.progress(iter([first]))
            assert_bits(found, loop.step(first), where)
            job.model.train()
            with raises(ConfigError, mentions=["optimizer"], where=where):
                schedule.progress(iter([second]))


def _cut_by_fsdp(rank: Rank, processed: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    pipeline = rank.component("pipeline")
    whole, plan = _bags(pipeline, ["t"], is_weighted=processed), pipeline.data_parallel()
    if processed:
        processors = pipeline.PositionWeightedModuleCollection({"of t": 4})
        whole, plan = pipeline.FeatureProcessedEmbeddingBagCollection(whole, processors), pipeline.table_wise(0)
    cut = sharded_of(pipeline, whole, {"t": plan}, "sgd", rank.group, device="cpu")
    fully_shard(cut, mesh=init_device_mesh("cpu", (2,)))
    ctx = cut.create_context()
    given = cut.input_dist(ctx, _ids(pipeline, ["of t"])).wait().wait()
    with raises(UnsupportedError, mentions=["DTensor", "ignored_params"], where=f"processed={processed}"):
        cut.compute(ctx, given)


@requirement(
    "PIPE-661",
    "Parameters of a sharded collection that fully_shard has cut MUST be refused by name where a lookup ahead of the "
    "forward would read them.",
)
def test_cut_by_fsdp(rank_pool: Any) -> None:
    for processed in (False, True):
        rank_pool.run(_cut_by_fsdp, 2, processed)
