"""B. Constructor arguments: torchrec's in torchrec's positions; each does what it says, or is refused by its name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, raises, requirement, succeeds
from conformance.pipeline.cases import EVAL_FUSED, FUSED, Context
from conformance.pipeline.jobs import Job, assert_same_state, outputs_of
from conformance.pipeline.model import assert_bits
from twinproof.errors import ConfigError

LAST = {"free_features_storage_early": False, "clear_data_dist_inputs": False}
FIRST = {"execute_all_batches": True, "apply_jit": False}
# The arguments of torchrec 1.8's pipelines behind model, optimizer and device, in order, and their defaults.
UPSTREAM: dict[str, dict[str, Any]] = {
    "TrainPipelineBase": {"custom_model_fwd": None, "enable_inplace_copy_batch": False},
    "TrainPipelineSparseDist": {
        **FIRST,
        "context_type": None,
        "pipeline_postproc": False,
        "custom_model_fwd": None,
        "dmp_collection_sync_interval_batches": 1,
        "enqueue_batch_after_forward": False,
        "enable_inplace_copy_batch": False,
        **LAST,
    },
    FUSED: {
        **FIRST,
        "pipeline_postproc": True,
        "custom_model_fwd": None,
        "strict": False,
        "emb_lookup_stream": "data_dist",
        "embedding_lookup_after_data_dist": False,
        "enable_inplace_copy_batch": False,
        "enqueue_batch_after_forward": False,
        **LAST,
    },
    "TrainPipelineSemiSync": {
        **FIRST,
        "start_batch": 900,
        "stash_gradients": False,
        "pipeline_postproc": True,
        "custom_model_fwd": None,
        "strict": False,
        "dmp_collection_sync_interval_batches": 1,
        "enable_inplace_copy_batch": False,
        **LAST,
    },
    "PrefetchTrainPipelineSparseDist": {
        **FIRST,
        "pipeline_postproc": True,
        "custom_model_fwd": None,
        "enable_inplace_copy_batch": False,
        **LAST,
    },
    "EvalPipelineSparseDist": {
        "apply_jit": False,
        "pipeline_postproc": False,
        "enable_inplace_copy_batch": False,
        **LAST,
    },
}
UPSTREAM[EVAL_FUSED] = UPSTREAM[FUSED]
REFUSED = ("apply_jit", *LAST)
# What newer versions have, and what torchrec takes by name alone.
NAMED: dict[str, dict[str, Any]] = {
    FUSED: {"embedding_lookup_before_optimizer": False, "defer_dp_lookup": False},
    EVAL_FUSED: {"defer_dp_lookup": False, "enable_embedding_lookup_prefetch": False},
}


def _other(name: str, default: Any, job: Job) -> Any:
    """A value that is not the default."""
    if isinstance(default, bool):
        return not default
    values = {
        "context_type": Context,
        "custom_model_fwd": lambda batch: job.model(batch),
        "dmp_collection_sync_interval_batches": None,
        "emb_lookup_stream": "new",
        "start_batch": 10**6,
    }
    return values[name]


def _as_the_loop(pipeline: Any, name: str, args: tuple[Any, ...], options: dict[str, Any], where: str) -> None:
    """Some steps with these arguments are the loop's."""
    loop, job = (Job(pipeline, 3, kinds=("table_wise", "row_wise")) for _ in range(2))
    if name.startswith("Eval"):
        loop.model.eval()
    made = {key: value(job) if key == "custom_model_fwd" and value else value for key, value in options.items()}
    schedule = getattr(pipeline, name)(job.model, job.optimizer, job.device, *args, **made)
    batches = iter(job.batches(8))
    for step, batch in enumerate(loop.batches(3)):
        assert_bits(schedule.progress(batches), loop.step(batch), f"{where} step {step}")
    assert_same_state(job, loop, where)


@requirement(
    "PIPE-282",
    "Every constructor argument of torchrec 1.8's pipelines MUST be taken in its position and by its name, with "
    "torchrec's default, and at these defaults a schedule MUST be the loop, bit for bit.",
)
def test_positions(pipeline: Any) -> None:
    for name, arguments in UPSTREAM.items():
        if name != EVAL_FUSED:
            found = list(inspect.signature(getattr(pipeline, name)).parameters.values())
            defaults = {each.name: each.default for each in found[3 : 3 + len(arguments)]}
            assert_equal(defaults, arguments, where=f"{name} positions and defaults")
            assert_equal(list(defaults), list(arguments), where=f"{name} order")
        _as_the_loop(pipeline, name, tuple(arguments.values()), {}, f"{name} by position")
        _as_the_loop(pipeline, name, (), {**arguments, **NAMED.get(name, {})}, f"{name} by name")


@pytest.mark.night
@requirement(
    "PIPE-283",
    "At any other value each of these arguments MUST leave the loop's bits, or be refused by its name.",
)
def test_other_values(pipeline: Any) -> None:
    for name, arguments in UPSTREAM.items():
        for argument, default in {**arguments, **NAMED.get(name, {})}.items():
            job, where = Job(pipeline, 3), f"{name} {argument}"
            if argument in REFUSED:
                with raises(ConfigError, mentions=(argument,)):
                    getattr(pipeline, name)(job.model, job.optimizer, job.device, **{argument: True})
                continue
            value: Any = _other(argument, default, job)
            if argument == "custom_model_fwd":
                value = lambda job: job.model  # noqa: E731
            extra = {"start_batch": 10**6} if argument == "stash_gradients" else {}
            _as_the_loop(pipeline, name, (), {argument: value, **extra}, where)
    job = Job(pipeline, 3)
    for name in ("embedding_lookup_before_optimizer", "reduce_dense_gradients"):
        with raises(ConfigError, mentions=(name,)):
            getattr(pipeline, EVAL_FUSED)(job.model, job.optimizer, **{name: True})


def _order_of(pipeline: Any, options: dict[str, Any]) -> str:
    """The order of lookups (l) and dense updates (o) in three steps."""
    job, order = Job(pipeline, 3, kinds=("table_wise", "row_wise")), list[str]()
    for collection in job.collections:

        def compute(*args: Any, wrapped: Any = collection.compute) -> Any:
            order.append("l")
            return wrapped(*args)

        collection.compute = compute
    job.optimizer.register_step_pre_hook(lambda *_: order.append("o"))
    assert_equal(len(outputs_of(job.schedule(FUSED, **options), iter(job.batches(3)))), 3, where=f"{options} outputs")
    return "".join(order)


@requirement(
    "PIPE-280",
    "embedding_lookup_after_opt=False MUST look the next batch up before the dense optimizer, as "
    "embedding_lookup_before_optimizer does; True and the default MUST look it up behind it.",
    needs=("streams",),
)
def test_before_the_optimizer(pipeline: Any) -> None:
    behind, before = "llo" * 3, "ll" + "llo" * 2 + "o"
    for options, expected in (
        ({}, behind),
        ({"embedding_lookup_after_opt": True}, behind),
        ({"embedding_lookup_after_opt": False}, before),
        ({"embedding_lookup_before_optimizer": True}, before),
    ):
        assert_equal(_order_of(pipeline, options), expected, where=f"{options} lookups and dense updates")


@requirement(
    "PIPE-281",
    "Two names for one choice, PR 2916's and torchrec's later ones, MUST NOT contradict: both are refused by name.",
)
def test_contradictions(pipeline: Any) -> None:
    job = Job(pipeline, 8)
    for options, name in (
        ({"embedding_lookup_after_opt": False, "embedding_lookup_after_data_dist": True}, "embedding_lookup_after_opt"),
        ({"embedding_lookup_after_opt": True, "embedding_lookup_before_optimizer": True}, "embedding_lookup_after_opt"),
        ({"use_emb_lookup_stream": True, "emb_lookup_stream": "current"}, "use_emb_lookup_stream"),
        ({"use_emb_lookup_stream": False, "emb_lookup_stream": "new"}, "use_emb_lookup_stream"),
    ):
        with raises(ConfigError, mentions=(name,)):
            job.schedule(FUSED, **options)
    for options in ({"use_emb_lookup_stream": True, "emb_lookup_stream": "new"}, {"embedding_lookup_after_opt": False}):
        _as_the_loop(pipeline, FUSED, (), options, str(options))


@requirement(
    "PIPE-442",
    "A number of batches between two averages of replicas that is none, 0 among them, MUST be refused by name where "
    "the pipeline is made, not in the middle of a step.",
)
def test_intervals(pipeline: Any) -> None:
    argument = "dmp_collection_sync_interval_batches"
    for name in ("TrainPipelineSparseDist", "TrainPipelineSemiSync"):
        job = Job(pipeline, 3)
        for interval in (0, -1, 1.5):
            with raises(ConfigError, mentions=(argument, str(interval)), where=f"{name}, {interval}"):
                job.schedule(name, **{argument: interval})
        for good in (1, 2, None):
            with succeeds(name, where=f"{good}"):
                job.schedule(name, **{argument: good}).detach()


@requirement(
    "PIPE-453",
    "SemiSync MUST name in the log, or refuse under strict, the modules of which the optimizer updates what a lookup "
    "reads, and no others; a schedule that never looks up before an update MUST log nothing of them.",
)
def test_stale_parameters(pipeline: Any, caplog: Any) -> None:
    for name in ("TrainPipelineSemiSync", FUSED):
        for kinds, count in ((("data_parallel",), 2), (("table_wise", "row_wise"), 0)):
            job, where = Job(pipeline, 4, kinds=kinds), f"{name}, {kinds}"
            caplog.clear()
            schedule = job.schedule(name)
            expected = [call.name for call in schedule.calls][:count] if "Semi" in name else []
            lines = [record.getMessage() for record in caplog.records if "stale" in record.getMessage()]
            assert_equal(len(lines), int(bool(expected)), where=f"{where}: lines in the log")
            assert_equal(
                [each for each in ("collections.0", "collections.1") if any(each in line for line in lines)],
                expected,
                where=f"{where}: modules in the log",
            )
            schedule.detach()
            if count:
                with raises(ConfigError, mentions=("strict", "collections.0", "collections.1"), where=where):
                    job.schedule(name, strict=True)
            else:
                with succeeds("strict", where=where):
                    job.schedule(name, strict=True)


class _HalfTables(torch.nn.Module):
    """A data-parallel table of 16 bits, and a layer."""

    def __init__(self, pipeline: Any) -> None:
        super().__init__()
        given: dict[str, Any] = {"feature_names": ["f"], "data_type": pipeline.DataType.BF16}
        tables = pipeline.EmbeddingBagCollection([pipeline.EmbeddingBagConfig(10, 4, "t", **given)])
        self.tables = pipeline.ShardedEmbeddingBagCollection(tables, {"t": pipeline.data_parallel()})
        self.top = torch.nn.Linear(4, 1)

    def forward(self, batch: Any) -> Any:
        """The loss, twice."""
        loss = self.top(self.tables(batch).values()).square().mean()
        return loss, loss.detach()


@requirement(
    "PIPE-541",
    "Where an optimizer steps masters of what a lookup reads, strict MUST refuse it as one that steps that itself.",
)
@pytest.mark.parametrize("has_masters", [False, True])
def test_strict_with_masters(pipeline: Any, offload: Any, has_masters: bool) -> None:
    model = _HalfTables(pipeline)
    stepped = offload.MasterWeights(model.parameters()).parameters() if has_masters else model.parameters()
    optimizer = torch.optim.SGD(list(stepped), lr=0.1)
    with raises(ConfigError, mentions=("strict", "tables"), where=f"masters: {has_masters}"):
        pipeline.TrainPipelineSemiSync(model, optimizer, torch.device("cpu"), strict=True)


@requirement(
    "PIPE-520",
    "A sharding MUST have what its kind needs and nothing that it does not use, ranks, buckets or a store: anything "
    "else MUST be refused by that name when it is made, and what the makers make be taken.",
)
def test_parts_of_shardings(pipeline: Any, kvstore: Any) -> None:
    buckets = kvstore.Buckets(4)
    store = kvstore.KVStore({"t": kvstore.RowLayout(4)})
    wrong: list[tuple[str, tuple[Any, ...]]] = [
        ("ranks", ("table_wise",)),
        ("ranks", ("table_wise", (0, 0))),
        ("ranks", ("table_wise", 0)),
        ("ranks", ("row_wise", (0,))),
        ("ranks", ("data_parallel", (0,))),
        ("ranks", ("key_value", (0,), buckets, store)),
        ("buckets", ("table_wise", (0,), buckets)),
        ("store", ("row_wise", (), None, store)),
        ("buckets", ("key_value", (), None, store)),
        ("buckets", ("key_value", (), 4, store)),
        ("store", ("key_value", (), buckets)),
    ]
    for name, given in wrong:
        with raises(ConfigError, mentions=(name,), where=repr(given)):
            pipeline.TableSharding(*given)
    right = {
        "table_wise": (pipeline.table_wise(1), pipeline.TableSharding("table_wise", [1])),
        "column_wise": (pipeline.column_wise([1, 0]), pipeline.TableSharding("column_wise", (1, 0))),
        "row_wise": (pipeline.row_wise(), pipeline.TableSharding("row_wise")),
        "data_parallel": (pipeline.data_parallel(), pipeline.TableSharding("data_parallel", ())),
        "key_value": (pipeline.key_value(store, buckets), pipeline.TableSharding("key_value", (), buckets, store)),
    }
    for kind, (one, other) in right.items():
        assert_equal(one == other, True, where=kind)


@requirement(
    "PIPE-521",
    "Arguments of table-batched bags that have no effect beside others MUST be refused by name: an optimizer beside a "
    "handle, a device beside weights; so MUST another number of weights than tables.",
)
def test_arguments_of_bags(pipeline: Any) -> None:
    tables = [pipeline.EmbeddingBagConfig(3, 4, name) for name in ("a", "b")]
    weights = [torch.zeros(3, 4) for _ in tables]
    handle = pipeline.InBackwardOptimizer(pipeline.FusedOptimizer("sgd"))
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("optimizer", {"in_backward": handle, "optimizer": pipeline.FusedOptimizer("adam")}),
        ("device", {"weights": weights, "device": "meta"}),
        ("weights", {"weights": weights[:1]}),
        ("weights", {"weights": [*weights, *weights]}),
    ]
    for name, given in wrong:
        with raises(ConfigError, mentions=(name,), where=str(list(given))):
            pipeline.TableBatchedEmbeddingBags(tables, **given)
    for right in (
        {"in_backward": handle},
        {"weights": weights},
        {"device": "meta"},
        {"device": None, "optimizer": None},
    ):
        with succeeds("bags", where=str(list(right))):
            pipeline.TableBatchedEmbeddingBags(tables, **right)


@requirement(
    "PIPE-685",
    "What is no fused optimizer, one of torch's or what is false among them, and a handle or a seed that is none, MUST "
    "be refused by that name by cut collections and table-batched bags, before a step.",
)
def test_optimizers_and_seeds(pipeline: Any) -> None:
    table = pipeline.EmbeddingBagConfig(3, 4, "a")
    collection = pipeline.EmbeddingBagCollection([table], device="meta")
    parameter = torch.nn.Parameter(torch.zeros(1))

    def cut(**given: Any) -> Any:
        return pipeline.ShardedEmbeddingBagCollection(collection, {"a": pipeline.row_wise()}, **given)

    def bags(**given: Any) -> Any:
        return pipeline.TableBatchedEmbeddingBags([table], **given)

    strange = (torch.optim.SGD([parameter], lr=0.1), pipeline.FusedOptimizer, "adam", 0, "", False)
    wrong: list[tuple[str, Any, Any]] = [("optimizer", make, value) for make in (cut, bags) for value in strange]
    wrong += [("in_backward", bags, value) for value in (strange[0], pipeline.FusedOptimizer(), 0, "")]
    wrong += [("seed", cut, value) for value in ("x", 1.5, None, 2**64, -(2**63) - 1)]
    for name, make, value in wrong:
        with raises(ConfigError, mentions=(f"where: {name}", "got: "), where=f"{name}={value!r}"):
            make(**{name: value})
    with raises(ConfigError, mentions=("where: optimizer", "got: SGD"), where="a handle"):
        pipeline.InBackwardOptimizer(strange[0])
    rights: list[dict[str, Any]] = [{"optimizer": None, "seed": -1}]
    rights += [{"optimizer": pipeline.FusedOptimizer("sgd"), "seed": seed} for seed in (-(2**63), 2**64 - 1)]
    for right in rights:
        with succeeds("a collection", where=str(right)):
            cut(**right)


@requirement(
    "PIPE-625",
    "What a schedule cannot do MUST be refused by its name whatever else is asked for, by name or by position: beside "
    "any other value of each other argument, beside all of them, and beside what is refused as well.",
)
def test_refused_beside_others(pipeline: Any) -> None:
    job = Job(pipeline, 3)
    for name, arguments in UPSTREAM.items():
        make, every = getattr(pipeline, name), {**arguments, **NAMED.get(name, {})}
        others = {each: _other(each, default, job) for each, default in every.items() if each not in REFUSED}
        # These contradict each other in any case.
        together = {each: value for each, value in others.items() if each != "embedding_lookup_before_optimizer"}
        for argument in (each for each in REFUSED if each in arguments):
            beside: list[dict[str, Any]] = [{each: value} for each, value in others.items()]
            for options in ({}, *beside, together):
                with raises(ConfigError, mentions=(argument,), where=f"{name}: {argument} beside {options}"):
                    make(job.model, job.optimizer, job.device, **{argument: True, **options})
            with raises(ConfigError, mentions=(argument,), where=f"{name}: {argument} by position"):
                make(job.model, job.optimizer, job.device, *{**arguments, argument: True}.values())
        rest = {each: True for each in REFUSED if each in arguments}
        while rest:
            with raises(ConfigError, mentions=(next(iter(rest)),), where=f"{name}: {list(rest)}"):
                make(job.model, job.optimizer, job.device, **rest)
            del rest[next(iter(rest))]
