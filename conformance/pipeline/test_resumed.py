"""H. Steps of the optimizer in the backward, behind a load: what goes on from them, and what is no step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

from conformance.harness import Rank, assert_equal, raises, requirement, succeeds
from conformance.pipeline.batches import values_of
from conformance.pipeline.model import assert_bits
from conformance.pipeline.sharding import batches_of, collection_of, sharded_of, train
from twinproof.errors import ConfigError, MissingKeyError
from twinproof.optimizers import STEP_MAX

WIDTH, ROWS = 4, 8


def _config(pipeline: Any) -> Any:
    return pipeline.EmbeddingBagConfig(ROWS, WIDTH, "t", feature_names=["f"])


class _Job:
    """A collection over one key-value table, and its store."""

    def __init__(self, rank: Rank, optimizer: str) -> None:
        self.rank, self.pipeline, self.kvstore = rank, rank.component("pipeline"), rank.component("kvstore")
        layout = self.kvstore.RowLayout(WIDTH, optimizer=optimizer)
        self.store = self.kvstore.KVStore({"t": layout}, optimizer_in_row=True, clock=lambda: 1)
        collection = collection_of(self.pipeline, [_config(self.pipeline)], [values_of((ROWS, WIDTH), 1)])
        plan = {"t": self.pipeline.key_value(self.store, self.kvstore.Buckets(4))}
        self.sharded = sharded_of(self.pipeline, collection, plan, optimizer, rank.group, device="cpu")

    def train(self, steps: range) -> None:
        for step in steps:
            train(self.rank, self.sharded, batches_of(self.rank, ["f"], [ROWS], step), step, self.pipeline, "cpu")

    def rows(self) -> torch.Tensor:
        found: torch.Tensor = self.store.get("t", torch.arange(ROWS))
        return found


def _assert_same(job: _Job, other: _Job, step: int, where: str) -> None:
    assert_equal((job.store.step_count("t"), other.store.step_count("t")), (step, step), where=f"{where}: steps")
    assert_bits(job.rows(), other.rows(), f"{where}: rows")


def _resumed(rank: Rank, folder: str, optimizer: str) -> None:
    job, again, third = (_Job(rank, optimizer) for _ in range(3))
    job.train(range(1, 4))
    dealt = {"process_group": rank.group}
    job.kvstore.save(job.store, folder, buckets=job.kvstore.Buckets(4), **dealt)
    states = job.sharded.optimizer_state_dict()
    job.train(range(4, 6))
    # The rows alone, which have their step; then with the collection's, which is the same.
    for one, state in ((again, {}), (third, states)):
        where = f"{optimizer}, loaded with {sorted(state)}"
        one.kvstore.load(one.store, folder, **dealt)
        if state:
            one.sharded.load_optimizer_state_dict(state)
        one.train(range(4, 6))
        _assert_same(one, job, 5, where)
    # Where the collection is ahead of the table its step is taken.
    for one in (job, again, third):
        one.sharded.fused_optimizer.step_count = 9
        one.train(range(10, 11))
    _assert_same(again, job, 10, f"{optimizer}, set to 9")
    _assert_same(third, job, 10, f"{optimizer}, set to 9 behind its states")
    # Another module that trains the table counts on, and the collection behind it: as steps that are told.
    other, ids = again.kvstore.KVEmbedding(again.store, table="t", lr=0.5), torch.tensor([1, 2])
    other(ids).sum().backward()
    again.train(range(11, 12))
    job.store.apply_gradients("t", ids, torch.ones(2, WIDTH), 0.5, 11)
    job.sharded.fused_optimizer.step_count = 11
    job.train(range(11, 12))
    _assert_same(again, job, 12, f"{optimizer}, beside a KVEmbedding")


@requirement(
    "PIPE-689",
    "A key-value table whose rows were loaded with their step, or trained by another module, MUST be stepped by a "
    "collection with the step behind it, as if nothing had been stopped, and with the collection's own where that is "
    "larger; on every rank.",
)
@pytest.mark.parametrize("optimizer", ["adam", "partial_rowwise_adam", "lamb"])
def test_resumed(rank_pool: Any, tmp_path: Path, optimizer: str) -> None:
    for world_size in (1, 2):
        folder = tmp_path / str(world_size)
        folder.mkdir()
        rank_pool.run(_resumed, world_size, str(folder), optimizer)


NO_STEPS: dict[str, Any] = {
    "text": "x",
    "none": None,
    "a list": [1, 2],
    "two": torch.tensor([1, 2]),
    "nothing": torch.tensor([], dtype=torch.int64),
    "negative": torch.tensor([-1]),
    "a half": torch.tensor([1.5]),
    "nan": torch.tensor([float("nan")]),
    "infinite": torch.tensor([float("inf")]),
    "the last": torch.tensor([STEP_MAX]),
    "too large": torch.tensor([2.0**63]),
    "complex": torch.tensor([1j]),
    "on meta": torch.zeros(1, device="meta"),
}
STEPS: dict[str, tuple[Any, int]] = {
    "an int": (7, 7),
    "int64": (torch.tensor([2**40]), 2**40),
    "float32": (torch.tensor(3.0), 3),
    "none yet": (torch.tensor([0]), 0),
    "the last but one": (torch.tensor(STEP_MAX - 1), STEP_MAX - 1),
}


def _holder(pipeline: Any, kind: str, seed: int) -> tuple[Any, Callable[[], dict[str, Any]], Callable[[Any], Any], str]:
    """A module of one table, what gives its state, what loads it, and the name of the step there."""
    weight = values_of((ROWS, WIDTH), seed)
    if kind == "lookups":
        optimizer = pipeline.FusedOptimizer("adam")
        module = pipeline.TableBatchedEmbeddingBags([_config(pipeline)], optimizer=optimizer, weights=[weight])
        return module, module.state_dict, module.load_state_dict, "step"
    collection = collection_of(pipeline, [_config(pipeline)], [weight])
    module = sharded_of(pipeline, collection, {"t": pipeline.row_wise()}, "adam", device="cpu")
    return module, module.optimizer_state_dict, module.load_optimizer_state_dict, "fused_optimizer.step"


def _numbers(module: Any, kind: str) -> list[torch.Tensor]:
    if kind == "lookups":
        return [value.clone() for value in module.state_dict().values()]
    _, weight, states = module.local_shards()["t"]
    return [weight.clone(), *(state.clone() for state in states.values())]


@requirement(
    "PIPE-693",
    "A step in a state dict of tables that is not one whole number which a step can follow MUST be refused by name "
    "before any table, state or step is changed; what is one MUST be taken, whatever holds it.",
)
@pytest.mark.parametrize("kind", ["lookups", "sharded"])
def test_no_steps(pipeline: Any, kind: str) -> None:
    module, _, load, name = _holder(pipeline, kind, 1)
    _, give, _, _ = _holder(pipeline, kind, 2)
    state = {key: value if key == name else value.clone() for key, value in give().items()}
    if kind == "sharded":
        for part in (value for key, value in state.items() if key != name):
            part.to_local().fill_(1)
    module.fused_optimizer.step_count = 5
    before = _numbers(module, kind)
    for where, wrong in NO_STEPS.items():
        with raises(ConfigError, mentions=(f"where: {name}", "one whole number from 0"), where=f"{kind}, {where}"):
            load({**state, name: wrong})
        assert_equal(module.fused_optimizer.step_count, 5, where=f"{kind}, steps after {where}")
        for found, expected in zip(_numbers(module, kind), before, strict=True):
            assert_bits(found, expected, f"{kind}, after {where}")
    for where, (given, expected_count) in STEPS.items():
        with succeeds("a load", where=f"{kind}, {where}"):
            load({**state, name: given})
        got = (type(module.fused_optimizer.step_count), module.fused_optimizer.step_count)
        assert_equal(got, (int, expected_count), where=f"{kind}, {where}")


@requirement(
    "PIPE-694",
    "The optimizer in the backward MUST refuse a state dict of its own without its learning rate or step, or with a "
    "step that is none, by name, and go on as if nothing had been loaded.",
)
def test_handles(pipeline: Any) -> None:
    module, _, _, _ = _holder(pipeline, "sharded", 1)
    handle = module.fused_optimizer
    handle.step_count = 5
    good = handle.state_dict()
    (group,) = good["param_groups"]
    before = dict(handle.param_groups[0])
    for name in ("lr", "step_count"):
        without = {key: value for key, value in group.items() if key != name}
        with raises(MissingKeyError, mentions=(name, "where: param_groups"), where=f"without {name}"):
            handle.load_state_dict({**good, "param_groups": [without]})
        assert_equal(handle.param_groups[0], before, where=f"the group, after one without {name}")
    for where, wrong in NO_STEPS.items():
        with raises(ConfigError, mentions=("where: step_count",), where=where):
            handle.load_state_dict({**good, "param_groups": [{**group, "step_count": wrong}]})
        with raises(ConfigError, mentions=("where: step_count",), where=f"{where}, assigned"):
            handle.step_count = wrong
        assert_equal(handle.step_count, 5, where=f"steps, after {where}")
    for where, (given, count) in STEPS.items():
        with succeeds("a load", where=where):
            handle.load_state_dict({**good, "param_groups": [{**group, "step_count": given}]})
        assert_equal((type(handle.step_count), handle.step_count), (int, count), where=where)


@requirement(
    "PIPE-695",
    "Options of torch's optimizers in the group of the optimizer in the backward, which no step reads, MUST be refused "
    "by name by the next backward, which is no step: neither table nor step count changes. 0 and False of those that "
    "its formula does without MUST pass.",
)
@pytest.mark.parametrize("kind", ["lookups", "sharded"])
def test_unread_options(pipeline: Any, kind: str) -> None:
    module, _, _, _ = _holder(pipeline, kind, 1)
    batch = pipeline.KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([2]))

    def backward() -> None:
        made = module(batch).values() if kind == "sharded" else module(batch.values(), batch.offsets())
        made.sum().backward()

    (group,), before = module.fused_optimizer.param_groups, _numbers(module, kind)
    constants = {"eps": 1e-3, "betas": (0.5, 0.5), "beta1": 0.5, "beta2": 0.5}
    without = {"weight_decay": 0.5, "momentum": 0.9, "dampening": 0.5, "lr_decay": 0.5}
    without |= dict.fromkeys(("nesterov", "amsgrad", "maximize"), True)
    for name, value in (constants | without).items():
        group[name] = value
        words = "FusedOptimizer('adam'" if name in constants else f"'adam' in the backward has no {name}"
        with raises(ConfigError, mentions=(f"where: {name}", f"got: {value}", words), where=name):
            backward()
        del group[name]
        assert_equal(module.fused_optimizer.step_count, 0, where=f"steps, after {name}")
        for found, expected in zip(_numbers(module, kind), before, strict=True):
            assert_bits(found, expected, f"after {name}")
    # What a scheduler keeps there is its own.
    group |= {"initial_lr": 0.5, "max_lr": 1.0} | {name: type(value)() for name, value in without.items()}
    with succeeds("a backward", where="options of schedulers, and those without which it steps"):
        backward()
    assert_equal(module.fused_optimizer.step_count, 1, where="steps")


STORED = {"kv": 4, "kv_b": 3, "other": 4}
OWN = 2  # Steps before the save, and as many behind it.


class _Kept(torch.nn.Module):
    """A collection two modules deep: key-value tables in two stores, of which one has another table, and a cut one."""

    def __init__(self, rank: Rank, way: str = "", seed: int = 1) -> None:
        super().__init__()
        self.rank, self.way, self.pipeline, self.kvstore = (
            rank,
            way,
            rank.component("pipeline"),
            rank.component("kvstore"),
        )
        layout = self.kvstore.RowLayout(WIDTH, optimizer="adam")
        options = {"optimizer_in_row": True, "clock": lambda: 1, "return_whole_row": way in ("training", "hf")}
        shared = self.kvstore.KVStore({"kv": layout, "kv_b": layout, "beside": layout}, **options)
        # Nobody deals it: each rank has a row of its own number.
        shared.set("beside", torch.tensor([rank.rank]), torch.full((1, WIDTH), float(seed)))
        self.stores = {"kv": shared, "kv_b": shared, "other": self.kvstore.KVStore({"other": layout}, **options)}
        names = [*STORED, "cut"]
        configs = [self.pipeline.EmbeddingBagConfig(ROWS, WIDTH, name, feature_names=[name]) for name in names]
        plan = {n: self.pipeline.key_value(self.stores[n], self.kvstore.Buckets(count)) for n, count in STORED.items()}
        weights = [values_of((ROWS, WIDTH), seed + number) for number in range(len(names))]
        collection = collection_of(self.pipeline, configs, weights)
        plan |= {"cut": self.pipeline.row_wise()}
        sharded = sharded_of(self.pipeline, collection, plan, "adam", rank.group, device="cpu")
        self.inner = torch.nn.ModuleDict({"tables": sharded, "dense": torch.nn.Linear(2, 1)})
        self.optimizer = torch.optim.SGD(self.inner["dense"].parameters(), lr=0.1)

    @property
    def tables(self) -> Any:
        """The collection."""
        return self.inner["tables"]

    def learn(self, steps: range) -> None:
        """Steps of the collection on batches that follow from their numbers."""
        for step in steps:
            batches = batches_of(self.rank, [*STORED, "cut"], [ROWS] * (len(STORED) + 1), step)
            train(self.rank, self.tables, batches, step, self.pipeline, "cpu")

    def add(self) -> None:
        """Rows of this rank's that no batch asks for."""
        for name, count in STORED.items():
            begin, end = self.kvstore.rank_buckets(count, self.rank.world_size, self.rank.rank)
            self.stores[name].set(name, torch.arange(begin, end) + 100 * count, torch.ones(end - begin, WIDTH))

    def rows(self) -> dict[str, dict[int, bytes]]:
        """This rank's rows of each stored table, by id."""
        found: dict[str, dict[int, bytes]] = {}
        for name, store in self.stores.items():
            ids = store.ids(name).sort().values
            found[name] = {
                key: bytes(row.numpy()) for key, row in zip(ids.tolist(), store.get_rows(name, ids), strict=True)
            }
        return found

    def steps(self) -> dict[str, int]:
        """Of each stored table."""
        return {name: store.step_count(name) for name, store in self.stores.items()}

    def options(self) -> dict[str, Any]:
        """What a manager is given."""
        given = {"optimizers": self.optimizer, "states": {"fused": self.tables.fused_optimizer}, "interval": 1}
        return {"model": self, "durable": False, **given, **({"async_mode": "async"} if self.way == "async" else {})}

    def save(self, folder: str) -> None:
        """By the way of this model; training goes on beside an asynchronous save."""
        checkpoint = self.rank.component("checkpoint")
        if self.way == "training":
            states = {"fused": self.tables.fused_optimizer}
            checkpoint.save_training(f"{folder}/step-2", self, self.optimizer, OWN, states=states, durable=False)
            return
        with checkpoint.CheckpointManager(folder, **self.options(), last_save_in_hf=self.way == "hf") as manager:
            manager.save(OWN, last_step=self.way == "hf")
            self.learn(range(OWN + 1, 2 * OWN + 1) if self.way == "async" else range(0))

    def load(self, folder: str) -> None:
        """By the way of this model."""
        checkpoint = self.rank.component("checkpoint")
        if self.way == "training":
            states = {"fused": self.tables.fused_optimizer}
            checkpoint.load_training(f"{folder}/step-2", self, self.optimizer, states=states)
            return
        initial = {"initial_load_path": f"{folder}/step-2", "initial_load_in_hf": True} if self.way == "hf" else {}
        with checkpoint.CheckpointManager(
            f"{folder}-again" if initial else folder, **self.options(), **initial
        ) as manager:
            manager.load()


def keep(rank: Rank, folder: str, way: str) -> tuple[Any, Any]:
    """Train and save, and go on; rows and steps of the save, and the run that goes on is what a resumed one is."""
    model = _Kept(rank, way)
    model.learn(range(1, OWN + 1))
    saved = model.rows(), model.steps()
    with succeeds("a save", where=f"{way}, rank {rank.rank} of {rank.world_size}"):
        model.save(folder)
    if way == "hf":
        return saved
    model.learn(range(OWN + 1, 2 * OWN + 1) if way != "async" else range(0))
    again = _Kept(rank, way, 5)
    again.learn(range(7, 8))
    again.add()
    with succeeds("a load", where=f"{way}, rank {rank.rank} of {rank.world_size}"):
        again.load(folder)
    again.learn(range(OWN + 1, 2 * OWN + 1))
    assert_equal(again.rows(), model.rows(), where=f"{way}, rank {rank.rank} of {rank.world_size}: rows behind")
    assert_equal(again.steps(), model.steps(), where=f"{way}, rank {rank.rank} of {rank.world_size}: steps behind")
    for name, (_, weight, _) in model.tables.local_shards().items():
        assert_bits(again.tables.local_shards()[name][1], weight, f"{way}, {name} behind")
    return saved


def take_up(rank: Rank, folder: str, way: str, rows: dict[str, dict[int, bytes]], steps: dict[str, int]) -> None:
    """Load what other ranks have saved: this rank's rows of each table, and nothing else."""
    model, where = _Kept(rank, way, 5), f"{way}, rank {rank.rank} of {rank.world_size}"
    model.learn(range(7, 8))
    model.add()
    with succeeds("a load", where=where):
        model.load(folder)
    found = model.rows()
    for name, count in STORED.items():
        begin, end = model.kvstore.rank_buckets(count, rank.world_size, rank.rank)
        expected = {key: row for key, row in rows[name].items() if begin <= key % count < end}
        assert_equal(found[name], expected, where=f"{where}: rows of {name}")
    assert_equal(model.steps(), steps, where=f"{where}: steps")
    beside = model.stores["kv"].get("beside", torch.tensor([rank.rank]))
    assert_bits(beside, torch.full((1, WIDTH), 5.0), f"{where}: a table that is none of the collection's")


@requirement(
    "PIPE-796",
    "save_training and a manager, asynchronous and HF too, MUST save the rows of a collection's key-value tables of "
    "that moment, and load them on any number of ranks: each its own alone; training MUST go on bit for bit.",
)
@pytest.mark.parametrize("way", ["training", "manager", "async", "hf"])
def test_rows_in_checkpoints(rank_pool: Any, tmp_path: Path, way: str) -> None:
    # One to three ranks in both directions, and of the other ways one of each.
    loads = {1: (2,), 2: (1, 3), 3: (2,)} if way == "training" else {2: (3,)}
    for saved_count, loaded_counts in loads.items():
        folder = str(tmp_path / f"{saved_count}")
        found = rank_pool.run(keep, saved_count, folder, way)
        rows = {name: {key: row for part, _ in found for key, row in part[name].items()} for name in STORED}
        for loaded_count in loaded_counts:
            rank_pool.run(take_up, loaded_count, folder, way, rows, found[0][1])


ENTRIES = ("weight", "weight_id", "bucket", "metadata", "step", "momentum1", "momentum2")
WRAPPERS: dict[str, Callable[[_Kept], Any]] = {
    "itself": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "data parallel": lambda model: DistributedDataParallel(model, process_group=model.rank.group),
    "inside": lambda model: torch.nn.Sequential(model),
}


def _names_in(path: str) -> set[str]:
    names = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {name for name in names if "embedding_bags." in name and "embedding_bags.cut." not in name}


def _names(prefix: str) -> set[str]:
    return {f"{prefix}embedding_bags.{table}.{entry}" for table in STORED for entry in ENTRIES}


def keep_wrapped(rank: Rank, folder: str) -> None:
    """Save a model that is wrapped in some way, and load it into one that is wrapped in another."""
    checkpoint = rank.component("checkpoint")
    prefixes = dict.fromkeys(WRAPPERS, "inner.tables.") | {"inside": "0.inner.tables."}
    for name, wrapped in WRAPPERS.items():
        model = _Kept(rank)
        model.learn(range(1, OWN + 1))
        path, where = f"{folder}/{name}", f"{name}, rank {rank.rank}"
        told = [key for key in model.state_dict() if any(f"bags.{table}." in key for table in STORED)]
        assert_equal(told, [], where=f"{where}: rows in the state dict of torch's")
        with succeeds("a save", where=where):
            checkpoint.save_training(path, wrapped(model), model.optimizer, OWN, durable=False)
        assert_equal(_names_in(path), _names(prefixes[name]), where=f"{where}: names")
        others = ("itself", "compiled", "data parallel") if name in ("itself", "data parallel") else (name,)
        for other in others:
            again = _Kept(rank, seed=5)
            with succeeds("a load", where=f"{where}, into {other}"):
                checkpoint.load_training(path, WRAPPERS[other](again), again.optimizer)
            assert_equal(again.rows(), model.rows(), where=f"{where}, into {other}: rows")
    model, again = _Kept(rank), _Kept(rank, seed=5)
    model.learn(range(1, OWN + 1))
    for each in (model, again):
        with checkpoint.CheckpointManager(f"{folder}/alone", model=each.tables, interval=1, durable=False) as manager:
            manager.save(1) if each is model else manager.load()
    assert_equal(_names_in(f"{folder}/alone/step-1"), _names(""), where=f"a collection alone, rank {rank.rank}")
    assert_equal(again.rows(), model.rows(), where=f"a collection alone, rank {rank.rank}: rows")


@requirement(
    "PIPE-797",
    "The rows MUST stand in a checkpoint as key_value_state_dict() names them, behind the name of their module, which "
    "neither DistributedDataParallel nor torch.compile changes; the state_dict() of a model MUST have none of them.",
)
def test_names_of_rows(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(keep_wrapped, 2, str(tmp_path))


def refuse_among_states(rank: Rank, folder: str) -> None:
    """A collection with key-value tables beside a model, whole or inside of another module, and one without any."""
    checkpoint, model, dense = rank.component("checkpoint"), _Kept(rank), torch.nn.Linear(2, 2)
    optimizer, where = torch.optim.SGD(dense.parameters(), lr=0.1), f"rank {rank.rank} of {rank.world_size}"
    for name, module in {"tables": model.tables, "inside": torch.nn.Sequential(model.tables)}.items():
        told = {"mentions": (name, *(f"'{prefix}{table}'" for prefix in _PREFIX[name] for table in STORED))}
        states = {name: module}
        with raises(ConfigError, where=f"{name}, {where}: a save", **told):
            checkpoint.save_training(f"{folder}/{name}", dense, optimizer, 1, states=states, durable=False)
        assert_equal(Path(f"{folder}/{name}").exists(), False, where=f"{name}, {where}: something is written")
        with raises(ConfigError, where=f"{name}, {where}: a manager", **told):
            options = {"model": dense, "optimizers": optimizer, "interval": 1}
            checkpoint.CheckpointManager(f"{folder}/kept", states=states, **options)
    cut = rank.component("pipeline").table_wise(0)
    collection = collection_of(model.pipeline, [_config(model.pipeline)], [values_of((ROWS, WIDTH), 1)])
    sharded = sharded_of(model.pipeline, collection, {"t": cut}, "sgd", rank.group, device="cpu")
    with succeeds("a save", where=f"without such tables, {where}"):
        checkpoint.save_training(f"{folder}/cut", dense, optimizer, 1, states={"tables": sharded}, durable=False)
    whole = torch.nn.ModuleDict({"dense": dense, "tables": model.tables})
    with succeeds("a save", where=f"inside of the model, {where}"):
        checkpoint.save_training(f"{folder}/whole", whole, optimizer, 1, durable=False)
    assert_equal(_names_in(f"{folder}/whole"), _names("tables."), where=f"inside of the model, {where}: names")


_PREFIX = {"tables": [""], "inside": ["0."]}


@requirement(
    "PIPE-775",
    "A module with key-value tables among the states of save_training or a manager MUST be refused with their names, "
    "for no state dict of a module has their rows; inside of the model it MUST be saved with them.",
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_among_the_states(rank_pool: Any, tmp_path: Path, world_size: int) -> None:
    rank_pool.run(refuse_among_states, world_size, str(tmp_path))


def _whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() for name, value in state.items()}


def give_rows(rank: Rank) -> None:
    """Rows that a collection is given itself: its own, those of all ranks, of a rank of others, and too few."""
    model, other = _Kept(rank), _Kept(rank, seed=5)
    other.learn(range(1, 2))
    before, where = model.rows(), f"rank {rank.rank} of {rank.world_size}"
    state = other.tables.key_value_state_dict()
    wrong: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
        f"no {entry}": ({n: v for n, v in state.items() if n != f"embedding_bags.kv.{entry}"}, MissingKeyError, ("kv",))
        for entry in ("weight", "weight_id")
    }
    counts = state["embedding_bags.kv.bucket"]
    if rank.world_size == 1:
        part = other.tables.key_value_state_dict()
        part["embedding_bags.other.weight_id"].place(ROWS + 9, 9)
        wrong["a part"] = (part, ConfigError, ("rows of one rank of others", "other.weight_id"))
    else:
        ids = "embedding_bags.kv.weight_id"
        shifted = state | {ids: state[ids].full_tensor() + 4 * 10**6 + 2}
        wrong["other ids"] = (shifted, ConfigError, ("ids of other buckets",))
        fewer = state | {"embedding_bags.kv.bucket": counts.full_tensor()[:1]}
        wrong["other counts"] = (fewer, ConfigError, ("rows of one rank of others", "kv.weight_id"))
    for name, (given, error, mentions) in wrong.items():
        with raises(error, mentions=mentions, where=f"{name}, {where}"):
            model.tables.load_key_value_state_dict(given)
        assert_equal(model.rows(), before, where=f"{where}: rows behind {name}")
    uncounted = {name: value for name, value in state.items() if not name.endswith(".bucket")}
    for name, given in {"views": state, "tensors": _whole(state), "without counts": uncounted}.items():
        model.add()
        with succeeds("a load", where=f"{name}, {where}"):
            # As a checkpoint's, with names of others beside.
            model.tables.load_key_value_state_dict({**given, "kv.weight": torch.ones(1)})
        assert_equal((model.rows(), model.steps()), (other.rows(), other.steps()), where=f"{where}: {name}")


@requirement(
    "PIPE-798",
    "load_key_value_state_dict() MUST leave each key-value table with the rows that it is given, views or plain "
    "tensors, and refuse by name, with nothing changed, those of a rank of others and what lacks some.",
)
def test_rows_given_back(rank_pool: Any) -> None:
    for world_size in (1, 2):
        rank_pool.run(give_rows, world_size)
