"""What a pipeline or a collection cannot take is refused with what it would have taken."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from conformance.harness import Rank, assert_flags_are_no_text, raises, requirement, succeeds
from twinproof.errors import ConfigError, DistributedError, UnsupportedError

SCHEDULES = ("TrainPipelineBase", "TrainPipelineSparseDist", "TrainPipelineFusedSparseDist", "TrainPipelineSemiSync")


def _collection(pipeline: Any) -> Any:
    table = pipeline.EmbeddingBagConfig(num_embeddings=10, embedding_dim=4, name="t", feature_names=["f"])
    return pipeline.EmbeddingBagCollection(tables=[table])


def _batch(pipeline: Any) -> Any:
    ids, lengths = torch.tensor([1, 2, 3]), torch.tensor([1, 2])
    return pipeline.KeyedJaggedTensor(keys=["f"], values=ids, lengths=lengths)


class _Model(torch.nn.Module):
    def __init__(self, pipeline: Any, answer: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        sharding = {"t": pipeline.table_wise(0)}
        self.bags = pipeline.ShardedEmbeddingBagCollection(_collection(pipeline), sharding)
        self.over, self.answer = torch.nn.Linear(4, 1), answer

    def forward(self, batch: Any) -> Any:
        return self.answer(self.over(self.bags(batch).values()))


def _scaled(batch: Any, found: torch.Tensor) -> torch.Tensor:
    return found if batch.values().sum() > 0 else 2 * found


def _scaled_unseen(batch: Any, found: torch.Tensor) -> torch.Tensor:
    return _scaled(batch, found)


torch.fx.wrap("_scaled_unseen")


class _Branching(_Model):
    def forward(self, batch: Any) -> Any:
        loss = self.over(_scaled(batch, self.bags(batch).values()))
        return loss.sum(), loss


class _Wrapped(_Model):
    def forward(self, batch: Any) -> Any:
        loss = self.over(_scaled_unseen(batch, self.bags(batch).values()))
        return loss.sum(), loss


def _progress(pipeline: Any, schedule: str, model: torch.nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = getattr(pipeline, schedule)(model, optimizer, torch.device("cpu"))
    return made.progress(iter([_batch(pipeline) for _ in range(4)]))


@requirement("PIPE-380", "Tables that come in no list MUST be refused with what a list of them holds.")
@pytest.mark.parametrize("tables", ["t", 7, "config"])
def test_tables(pipeline: Any, tables: Any) -> None:
    if tables == "config":
        tables = pipeline.EmbeddingBagConfig(num_embeddings=10, embedding_dim=4, name="t", feature_names=["f"])
    with raises(ConfigError, mentions=("tables", "a list of EmbeddingBagConfig")):
        pipeline.EmbeddingBagCollection(tables=tables)


@requirement(
    "PIPE-381", "A plan of strings, functions or lists MUST be refused with the table and with what makes a sharding."
)
@pytest.mark.parametrize("kind", ["name", "function", "text", "list", "none"])
def test_plans(pipeline: Any, kind: str) -> None:
    plans = {
        "name": {"t": "table_wise"},
        "function": {"t": pipeline.table_wise},
        "text": "table_wise",
        "list": ["t"],
        "none": None,
    }
    place = "plan['t']" if kind in ("name", "function") else "where: plan"
    with raises(ConfigError, mentions=(place, "TableSharding", "table_wise(rank)"), where=kind):
        pipeline.ShardedEmbeddingBagCollection(_collection(pipeline), plans[kind])


ANSWERS: dict[str, tuple[Callable[[torch.Tensor], Any], tuple[str, ...]]] = {
    "a scalar": (lambda x: x.sum(), ("losses and an output", "got: Tensor", "_Model")),
    "three": (lambda x: (x.sum(), x, x), ("losses and an output", "tuple of 3", "_Model")),
    "nothing": (lambda x: None, ("losses and an output", "got: NoneType", "_Model")),
    "a dictionary": (lambda x: {"loss": x.sum(), "output": x}, ("losses and an output", "dict of 2", "_Model")),
    "a float": (lambda x: (1.0, x), ("losses are a tensor", "got: float", "_Model")),
}


@requirement(
    "PIPE-382", "A forward that returns something else than losses, a tensor, and an output MUST be refused by name."
)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("answer", sorted(ANSWERS))
def test_answers(pipeline: Any, schedule: str, answer: str) -> None:
    make, mentions = ANSWERS[answer]
    with raises(ConfigError, mentions=mentions, where=f"{answer}, {schedule}"):
        _progress(pipeline, schedule, _Model(pipeline, make))


@requirement(
    "PIPE-383",
    "A model that cannot be traced MUST be refused with its class, the reason, and what to do instead.",
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_untraceable(pipeline: Any, schedule: str) -> None:
    model = _Branching(pipeline, lambda x: x)
    with raises(ConfigError, mentions=("_Branching", "control flow", "torch.fx.wrap"), where=schedule):
        _progress(pipeline, schedule, model)
    # What the message names instead works.
    _progress(pipeline, schedule, _Wrapped(pipeline, lambda x: x))


@requirement("PIPE-384", "What is no model, no optimizer or no batch MUST be refused with what was expected.")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_parts(pipeline: Any, schedule: str) -> None:
    make, model = getattr(pipeline, schedule), _Model(pipeline, lambda x: (x.sum(), x))
    with raises(ConfigError, mentions=("str", "torch.nn.Module", "where: model")):
        make("model", torch.optim.SGD(model.parameters(), lr=0.1), torch.device("cpu"))
    with raises(ConfigError, mentions=("str", "torch.optim.Optimizer", "where: optimizer")):
        make(model, "sgd", torch.device("cpu"))
    with raises(UnsupportedError, mentions=("KeyedJaggedTensor", "torchrec")):
        model.bags(torch.tensor([1]))


@requirement(
    "PIPE-488",
    'A flag of a schedule, a collection or a configuration that is text MUST be refused by its name: "false" is true.',
)
def test_flags(pipeline: Any) -> None:
    model = _Model(pipeline, lambda x: (x.sum(), x))
    parts = (model, torch.optim.SGD(model.parameters(), lr=0.1), torch.device("cpu"))
    for name in (*SCHEDULES, "PrefetchTrainPipelineSparseDist"):
        schedule = getattr(pipeline, name)
        assert_flags_are_no_text(schedule, partial(schedule, *parts), where=name)
    for name in ("EvalPipelineSparseDist", "EvalPipelineFusedSparseDist"):
        schedule = getattr(pipeline, name)
        assert_flags_are_no_text(schedule, partial(schedule, model, None, parts[2]), where=name)
    sizes = {"num_embeddings": 10, "embedding_dim": 4, "name": "t", "feature_names": ["f"]}
    tables = {"EmbeddingBagCollection": "EmbeddingBagConfig", "EmbeddingCollection": "EmbeddingConfig"}
    for name, kind in tables.items():
        config, collection = getattr(pipeline, kind), getattr(pipeline, name)
        assert_flags_are_no_text(config, partial(config, **sizes), where=kind)
        assert_flags_are_no_text(collection, partial(collection, [config(**sizes)]), where=name)


@requirement(
    "PIPE-489",
    "What a module does with bad ids MUST be one of the kinds that there are; what is none MUST be refused when the "
    "module is made.",
)
def test_bounds_checks(pipeline: Any) -> None:
    config = pipeline.EmbeddingBagConfig(num_embeddings=10, embedding_dim=4, name="t", feature_names=["f"])
    rows = pipeline.EmbeddingConfig(num_embeddings=10, embedding_dim=4, name="t", feature_names=["f"])
    plan = {"t": pipeline.table_wise(0)}
    modules: dict[str, Callable[[Any], Any]] = {
        "EmbeddingBagCollection": lambda kind: pipeline.EmbeddingBagCollection([config], bounds_check=kind),
        "EmbeddingCollection": lambda kind: pipeline.EmbeddingCollection([rows], bounds_check=kind),
        "TableBatchedEmbeddingBags": lambda kind: pipeline.TableBatchedEmbeddingBags([config], bounds_check=kind),
        "ShardedEmbeddingBagCollection": lambda kind: pipeline.ShardedEmbeddingBagCollection(
            _collection(pipeline), plan, bounds_check=kind
        ),
    }
    for name, make in modules.items():
        for kind in ("fatal", "warning", "ignore"):
            with succeeds(name, where=kind):
                make(kind)
        for wrong in ("fatl", "Warning", "", None, True):
            with raises(
                ConfigError, mentions=(f"got: {wrong}", "fatal", "where: bounds_check"), where=f"{name}, {wrong}"
            ):
                make(wrong)


@requirement(
    "PIPE-490",
    "Names, features, sizes, bounds and functions of first weights, numbers of an optimizer in the backward and kinds "
    "of sharding that are of another type MUST be refused by their name.",
)
def test_options(pipeline: Any) -> None:
    sizes = {"num_embeddings": 10, "embedding_dim": 4, "name": "t", "feature_names": ["f"]}
    wrong: dict[str, list[Any]] = {
        "name": [b"t", 7, None],
        "feature_names": ["f", b"f", 7, None],
        "num_embeddings": ["10", 1.5, True, 2**63],
        "embedding_dim": ["4", 1.5, True, 2**63],
        "weight_init_max": ["1", [1.0], torch.zeros(2)],
        "weight_init_min": ["0", [0.0], torch.zeros(2)],
        "init_fn": ["zeros", 7],
    }
    # Sizes are refused with the name of their table.
    told = {"num_embeddings": "where: t", "embedding_dim": "where: t"}
    for kind in (pipeline.EmbeddingBagConfig, pipeline.EmbeddingConfig):
        for name, values in wrong.items():
            for value in values:
                with raises(ConfigError, mentions=(told.get(name, name),), where=f"{kind.__name__}, {name}={value!r}"):
                    kind(**{**sizes, name: value})
    with succeeds("EmbeddingConfig", where="a number of another type"):
        pipeline.EmbeddingConfig(**sizes, weight_init_max=torch.tensor(0.5), weight_init_min=0)
    for name in ("lr", "eps", "beta1", "beta2"):
        for value in ("0.1", None, [0.1], torch.zeros(2)):
            with raises(ConfigError, mentions=(f"where: {name}", f"got: {value}"), where=f"{name}={value!r}"):
                pipeline.FusedOptimizer(**{name: value})
    with succeeds("FusedOptimizer", where="a tensor of one number"):
        pipeline.FusedOptimizer(lr=torch.tensor(0.5))
    for kind in (["table_wise"], {"table_wise": 0}, None):
        with raises(ConfigError, mentions=("where: kind", "table_wise"), where=f"{kind}"):
            pipeline.TableSharding(kind)


@requirement("PIPE-670", "What is no engine MUST be refused by a schedule with what it is, what counts as false too.")
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_engines(pipeline: Any, name: str) -> None:
    model = _Model(pipeline, torch.sum)
    for engine in (object(), 0, "", torch.device("cpu")):
        optimizer = torch.optim.SGD(model.over.parameters(), lr=0.1)
        mentions = ("where: engine", f"got: {type(engine).__name__}")
        with raises(ConfigError, mentions=mentions, where=repr(engine)):
            getattr(pipeline, name)(model, optimizer, torch.device("cpu"), engine=engine)


class _Loader:
    def __iter__(self) -> Any:
        return iter([])


NO_ITERATORS: tuple[Any, ...] = (None, 7, "ab", [], [1, 2], _Loader())
ALL_SCHEDULES = (*SCHEDULES, "PrefetchTrainPipelineSparseDist", "EvalPipelineSparseDist")


def _made(pipeline: Any, name: str, **options: Any) -> Any:
    model = _Model(pipeline, lambda x: (x.sum(), x))
    optimizer = torch.optim.SGD(model.over.parameters(), lr=0.1)
    if name.startswith("Eval"):
        model.eval()
    return getattr(pipeline, name)(model, optimizer, torch.device("cpu"), **options)


def _one_without_loader(rank: Rank, name: str) -> None:
    pipeline = rank.component("pipeline")
    options = {} if name.startswith("Eval") else {"reduce_dense_gradients": True}
    made = _made(pipeline, name, process_group=rank.group, **options)
    # Both hear of it, and neither waits for the other.
    kind, mentions = (ConfigError, ("an iterator of batches",)) if rank.rank else (DistributedError, ("another rank",))
    with raises(kind, mentions=mentions, where=f"{name}, rank {rank.rank}"):
        made.progress(None if rank.rank else iter([_batch(pipeline)]))


@requirement(
    "PIPE-696",
    "What is no iterator MUST be refused by name where batches are asked of it, on every rank where one rank is given "
    "such; no batch is lost by it.",
)
@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_no_iterators(pipeline: Any, rank_pool: Any, name: str) -> None:
    made = _made(pipeline, name)
    for wrong in NO_ITERATORS:
        mentions = ("where: dataloader_iter", f"got: {type(wrong).__name__}", "iter(loader)")
        with raises(ConfigError, mentions=mentions, where=f"{name}, {wrong!r}"):
            made.progress(wrong)
    batches = iter([_batch(pipeline) for _ in range(3)])
    for step in range(3):
        with succeeds("progress", where=f"{name}, step {step}"):
            made.progress(batches)
    with raises(StopIteration, where=f"{name}, behind the last batch"):
        made.progress(batches)
    rank_pool.run(_one_without_loader, 2, name)


@requirement(
    "PIPE-697",
    "A custom_model_fwd that cannot be called, and a start_batch that is no int, MUST be refused by name when the "
    "pipeline is made.",
)
@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_parts_of_schedules(pipeline: Any, name: str) -> None:
    no_functions: tuple[Any, ...] = (5, 0, "forward", [len])
    for wrong in no_functions:
        mentions = ("where: custom_model_fwd", f"got: {type(wrong).__name__}")
        with raises(ConfigError, mentions=mentions, where=f"{name}, {wrong!r}"):
            _made(pipeline, name, custom_model_fwd=wrong)
    with succeeds(name, where="no function"):
        _made(pipeline, name, custom_model_fwd=None)
    if "Semi" not in name:
        return
    no_numbers: tuple[Any, ...] = ("x", "1", None, 1.5, [1], torch.zeros(2))
    for wrong in no_numbers:
        with raises(ConfigError, mentions=("where: start_batch", "an int"), where=f"{name}, {wrong!r}"):
            _made(pipeline, name, start_batch=wrong)
    for given in (0, -1, 900, torch.tensor(3)):
        with succeeds(name, where=f"start_batch={given}"):
            _made(pipeline, name, start_batch=given)
