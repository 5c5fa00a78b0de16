"""N. Places: on a device nothing of a step is made on the host, and every bit is the host's.

The device is the pretend one: an operator with operands in two places raises there, as on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import Rank, assert_equal, raises, requirement
from conformance.harness.places import copies_of_program, on_pretend
from conformance.pipeline.batches import random_jagged, values_of
from conformance.pipeline.cases import EVALUATION, FUSED, TRAINING
from conformance.pipeline.jobs import KINDS, Job, assert_same_state
from conformance.pipeline.model import OPTIMIZERS, assert_bits, fused_of, random_tables
from conformance.pipeline.sharding import (
    batches_of,
    collection_of,
    gradient_of,
    random_plan,
    sharded_of,
    sharded_tensors,
)
from twinproof.errors import DistributedError, IdRangeError, MissingKeyError, ShapeError


def _cut(pipeline: Any, seed: int, kind: str, group: Any = None, *, weighted: bool = False, world_size: int = 1) -> Any:
    configs, weights, keys, limits = random_tables(pipeline, seed)
    kinds = KINDS if kind == "mixed" else (kind,)
    plan = random_plan(pipeline, configs, world_size, seed, kinds)
    whole = collection_of(pipeline, configs, weights, is_weighted=weighted)
    return sharded_of(pipeline, whole, plan, OPTIMIZERS[seed % len(OPTIMIZERS)], group, device="cpu"), keys, limits


@requirement(
    "PIPE-320",
    "A sharded collection that is sent to a device MUST take everything there: what it names, its tables and their "
    "states, each in its own dtype; and back.",
)
def test_sent(pipeline: Any) -> None:
    for seed, kind in enumerate((*KINDS, "mixed")):
        sharded = _cut(pipeline, seed, kind)[0]
        before = {name: value.detach().clone() for name, value in sharded_tensors(sharded).items()}
        with on_pretend() as device:
            model = torch.nn.ModuleDict({"m": sharded}).to(device.device)
            found = sharded_tensors(model["m"])
            assert_equal(sorted(found), sorted(before), where=f"{kind}: names")
            places = {name: value.device for name, value in found.items()}
            assert_equal(places, dict.fromkeys(found, device.device), where=f"{kind}: places")
        for name, value in sharded_tensors(model["m"].to("cpu")).items():
            assert_equal(value.device.type, "cpu", where=f"{kind}: {name} comes back")
            assert_bits(value.detach(), before[name], f"{kind}: {name}")
        halved = sharded.to(torch.float16).local_shards()
        for name, (_, weight, _) in halved.items():
            assert_equal(weight.dtype, before[f"shard of {name}"].dtype, where=f"{kind}: dtype of {name}")


def _all_steps(rank: Rank) -> None:
    for seed, kind in enumerate((*KINDS, "mixed") if rank.world_size < 3 else ("mixed",)):
        for weighted in (False, True):
            _steps(rank, kind, seed, weighted=weighted)


def _steps(rank: Rank, kind: str, seed: int, *, weighted: bool) -> None:
    pipeline = rank.component("pipeline")
    options: dict[str, Any] = {"weighted": weighted, "world_size": rank.world_size}
    (mine, keys, limits), (theirs, *_) = (_cut(pipeline, seed, kind, rank.group, **options) for _ in range(2))
    with on_pretend() as device:
        mine.to(device.device)
        for step in range(1, 3):
            batches = batches_of(rank, keys, limits, seed + step, weighted=weighted, uneven=True)
            host = batches[rank.rank].kjt(pipeline)
            there = host.to(device.device)
            wanted = []
            for batch in (there, host):
                # Every rank takes part in the exchange of weights' gradients, whether or not it wants them.
                if weighted and (seed + step + rank.rank) % 2:
                    wanted.append(batch.weights().requires_grad_())
            begin = device.mark
            pooled, expected = mine(there).values(), theirs(host).values()
            where = f"{kind} seed {seed} step {step}"
            assert_bits(pooled.detach(), expected.detach(), f"{where} pooled")
            grad = gradient_of(batches, pooled.shape[1], seed, rank.rank)
            pooled.backward(grad.to(device.device))
            expected.backward(grad)
            for weights in wanted[:1]:
                assert_bits(weights.grad, wanted[1].grad, f"{where} gradient of weights")
            for (name, param), (_, other) in zip(mine.named_parameters(), theirs.named_parameters(), strict=True):
                if other.grad is not None:
                    assert_bits(param.grad, other.grad, f"{where} gradient of {name}")
            assert device.counts(begin).launches > 0
        for name, value in sharded_tensors(mine).items():
            assert_bits(value.detach(), sharded_tensors(theirs)[name].detach(), f"{kind} seed {seed} {name}")


@requirement(
    "PIPE-321",
    "No operator in the steps of a sharded collection MUST be given memory of host and device at once, for every kind "
    "of sharding in memory, weights with gradients or none, on 1 to 3 ranks; and every bit MUST be the host's.",
)
def test_steps(rank_pool: Any) -> None:
    for world_size in (1, 2, 3):
        rank_pool.run(_all_steps, world_size)


def _thirds(rank: Rank) -> None:
    for kind in KINDS:
        _steps(rank, kind, 4, weighted=False)


@requirement(
    "PIPE-542",
    "On a device, too, each rank's part of a gradient MUST be divided by the number of ranks with one rounding where "
    "that is no power of two, for every kind of sharding: CUDA multiplies by the reciprocal of a number of the host.",
)
def test_divided_by_ranks(rank_pool: Any) -> None:
    rank_pool.run(_thirds, 3)


def _bad_ids(rank: Rank) -> None:
    pipeline = rank.component("pipeline")
    config = pipeline.EmbeddingBagConfig(6, 4, "t", feature_names=["f"])
    collection = collection_of(pipeline, [config], [values_of((6, 4), 1)])
    sharded = sharded_of(pipeline, collection, {"t": pipeline.row_wise()}, "sgd", rank.group, device="cpu")
    good = pipeline.KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    bad = pipeline.KeyedJaggedTensor(["f"], torch.tensor([1, 6]), lengths=torch.tensor([1, 1]))
    with on_pretend() as device:
        sharded.to(device.device)
        # The second fails before there are ids to send.
        missing = pipeline.KeyedJaggedTensor(["g"], torch.tensor([1]), lengths=torch.tensor([1]))
        for wrong, error in ((bad, IdRangeError), (missing, MissingKeyError)):
            expected = error if rank.rank == rank.world_size - 1 else DistributedError
            given = (good if expected is DistributedError else wrong).to(device.device)
            with raises(expected):
                sharded(given)
            if rank.world_size > 1:
                # Two modules in one exchange, of which one has nothing to send.
                dists: list[Any] = []
                with raises(expected):
                    for ids in (given, good.to(device.device)):
                        dists.append(sharded.input_dist(sharded.create_context(), ids))
                    pipeline.fuse_input_dists(dists)
                    dists[0].wait()
                for other in dists[1:]:
                    other.wait().wait()
        assert_bits(sharded(good.to(device.device)).values().detach(), values_of((6, 4), 1)[1:3], "after the error")


@requirement(
    "PIPE-322",
    "On a device, too, what one rank's ids raise, or a feature that it lacks, MUST be raised on all ranks by name, and "
    "the next batch run.",
)
def test_bad_ids(rank_pool: Any) -> None:
    for world_size in (1, 2):
        rank_pool.run(_bad_ids, world_size)


def _no_copies_of_any(rank: Rank) -> None:
    for kind in (*KINDS, "mixed") if rank.world_size < 3 else ("mixed",):
        for weighted in (False, True):
            _no_copies(rank, kind, weighted=weighted)


def _no_copies(rank: Rank, kind: str, *, weighted: bool) -> None:
    pipeline = rank.component("pipeline")
    sharded, keys, limits = _cut(pipeline, 3, kind, rank.group, weighted=weighted, world_size=rank.world_size)
    with on_pretend() as device:
        sharded.to(device.device)
        for step in range(1, 3):
            batches = batches_of(rank, keys, limits, step, weighted=weighted)
            batch = batches[rank.rank].kjt(pipeline).to(device.device)
            if weighted:
                batch.weights().requires_grad_()
            begin = device.mark
            pooled = sharded(batch).values()
            pooled.sum().backward()
            if step > 1:
                assert_equal(copies_of_program(device, begin), [], where=f"{kind} step {step}: copies to the device")


@requirement(
    "PIPE-323",
    "From its second step on a sharded collection MUST send nothing from host to device: indices, positions, sizes and "
    "anchors are there, on 1 to 3 ranks.",
    needs=("streams",),
)
def test_no_copies(rank_pool: Any) -> None:
    for world_size in (1, 2, 3):
        rank_pool.run(_no_copies_of_any, world_size)


@requirement(
    "PIPE-324",
    "Collections of bags, weighted ones and collections of sequences MUST give the host's bits on a device, made there "
    "or sent there, forward and backward, and mix nothing.",
)
def test_modules(pipeline: Any) -> None:
    config = [pipeline.EmbeddingBagConfig(7, 8, f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]
    sequence = [pipeline.EmbeddingConfig(7, 8, f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]
    makers: dict[str, Any] = {
        "bags": lambda **at: pipeline.EmbeddingBagCollection(config, **at),
        "weighted bags": lambda **at: pipeline.EmbeddingBagCollection(config, is_weighted=True, **at),
        "sequences": lambda **at: pipeline.EmbeddingCollection(sequence, **at),
    }
    for name, make in makers.items():
        batch = random_jagged(["f0", "f1"], [7, 7], 5, 3, weighted="weighted" in name).kjt(pipeline)
        expected = make()
        with on_pretend() as device:
            for found in (make(device=device.device), make().to(device.device)):
                found.load_state_dict(expected.state_dict())
                for module, given in ((found, batch.to(device.device)), (expected, batch)):
                    module.zero_grad()
                    _values(module(given)).square().sum().backward()  # type: ignore[no-untyped-call]
                assert_bits(_values(found(batch.to(device.device))).detach(), _values(expected(batch)).detach(), name)
                for mine, theirs in zip(found.parameters(), expected.parameters(), strict=True):
                    assert_equal(mine.device, device.device, where=f"{name}: place")
                    assert_bits(mine.grad, theirs.grad, f"{name}: gradient")


def _values(result: Any) -> torch.Tensor:
    parts = [part.values() for part in result.values()] if isinstance(result, dict) else [result.values()]
    return torch.cat([part.reshape(-1) for part in parts])


@requirement(
    "PIPE-325",
    "Table-batched bags on a device MUST step their tables to the host's bits with every optimizer, weighted or not.",
)
def test_bags(pipeline: Any) -> None:
    for seed, optimizer in enumerate(OPTIMIZERS):
        configs, weights, _, _ = random_tables(pipeline, seed)
        fused = fused_of(pipeline, optimizer)
        arms = [
            pipeline.TableBatchedEmbeddingBags(configs, optimizer=fused, weights=[w.clone() for w in weights])
            for _ in range(2)
        ]
        names = [f"f{i}" for i in range(len(arms[0].feature_tables))]
        limits = [arms[0].tables[table].num_embeddings for table in arms[0].feature_tables]
        with on_pretend() as device:
            arms[0].to(device.device)
            for step in range(3):
                flat = random_jagged(names, limits, 3, 10 * seed + step, weighted=step == 1).flat()
                there = [None if part is None else part.to(device.device) for part in flat]
                mine, theirs = arms[0](*there), arms[1](*flat)
                assert_bits(mine.detach(), theirs.detach(), f"{optimizer} step {step} pooled")
                grad = values_of(theirs.shape, step)
                mine.backward(grad.to(device.device))
                theirs.backward(grad)
                for (name, value), other in zip(arms[0].named_buffers(), arms[1].buffers(), strict=True):
                    assert_bits(value, other, f"{optimizer} step {step} {name}")


def _train(pipeline: Any, rank: Rank | None, name: str, kinds: Any) -> None:
    loop = Job(pipeline, 4, rank, kinds=kinds, device="cpu")
    with on_pretend() as device:
        job = Job(pipeline, 4, rank, kinds=kinds, device=device.device)
        schedule = job.schedule(name, **({"start_batch": 10**6} if "SemiSync" in name else {}))
        loader = iter(job.batches(4))
        for step, batch in enumerate(loop.batches(4)):
            output = schedule.progress(loader)
            assert_bits(output, loop.step(batch), f"{name} step {step} output")
        assert_same_state(job, loop, name)


def _trains_on_ranks(rank: Rank, name: str) -> None:
    _train(rank.component("pipeline"), rank, name, KINDS)


@requirement(
    "PIPE-326",
    "Every schedule MUST train to the loop's bits on a device, and mix nothing on the way; SparseDist and Fused on 2 "
    "ranks too.",
)
def test_schedules(pipeline: Any, rank_pool: Any) -> None:
    for name in TRAINING:
        _train(pipeline, None, name, KINDS)
    for name in ("TrainPipelineSparseDist", FUSED):
        rank_pool.run(_trains_on_ranks, 2, name)


@requirement("PIPE-327", "Every schedule of evaluation MUST give the loop's outputs on a device, and mix nothing.")
def test_evaluation(pipeline: Any) -> None:
    for name in EVALUATION:
        loop = Job(pipeline, 4, device="cpu")
        loop.model.eval()
        with on_pretend() as device:
            job = Job(pipeline, 4, device=device.device)
            job.model.eval()
            schedule, loader = job.schedule(name), iter(job.batches(4))
            for step, batch in enumerate(loop.batches(4)):
                assert_bits(schedule.progress(loader), loop.step(batch), f"{name} step {step} output")


def _read_together(rank: Rank) -> None:
    pipeline = rank.component("pipeline")
    modules = [_cut(pipeline, seed, "mixed", rank.group, world_size=rank.world_size) for seed in (3, 4, 5)]
    with on_pretend() as device:
        dists = []
        for sharded, keys, limits in modules:
            sharded.to(device.device)
            batch = batches_of(rank, keys, limits, 7)[rank.rank].kjt(pipeline).to(device.device)
            dists.append(sharded.input_dist(sharded.create_context(), batch))
        pipeline.fuse_input_dists(dists)
        begin = device.mark
        for each in dists:
            each.wait()
        reads = [event for event in device.events[begin:] if event.kind == "to host"]
        assert_equal(len(reads), 1, where="copies of sizes to the host")
        for each in dists:
            each.wait().wait()


@requirement(
    "PIPE-330",
    "Sizes of modules that are exchanged together MUST be copied to the host together: it waits once, however many.",
    needs=("streams",),
)
def test_read_together(rank_pool: Any) -> None:
    for world_size in (1, 2):
        rank_pool.run(_read_together, world_size)


@requirement(
    "PIPE-329",
    "Ids on a device MUST be refused by name, with nothing stepped, where a table's rows are in a store that has the "
    "host's memory alone.",
)
def test_stores_of_the_host(pipeline: Any, kvstore: Any) -> None:
    job = Job(pipeline, 4, kinds=("table_wise",), kvstore=kvstore)
    before = job.state()
    with on_pretend() as device:
        batch = job.batch(0).ids[0].to(device.device)
        with raises(ShapeError):
            job.collections[0].to(device.device)(batch).values().sum().backward()
    job.collections[0].to("cpu")
    for name, value in job.state().items():
        assert_bits(value, before[name], name)


@requirement(
    "PIPE-328",
    "State of a sharded collection on a device MUST load into one on the host bit for bit, and the host's into one on "
    "a device, which stays there.",
)
def test_state(pipeline: Any) -> None:
    for seed, kind in enumerate((*KINDS, "mixed")):
        (source, keys, limits), (target, *_) = (_cut(pipeline, seed, kind) for _ in range(2))
        batch = random_jagged(keys, limits, 4, seed)
        source(batch.kjt(pipeline)).values().sum().backward()
        with on_pretend() as device:
            target.to(device.device)
            for give, take in ((source, target), (target, _cut(pipeline, seed, kind)[0])):
                take.load_state_dict(give.state_dict())
                take.load_optimizer_state_dict(give.optimizer_state_dict())
                for name, value in sharded_tensors(take).items():
                    assert_bits(value.detach(), sharded_tensors(source)[name].detach(), f"{kind} {name}")
            places = {value.device.type for value in sharded_tensors(target).values()}
            assert_equal(places, {"pretend"}, where=f"{kind}: places after a load")
