"""F. Arguments that are handed on, and names of torchrec's that nothing of ours calls."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.fx import _pytree as fx_pytree
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.harness import assert_equal, raises, requirement, succeeds
from conformance.pipeline.jobs import Job, outputs_of
from conformance.pipeline.model import assert_bits
from conformance.pipeline.sharding import collection_of, sharded_of
from twinproof.engine import InlineEngine
from twinproof.errors import ConfigError
from twinproof.pipeline.jagged import Bags

_META = torch.device("meta")
_AHEAD = ("TrainPipelineSparseDist", "TrainPipelineFusedSparseDist", "TrainPipelineSemiSync")


def _ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def _of_different_sizes(pipeline: Any) -> Any:
    """Features of one and of two samples, and the row of each of three samples of the full batch."""
    rows = (["a", "b"], torch.tensor([[0, 0, 0], [0, 1, 1]]))
    ids, weights = torch.arange(4), torch.ones(4)
    sizes = [[1], [2]]
    return pipeline.KeyedJaggedTensor(
        ["a", "b"], ids, weights, _ints(2, 1, 1), stride_per_key_per_rank=sizes, inverse_indices=rows
    )


@requirement(
    "PIPE-611",
    "from_lengths_sync and from_offsets_sync MUST make the batch that the class makes of the same arguments: weights, "
    "samples, sizes by rank and inverse indices.",
)
def test_synced(pipeline: Any) -> None:
    keyed, ids = pipeline.KeyedJaggedTensor, torch.arange(4)
    rows = (["a", "b"], torch.tensor([[0, 0, 0], [0, 1, 1]]))
    options: list[dict[str, Any]] = [
        {},
        {"weights": torch.ones(4)},
        {"stride_per_key_per_rank": [[1], [2]]},
        {"stride_per_key_per_rank": [[1], [2]], "inverse_indices": rows, "weights": torch.ones(4)},
    ]
    for given in options:
        lengths = _ints(2, 1, 1) if "stride_per_key_per_rank" in given else _ints(1, 1, 1, 1)
        offsets = torch.cat([_ints(0), lengths.cumsum(0)])
        whole = keyed(["a", "b"], ids, lengths=lengths, **given)
        for name, made in (
            ("from_lengths_sync", keyed.from_lengths_sync(["a", "b"], ids, lengths, **given)),
            ("from_offsets_sync", keyed.from_offsets_sync(["a", "b"], ids, offsets, **given)),
        ):
            where = f"{name}, {list(given)}"
            assert_equal(pipeline.kjt_is_equal(made, whole), True, where=where)
            facts = (made.stride_per_key_per_rank(), made.length_per_key_or_none())
            assert_equal(facts, (given.get("stride_per_key_per_rank", []), whole.length_per_key()), where=where)
            found = None if made.inverse_indices_or_none() is None else made.inverse_indices()[1].tolist()
            assert_equal(found, rows[1].tolist() if "inverse_indices" in given else None, where=f"{where}: rows")
    none = torch.empty(0, dtype=torch.int64)
    for name, made in (
        ("from_lengths_sync", keyed.from_lengths_sync([], none, none, stride=5)),
        ("from_offsets_sync", keyed.from_offsets_sync([], none, _ints(0), stride=5)),
    ):
        assert_equal(made.stride(), 5, where=f"{name}, samples of no features")


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Whether each copy may be waited for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.told: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name == "aten::_to_copy":
            self.told.append(bool((kwargs or {}).get("non_blocking", False)))
        elif name == "aten::copy_":
            self.told.append(bool(args[2] if len(args) > 2 else (kwargs or {}).get("non_blocking", False)))
        return func(*args, **(kwargs or {}))


@requirement(
    "PIPE-612",
    "to and copy_ of the batch types MUST hand non_blocking on to the copy of every part, inverse indices among them, "
    "and wait for each without it.",
)
def test_non_blocking(pipeline: Any) -> None:
    batch, other = _of_different_sizes(pipeline), _of_different_sizes(pipeline)
    one, another = (
        pipeline.JaggedTensor(torch.arange(2), torch.ones(2), _ints(1, 1), _ints(0, 1, 2)) for _ in range(2)
    )
    columns = pipeline.KeyedTensor(["a"], [1], torch.ones(2, 1))
    batch.offsets()
    other.offsets()
    jobs: dict[str, tuple[int, Callable[..., Any]]] = {
        "JaggedTensor.to": (4, lambda **given: one.to(_META, **given)),
        "KeyedJaggedTensor.to": (5, lambda **given: batch.to(_META, **given)),
        "KeyedTensor.to": (1, lambda **given: columns.to(_META, **given)),
        "JaggedTensor.copy_": (4, lambda **given: one.copy_(another, **given)),
        "KeyedJaggedTensor.copy_": (5, lambda **given: batch.copy_(other, **given)),
    }
    for name, (count, job) in jobs.items():
        for given in ({}, {"non_blocking": True}, {"non_blocking": False}):
            with _Copies() as copies:
                job(**given)
            assert_equal(copies.told, [given.get("non_blocking", False)] * count, where=f"{name}, {given}")


@requirement(
    "PIPE-613",
    "A batch of the same sizes elsewhere, and one with other weights, MUST have the inverse indices of the first, and "
    "say their names.",
)
def test_rows_are_kept(pipeline: Any) -> None:
    batch = _of_different_sizes(pipeline)
    with succeeds("empty_like", where="a batch with inverse indices"):
        there = pipeline.KeyedJaggedTensor.empty_like(batch, _META)
    names, rows = there.inverse_indices_or_none() or (None, None)
    assert_equal((names, rows is not None and (rows.shape, rows.device)), (["a", "b"], ((2, 3), _META)), where="there")
    processors = pipeline.PositionWeightedModuleCollection({"a": 3, "b": 3})
    with succeeds("weights by position", where="a batch with inverse indices"):
        weighted = processors(batch)
    found = weighted.inverse_indices_or_none()
    expected = (["a", "b"], batch.inverse_indices()[1].tolist())
    assert_equal(found and (found[0], found[1].tolist()), expected, where="weighted")
    assert_equal(batch.weights().tolist(), [1.0] * 4, where="the batch before")


@requirement(
    "PIPE-614",
    "str() of a batch MUST be the same by offsets as by lengths, that of one without bags MUST say that it is empty, "
    "and values of more than two dimensions MUST be refused; repr() MUST name the features.",
)
def test_texts(pipeline: Any) -> None:
    keyed, ids = pipeline.KeyedJaggedTensor, torch.arange(3)
    by_lengths = keyed(["a"], ids, lengths=_ints(1, 2))
    by_offsets = keyed(["a"], ids, offsets=_ints(0, 1, 3))
    with succeeds("str", where="a batch by offsets"):
        text = str(by_offsets)
    assert_equal(text, str(by_lengths), where="offsets alone")
    by_lengths.offsets()
    assert_equal(str(by_lengths), text, where="lengths, and offsets that were asked for")
    with succeeds("str", where="a batch without bags"):
        empty = str(keyed(["a"], ids))
    assert_equal(empty, str(keyed([], ids[:0], lengths=_ints())), where="neither lengths nor offsets")
    for batch in (pipeline.JaggedTensor, lambda *parts: keyed(["a"], *parts)):
        with raises(ValueError, mentions=("dimension",), where="values of three dimensions"):
            str(batch(torch.zeros(2, 1, 1), None, _ints(1, 1)))
    columns = pipeline.KeyedTensor(["user"], [1], torch.zeros(2, 1))
    for thing in (columns, keyed(["user"], ids, lengths=_ints(1, 2))):
        assert_equal("user" in repr(thing), True, where=repr(thing))


@requirement(
    "PIPE-615",
    "A batch that was sent without sizes MUST be one of no samples, with its features; a signature of a batch type "
    "MUST be that of its constructor; columns that are flattened by a spec MUST come in the spec's order of features.",
)
def test_received_nothing(pipeline: Any) -> None:
    none = torch.empty(0, dtype=torch.int64)
    with succeeds("dist_init", where="no sizes"):
        made = pipeline.KeyedJaggedTensor.dist_init(["a", "b"], [none, none, none], True, 2, None, None)
    assert_equal(
        (made.keys(), made.stride_per_key(), made.length_per_key()), (["a", "b"], [0, 0], [0, 0]), where="made"
    )
    for kind in (pipeline.JaggedTensor, pipeline.KeyedJaggedTensor, pipeline.KeyedTensor):
        names = list(inspect.signature(kind.__init__).parameters)[1:]
        assert_equal(list(inspect.signature(kind).parameters), names, where=kind.__name__)
    traced = pipeline.KeyedTensor(["a", "b"], [1, 2], torch.tensor([[1.0, 2.0, 3.0]]))
    turned = pipeline.KeyedTensor(["b", "a"], [2, 1], torch.tensor([[2.0, 3.0, 1.0]]))
    _, spec = pytree.tree_flatten(traced)
    with succeeds("flatten by a spec", where="features in another order"):
        (found,) = fx_pytree.tree_flatten_spec(turned, spec)
    assert_bits(found, traced.values(), "features in the order of the spec")


@requirement(
    "PIPE-616",
    "Modules that weigh by position MUST be made on the device that is asked for, give all weights 1 again and go to "
    "another device by copy; collections MUST say their tables, and the optimizer of a backward run a closure.",
)
def test_names_nobody_calls(pipeline: Any) -> None:
    one, each = pipeline.PositionWeightedModule, pipeline.PositionWeightedModuleCollection
    makers: list[Callable[..., Any]] = [lambda **given: one(3, **given), lambda **given: each({"a": 3}, **given)]
    for make in makers:
        devices = [{weight.device.type for weight in make(**given).parameters()} for given in ({}, {"device": _META})]
        assert_equal(devices, [{"cpu"}, {"meta"}], where="device")
        module = make()
        (weight,) = module.parameters()
        torch.nn.init.constant_(weight, 7.0)
        module.reset_parameters()
        assert_equal(weight.tolist(), [1.0] * 3, where="reset_parameters")
    module = each({"a": 3})
    moved = module.copy(_META)
    assert_equal(
        (moved is module, {weight.device.type for weight in moved.parameters()}), (True, {"meta"}), where="copy"
    )
    tables = [pipeline.EmbeddingConfig(3, 2, "t", feature_names=["a"])]
    rows = pipeline.EmbeddingCollection(tables)
    facts = ([table.name for table in rows.embedding_configs()], rows.use_gather_select_per_sharding())
    assert_equal(facts, (["t"], None), where="EmbeddingCollection")
    rows.embedding_configs().clear()
    assert_equal(len(rows.embedding_configs()), 1, where="a list of its own")
    bags = pipeline.EmbeddingBagCollection(
        [pipeline.EmbeddingBagConfig(3, 2, "t", feature_names=["a"])], is_weighted=True
    )
    processed = pipeline.FeatureProcessedEmbeddingBagCollection(bags, each({"a": 3}))
    assert_equal([table.name for table in processed.embedding_bag_configs()], ["t"], where="FeatureProcessed...")
    sharded = pipeline.ShardedEmbeddingBagCollection(
        pipeline.EmbeddingBagCollection([pipeline.EmbeddingBagConfig(3, 2, "t", feature_names=["a"])]),
        {"t": pipeline.table_wise(0)},
    )
    closure = mock.Mock(return_value=5)
    assert_equal((sharded.fused_optimizer.step(closure), closure.call_count), (5, 1), where="a closure")
    assert_equal(sharded.fused_optimizer.step(), None, where="no closure")


@requirement(
    "PIPE-617",
    "named_parameters of a sharded collection MUST put a prefix before every name, list a parameter twice where that "
    "is asked for, and leave the parts of cut tables out where it is not to look below itself.",
)
def test_named_parameters(pipeline: Any) -> None:
    tables = [pipeline.EmbeddingBagConfig(3, 4, name, feature_names=[name]) for name in ("t", "u")]
    plan = {"t": pipeline.table_wise(0), "u": pipeline.data_parallel()}
    module = pipeline.ShardedEmbeddingBagCollection(pipeline.EmbeddingBagCollection(tables), plan)
    names = sorted(name for name, _ in module.named_parameters())
    assert_equal(len(names), 2, where="one part, one replica")
    prefixed = sorted(name for name, _ in module.named_parameters("m"))
    assert_equal(prefixed, [f"m.{name}" for name in names], where="prefix")
    module.again = torch.nn.ModuleList([part for _, part in module.named_children()])
    once = [name for name, _ in module.named_parameters()]
    twice = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    assert_equal((sorted(once), len(twice) > len(once)), (names, True), where="remove_duplicate")
    assert_equal([name for name, _ in module.named_parameters(recurse=False)], [], where="recurse")


@requirement(
    "PIPE-641",
    "An override of _next_batch that calls the pipeline's own MUST step as the loop does, a batch for each call, which "
    "pulled_count counts once, as of one that pulls by itself; an "
    "evaluation pipeline MUST use the engine that it is given or refuse it by name; and the context of a sharded "
    "module MUST keep the memory of its batch.",
)
def test_own_batches(pipeline: Any) -> None:
    for name in _AHEAD:

        class Mine(getattr(pipeline, name)):  # type: ignore[misc]
            """Counts what it hands on."""

            count = 0

            def _next_batch(self, dataloader_iter: Any) -> Any:
                found = super()._next_batch(dataloader_iter)
                self.count += found is not None
                return found

        class Alone(getattr(pipeline, name)):  # type: ignore[misc]
            """Pulls in its own way."""

            def _next_batch(self, dataloader_iter: Any) -> Any:
                return next(dataloader_iter, None)

        options = {"start_batch": 10**6} if "Semi" in name else {}
        for kind in (Mine, Alone):
            job = Job(pipeline, 3)
            schedule = kind(job.model, job.optimizer, job.device, **options)
            schedule.progress(iter(job.batches(1)))
            assert_equal(schedule.pulled_count, 1, where=f"{name}, {kind.__name__}: batches pulled")
        job, loop = Job(pipeline, 3), Job(pipeline, 3)
        schedule = Mine(job.model, job.optimizer, job.device, **options)
        found = outputs_of(schedule, iter(job.batches(4)))
        assert_equal((len(found), schedule.count), (4, 4), where=f"{name}: outputs and batches")
        for number, (got, batch) in enumerate(zip(found, loop.batches(4), strict=True)):
            assert_bits(got, loop.step(batch), f"{name}, step {number}")
        assert_equal(schedule._pipelined_postprocs, [], where=f"{name}: modules that prepare")
    job, used = Job(pipeline, 3), list[str]()

    class Noting(InlineEngine):
        """Notes which streams it makes."""

        def stream(self, name: str, priority: int = 0) -> Any:
            used.append(name)
            return super().stream(name, priority)

    try:
        schedule = pipeline.EvalPipelineSparseDist(job.model, job.optimizer, job.device, engine=Noting())
    except ConfigError as error:
        assert_equal("where: engine" in str(error), True, where=f"{error}")
    else:
        assert_equal((len(outputs_of(schedule, iter(job.batches(2)))), bool(used)), (2, True), where="its streams")
    context = sharded_of(
        pipeline, collection_of(pipeline, *_tables(pipeline)), {"t": pipeline.table_wise(0)}, "sgd"
    ).create_context()
    kept: list[int] = []
    ids, offsets, weights = (torch.zeros(count, device="meta") for count in (3, 4, 5))
    context.bags = Bags(ids, offsets, weights)
    with mock.patch.object(torch.Tensor, "record_stream", lambda tensor, _: kept.append(tensor.numel())):
        context.record_stream("a stream")
    assert_equal(kept, [3, 4, 5], where="memory that the context keeps")


def _tables(pipeline: Any) -> tuple[list[Any], list[torch.Tensor]]:
    return [pipeline.EmbeddingBagConfig(3, 4, "t", feature_names=["a"])], [torch.zeros(3, 4)]


def _answers_of(batch: Any) -> Any:
    """Features, sizes, and each feature's bags: by name, and in the dictionary."""
    bags = {name: batch[name] for name in batch.keys()}  # noqa: SIM118
    parts = [
        {name: (part.values().tolist(), part.lengths().tolist()) for name, part in of.items()}
        for of in (bags, batch.to_dict())
    ]
    return batch.keys(), batch.stride_per_key(), batch.stride_per_key_per_rank(), parts


def _callers(pipeline: Any) -> dict[str, tuple[list[Any], Callable[..., Any]]]:
    """Containers of a caller, and what makes a batch of them."""
    keyed, ids, lengths = pipeline.KeyedJaggedTensor, torch.arange(4), _ints(2, 1, 1)

    def bags(*sizes: int) -> Any:
        return pipeline.JaggedTensor(torch.arange(sum(sizes)), lengths=_ints(*sizes))

    def parts() -> list[Any]:
        return [keyed([name], _ints(number, number), lengths=_ints(1, 1)) for number, name in enumerate("ab")]

    def sizes() -> list[Any]:
        return [["a", "b"], [[1], [2]]]

    alike, unlike = ({"a": bags(1, 2), "b": bags(*of)} for of in ((0, 1), (3,)))
    offsets = _ints(0, 2, 3, 4)
    return {
        "a dictionary": ([dict(alike)], keyed.from_jt_dict),
        "a dictionary, of different sizes": ([dict(unlike)], keyed.from_jt_dict),
        "a dictionary, by the module": ([dict(alike)], pipeline.ComputeJTDictToKJT()),
        "another batch's dictionary": ([dict(keyed.from_jt_dict(alike).to_dict())], keyed.from_jt_dict),
        "names and sizes": (sizes(), lambda k, s: keyed(k, ids, lengths=lengths, stride_per_key_per_rank=s)),
        "names and sizes, by lengths": (sizes(), lambda k, s: keyed.from_lengths_sync(k, ids, lengths, None, None, s)),
        "names and sizes, by offsets": (sizes(), lambda k, s: keyed.from_offsets_sync(k, ids, offsets, None, None, s)),
        "parts": ([parts()], keyed.concat),
        "an order": ([[1, 0]], keyed.from_jt_dict(alike).permute),
        "segments": ([[1, 1]], lambda each: keyed.from_jt_dict(alike).split(each)[0]),
    }


def _as_they_stand(given: list[Any]) -> list[Any]:
    """What containers hold, each thing by itself."""
    return [[*map(id, each.values()), *each] if isinstance(each, dict) else [*map(id, each)] for each in given]


def _other_features(given: Any) -> None:
    """What the next batch is made of, in the same containers."""
    if isinstance(given, dict):
        given["a"], given["c"] = given["b"], given.pop("b")
    elif given and isinstance(given[0], list):
        for each in given:
            each[0] += 7
    else:
        given.reverse()
        given.append(given[0])


@requirement(
    "PIPE-621",
    "A batch MUST stay what it was made of where the caller puts something else into the dictionary or the lists that "
    "it was made of, asked before or not until then; and MUST leave them as they were.",
)
def test_containers_of_a_caller(pipeline: Any) -> None:
    names = list(_callers(pipeline))
    for name in names:
        given, make = _callers(pipeline)[name]
        before = [copy.copy(each) for each in given]
        expected = _answers_of(make(*given))
        assert_equal(_as_they_stand(given), _as_they_stand(before), where=f"{name}: the caller's")
        for is_asked in (False, True):
            given, make = _callers(pipeline)[name]
            batch = make(*given)
            if is_asked:
                _answers_of(batch)
            for each in given:
                _other_features(each)
            with succeeds("questions", where=name):
                found = _answers_of(batch)
            assert_equal(found, expected, where=f"{name}, asked before: {is_asked}")
