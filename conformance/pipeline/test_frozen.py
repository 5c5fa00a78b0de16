"""Tables that are not trained: what requires no gradient is looked up, and stays as it is."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.harness import Rank, assert_equal, assert_le, requirement, succeeds
from conformance.pipeline.batches import Jagged, random_jagged, values_of
from conformance.pipeline.cases import FUSED
from conformance.pipeline.jobs import KINDS, Job, assert_same_state
from conformance.pipeline.model import Naive, assert_bits, random_tables
from conformance.pipeline.sharding import (
    assert_shards,
    batches_of,
    collection_of,
    expected_step,
    random_plan,
    sharded_of,
    train,
)

CUT = KINDS[:3]


def _expected(naive: Naive, frozen: set[str], batches: list[Jagged], seed: int, step: int) -> list[torch.Tensor]:
    """The oracle's step, in which these tables are not trained."""
    kept = {t.config.name: (t.weight.clone(), copy.deepcopy(t.states)) for t in naive.tables}
    pooled = expected_step(naive, batches, seed, step)
    for table in naive.tables:
        if table.config.name in frozen:
            table.weight, table.states = kept[table.config.name]
    return pooled


def _frozen(rank: Rank, optimizer: str, before: bool) -> None:
    pipeline = rank.component("pipeline")
    for seed in range(4):
        configs, weights, keys, limits = random_tables(pipeline, seed, multiple=4, dtypes=(torch.float32,))
        plan = random_plan(pipeline, configs, rank.world_size, seed, CUT if optimizer == "adam" else ("row_wise",))
        names = [config.name for config in configs]
        naive, whole = Naive(configs, weights, optimizer), collection_of(pipeline, configs, weights)
        frozen = set(names[seed % 2 :: 2])
        if before:
            for name in frozen:
                whole.embedding_bags[name].weight.requires_grad_(False)
        sharded = sharded_of(pipeline, whole, plan, optimizer, rank.group)
        if not before:
            for name, param in sharded.named_parameters():
                param.requires_grad_(name.split(".")[1] not in frozen)
        rounds: list[tuple[set[str], Any]] = [
            (frozen, lambda: None),
            # Flags are kept where parameters are made anew.
            (frozen, lambda: sharded.to(rank.device)),  # noqa: B023
            (set(names), lambda: sharded.requires_grad_(False)),  # noqa: B023
            (set(), lambda: sharded.requires_grad_(True)),  # noqa: B023
        ]
        for step, (untrained, change) in enumerate(rounds, 1):
            change()
            where = f"{plan} seed {seed} step {step}"
            for name, param in sharded.named_parameters():
                assert_equal(param.requires_grad, name.split(".")[1] not in untrained, where=f"{where} flag of {name}")
            batches = batches_of(rank, keys, limits, 10 * seed + step)
            found = train(rank, sharded, batches, seed, pipeline)
            expected = _expected(naive, untrained, batches, seed, step)
            if rank.world_size == 1:
                # Partial sums of rows are rounded by rank.
                assert_bits(found, expected[rank.rank], f"{where} pooled")
            assert_shards(sharded, naive, where)
            assert_equal(sharded.fused_optimizer.step_count, step, where=f"{where}: steps")


@requirement(
    "PIPE-517",
    "Cut tables whose parameter requires no gradient, when they are cut or when the backward comes, MUST be looked up "
    "and MUST NOT be stepped, those beside them as ever, under any plan and number of ranks; and be stepped again "
    "when it does. A backward is a step all the same.",
)
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam"])
def test_frozen_tables(rank_pool: Any, optimizer: str, before: bool) -> None:
    for world_size in (1, 2):
        rank_pool.run(_frozen, world_size, optimizer, before)


@requirement(
    "PIPE-518",
    "Replicated tables and tables in stores that required no gradient when they were cut MUST stay as they are; so "
    "MUST copies of a module with frozen tables keep them frozen, and thaw apart from it.",
)
def test_frozen_before(pipeline: Any, kvstore: Any) -> None:
    configs, weights, keys, limits = random_tables(pipeline, 3, multiple=4, dtypes=(torch.float32,))
    whole = collection_of(pipeline, configs, weights)
    for kind in ("data_parallel", "key_value", "table_wise"):
        plan = dict.fromkeys((config.name for config in configs), pipeline.data_parallel())
        if kind == "key_value":
            layouts = {c.name: kvstore.RowLayout(c.embedding_dim, optimizer="adagrad") for c in configs}
            store = kvstore.KVStore(layouts, optimizer_in_row=True, clock=lambda: 1)
            for config, weight in zip(configs, weights, strict=True):
                store.set(config.name, torch.arange(config.num_embeddings), weight)
            plan = dict.fromkeys(plan, pipeline.key_value(store, kvstore.Buckets(4)))
        elif kind == "table_wise":
            plan = dict.fromkeys(plan, pipeline.table_wise(0))
        # Frozen before the cut, but for tables that are listed when they are cut.
        whole.requires_grad_(kind == "table_wise")
        sharded = sharded_of(pipeline, whole, plan, "adagrad", device="cpu")
        if kind == "table_wise":
            sharded.requires_grad_(False)
        # A store is not copied.
        copied = sharded if kind == "key_value" else copy.deepcopy(sharded)
        for module in (sharded, copied):
            batch = random_jagged(keys, limits, 3, 5).kjt(pipeline)
            (module(batch).values().sum() + torch.zeros(1, requires_grad=True)).sum().backward()
            for param in module.parameters():
                assert_equal((param.requires_grad, param.grad), (False, None), where=f"{kind}: flag and gradient")
            for config, weight in zip(configs, weights, strict=True):
                name = config.name
                if kind == "key_value":
                    found = store.get(name, torch.arange(config.num_embeddings))
                else:
                    found = dict(module.named_parameters())[f"embedding_bags.{name}.weight"].detach()
                assert_bits(found, weight, f"{kind}: {name}")
        if copied is not sharded:
            copied.requires_grad_(True)
        assert_equal({p.requires_grad for p in sharded.parameters()} - {False}, set(), where=f"{kind}: thawed apart")


@requirement(
    "PIPE-528",
    "Tables that are frozen or thawed by what parameters() lists MUST stay so where the module is moved, loaded or "
    "copied next, and train as they are set.",
)
@pytest.mark.parametrize("event", ["to", "load_state_dict", "copy"])
def test_frozen_and_moved(pipeline: Any, event: str) -> None:
    configs, weights, keys, limits = random_tables(pipeline, 3, multiple=4, dtypes=(torch.float32,))
    whole = collection_of(pipeline, configs, weights)
    plan = dict.fromkeys((config.name for config in configs), pipeline.table_wise(0))
    module = sharded_of(pipeline, whole, plan, "adagrad", device="cpu")
    ids = random_jagged(keys, limits, 3, 5).kjt(pipeline)
    for trains in (False, True, False):
        module.requires_grad_(trains)
        if event == "to":
            module.to("cpu")
        elif event == "copy":
            module = copy.deepcopy(module)
        else:
            module.load_state_dict(module.state_dict())
        before = {name: shard[1].clone() for name, shard in module.local_shards().items()}
        (module(ids).values().sum() + torch.zeros(1, requires_grad=True)).sum().backward()
        moved = {name for name, shard in module.local_shards().items() if not torch.equal(shard[1], before[name])}
        assert_equal(bool(moved), trains, where=f"{event}: whether tables are trained")
        assert_equal({p.requires_grad for p in module.parameters()}, {trains}, where=f"{event}: what they say")


@requirement(
    "PIPE-530",
    "A table that is trained beside a frozen one of the same lookup MUST take the step that it takes beside one that "
    "is trained: of sums and of means, with weights and without.",
)
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("is_mean", [False, True])
def test_beside_a_frozen_table(pipeline: Any, is_mean: bool, is_weighted: bool) -> None:
    kinds = [pipeline.PoolingType.SUM, pipeline.PoolingType.MEAN]
    configs = [
        pipeline.EmbeddingBagConfig(7, 4, name, feature_names=[f"f{name}"], pooling=kinds[is_mean == (name == "b")])
        for name in ("a", "b", "c")
    ]
    weights = [values_of((7, 4), seed) for seed in range(3)]
    whole = collection_of(pipeline, configs, weights, is_weighted=is_weighted)
    batch = random_jagged(["fa", "fb", "fc"], [7, 7, 7], 5, 3, weighted=is_weighted)
    stepped: list[torch.Tensor] = []
    for frozen in (set[str](), {"a"}, {"a", "c"}, {"c"}):
        made = sharded_of(
            pipeline, whole, dict.fromkeys("abc", pipeline.table_wise(0)), "rowwise_adagrad", device="cpu"
        )
        for name, param in made.named_parameters():
            param.requires_grad_(name.split(".")[1] not in frozen)
        values = made(batch.kjt(pipeline)).values()
        (values * torch.arange(1.0, 1 + values.numel()).reshape(values.shape)).sum().backward()
        stepped.append(made.local_shards()["b"][1].clone())
        assert_bits(stepped[-1], stepped[0], f"the table beside {sorted(frozen)}, which are frozen")
    assert_equal(torch.equal(stepped[0], weights[1]), False, where="whether the table stayed as it was")


@requirement(
    "PIPE-519",
    "Tables that are frozen or thawed between two steps of a schedule MUST be so in the next step, also where it was "
    "looked up ahead: its steps are the loop's.",
)
@pytest.mark.parametrize("name", ["TrainPipelineSparseDist", FUSED, "TrainPipelineSemiSync"])
def test_frozen_between_steps(pipeline: Any, name: str) -> None:
    options: dict[str, Any] = {"embedding_lookup_before_optimizer": True} if name == FUSED else {}
    options |= {"start_batch": 10**6} if "Semi" in name else {}
    job, loop = (Job(pipeline, 4, kinds=("table_wise", "row_wise")) for _ in range(2))
    schedule, loader, held = job.schedule(name, **options), iter(job.batches(4)), list[Any]()
    for step, batch in enumerate(loop.batches(4)):
        for each in (job, loop):
            each.collections[step % 2].requires_grad_(step < 2)
        held.append({name: shard[1].clone() for name, shard in job.collections[step % 2].local_shards().items()})
        assert_bits(schedule.progress(loader), loop.step(batch), f"step {step}")
        assert_same_state(job, loop, f"step {step}")
        same = {n: torch.equal(job.collections[step % 2].local_shards()[n][1], w) for n, w in held[-1].items()}
        assert_equal(all(same.values()), step >= 2, where=f"step {step}: whether tables stay as they are")


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the most elements that an operator has made."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and not any(part is found for part in args):
            self.most = max(self.most, found.numel())
        return found


@requirement(
    "PIPE-664",
    "A backward MUST make, and send, no gradient of a table that is frozen; those of the tables beside it have the "
    "bits that they have where all are trained.",
)
@pytest.mark.parametrize("frozen", [("large",), ("large", "also")])
def test_nothing_is_made_for_frozen(pipeline: Any, frozen: tuple[str, ...]) -> None:
    names = {"large": 4096, "small": 4, "also": 4}
    tables = [pipeline.EmbeddingBagConfig(rows, 2, name, feature_names=[name]) for name, rows in names.items()]
    tables[1].pooling = pipeline.PoolingType.MEAN
    values = [torch.arange(rows * 2.0).reshape(rows, 2) / 64 for rows in names.values()]
    ids, lengths = torch.tensor([0, 1, 1] * 3), torch.tensor([2, 1] * 3)
    for where in ("bags", "replicas"):
        found = []
        for are_frozen in (True, False):
            bags = collection_of(pipeline, tables, values)
            for name in frozen:
                bags.embedding_bags[name].weight.requires_grad_(not are_frozen)
            if where == "replicas":
                bags = sharded_of(pipeline, bags, dict.fromkeys(names, pipeline.data_parallel()), "sgd", None)
            pooled = bags(pipeline.KeyedJaggedTensor(list(names), ids, lengths=lengths)).values()
            with _Largest() as largest:  # type: ignore[no-untyped-call]
                pooled.square().sum().backward()
            if are_frozen:
                assert_le(largest.most, 4096, where=f"{where}: elements of a tensor")
            found.append({name: bags.embedding_bags[name].weight.grad for name in names})
        for name in names:
            assert_equal(found[0][name] is None, name in frozen, where=f"{where}: no gradient of {name}")
            if name not in frozen:
                assert_bits(found[0][name], found[1][name], f"{where}: gradient of {name}")


@requirement(
    "PIPE-645",
    "Weights of ids MUST be trained also where every table is frozen: their gradients have the bits that they have "
    "where the tables are trained.",
)
def test_weights_of_frozen(pipeline: Any) -> None:
    tables = [pipeline.EmbeddingBagConfig(4, 2, name, feature_names=[name]) for name in ("a", "b")]
    values, ids = [values_of((4, 2), 1), values_of((4, 2), 2)], torch.tensor([0, 1, 1, 3])
    found = list[Any]()
    for are_frozen in (True, False):
        bags, weights = collection_of(pipeline, tables, values, is_weighted=True), values_of((4,), 3).requires_grad_()
        for module in bags.embedding_bags.values():
            module.weight.requires_grad_(not are_frozen)
        batch = pipeline.KeyedJaggedTensor(["a", "b"], ids, weights, lengths=torch.tensor([2, 1, 0, 1]))
        with succeeds("a step", where=f"are_frozen={are_frozen}"):
            bags(batch).values().square().sum().backward()
        grads = [module.weight.grad is None for module in bags.embedding_bags.values()]
        assert_equal(grads, [are_frozen] * 2, where="tables without a gradient")
        assert_equal(weights.grad is not None, True, where=f"are_frozen={are_frozen}: gradients of the weights")
        found.append(weights.grad)
    assert_bits(found[0], found[1], "gradients of the weights")


def _used_by_turns(rank: Rank, name: str) -> None:
    """A parameter for every two steps that may follow each other: used by none, either or both ranks in each."""
    job = Job(rank.component("pipeline"), 4, rank, reduces=False)
    patterns = list(product(product((0, 1), repeat=2), repeat=2))
    free = [torch.nn.Parameter(torch.zeros(2, device=job.device)) for _ in patterns]
    job.model.more = torch.nn.ParameterList(free)
    job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.5)
    steps = list[int]()

    def forward(batch: Any) -> Any:
        losses, output = job.model(batch)
        for param, pattern in zip(free, patterns, strict=True):
            if pattern[len(steps) % 2][rank.rank]:
                losses = losses + param.sum()
        steps.append(len(steps))
        return losses, output

    schedule = job.schedule(name, custom_model_fwd=forward, reduce_dense_gradients=True)
    loader, expected = iter(job.batches(5)), [torch.zeros(2) for _ in patterns]
    for step in range(4):
        schedule.progress(loader)
        for number, pattern in enumerate(patterns):
            count, where = sum(pattern[step % 2]), f"{name}, {pattern}: step {step}"
            assert_equal(free[number].grad is None, count == 0, where=f"{where}: no gradient")
            expected[number] = expected[number] - 0.5 * count / 2
            assert_bits(free[number].detach(), expected[number], where)


@requirement(
    "PIPE-684",
    "With reduce_dense_gradients=True a parameter MUST be averaged in each step in which any rank uses it, and have no "
    "gradient in the others, whichever ranks used it in the step before.",
)
def test_used_by_turns(rank_pool: Any) -> None:
    for name in (FUSED, "TrainPipelineBase"):
        rank_pool.run(_used_by_turns, 2, name)
