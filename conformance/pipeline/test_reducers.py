"""G. Dense gradients of several ranks: reduced by somebody, or refused before the first update."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from conformance.harness import Rank, assert_equal, raises, requirement, succeeds
from conformance.pipeline.batches import values_of
from conformance.pipeline.cases import EVALUATION, FUSED, TRAINING, LoaderError
from conformance.pipeline.jobs import Job, assert_same_state, outputs_of
from conformance.pipeline.model import assert_bits
from twinproof.errors import ConfigError

TABLES = ("table_wise", "row_wise")
DTYPES = (torch.float32, torch.float16, torch.float64, torch.bfloat16)


def _apart(rank: Rank, name: str) -> None:
    job, untouched = (Job(rank.component("pipeline"), 3, rank, kinds=TABLES, reduces=False) for _ in range(2))
    schedule, loader = job.schedule(name), iter(job.batches(2))
    for _ in range(2):
        with raises(ConfigError, mentions=("top.weight", "bottom.bias", "reduce_dense_gradients")):
            schedule.progress(loader)
    assert_equal(schedule.pulled_count, 0, where=f"{name} batches that were pulled")
    assert_same_state(job, untouched, f"{name} after a refusal")


@requirement(
    "PIPE-290",
    "On several ranks a schedule MUST refuse, by the names of the parameters and before anything is pulled or updated, "
    "to train dense parameters whose gradients nobody is seen to reduce.",
)
def test_refused(rank_pool: Any) -> None:
    for name in TRAINING:
        rank_pool.run(_apart, 2, name)


def _wrapped(job: Job, rank: Rank) -> None:
    job.model.bottom = DistributedDataParallel(job.model.bottom, process_group=rank.group)  # type: ignore[assignment]
    job.model.top = DistributedDataParallel(job.model.top, process_group=rank.group)  # type: ignore[assignment]


def _fully_sharded(job: Job, rank: Rank) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (rank.world_size,))
    for module in (job.model.bottom, job.model.top):
        fully_shard(module, mesh=mesh)
    job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.05)


def _tables_alone(job: Job, rank: Rank) -> None:
    params = [param for collection in job.collections for param in collection.parameters()]
    job.optimizer = torch.optim.SGD(params, lr=0.05)


def _frozen(job: Job, rank: Rank) -> None:
    for module in (job.model.bottom, job.model.top):
        module.requires_grad_(False)


def _refusals(steps: list[tuple[str, Job, Any]]) -> list[str]:
    """Which of these schedules refuse to train, or to evaluate."""
    found = []
    for where, job, schedule in steps:
        loader = iter(job.batches(2))
        try:
            for _ in range(2):
                schedule.progress(loader)
        except ConfigError as error:
            found.append(f"{where}: {error}")
    return found


def _stashed(rank: Rank) -> None:
    jobs = [Job(rank.component("pipeline"), 4, rank, kinds=TABLES, reduces=False, device="cpu") for _ in range(2)]
    outputs = []
    for job, is_view in zip(jobs, (False, True), strict=True):
        options: dict[str, Any] = {"process_group": rank.group, "gradient_as_bucket_view": is_view}
        job.model.bottom = DistributedDataParallel(job.model.bottom, **options)  # type: ignore[assignment]
        job.model.top = DistributedDataParallel(job.model.top, **options)  # type: ignore[assignment]
        schedule = job.schedule("TrainPipelineSemiSync", start_batch=1, stash_gradients=True)
        outputs.append(outputs_of(schedule, iter(job.batches(6))))
    for step, (expected, found) in enumerate(zip(*outputs, strict=True)):
        assert_bits(found, expected, f"step {step} with views of buckets")
    assert_same_state(jobs[1], jobs[0], "with views of buckets")


@requirement(
    "PIPE-507",
    "With stash_gradients SemiSync MUST step with the gradients as they were, bit for bit, also where they are views "
    "of DistributedDataParallel's buckets, which the next backward writes.",
)
def test_stashed_views(rank_pool: Any) -> None:
    rank_pool.run(_stashed, 2)


def _trains(rank: Rank, name: str) -> None:
    # Meshes and what is sharded over them are of the host, whatever the suite's device.
    pipeline, steps = rank.component("pipeline"), list[tuple[str, Job, Any]]()
    for prepare in (_wrapped, _fully_sharded, _tables_alone, _frozen):
        kinds = ("data_parallel", "table_wise") if prepare in (_tables_alone, _frozen) else TABLES
        job = Job(pipeline, 3, rank, kinds=kinds, reduces=False, device="cpu")
        prepare(job, rank)
        steps.append((prepare.__name__, job, job.schedule(name)))
    job = Job(pipeline, 3, rank, kinds=TABLES, reduces=False, device="cpu")
    job.model.eval()
    steps.append(("a model in evaluation", job, job.schedule(name)))
    job = Job(pipeline, 3, rank, kinds=TABLES, device="cpu")
    steps.append(("gradient hooks", job, job.schedule(name)))
    job = Job(pipeline, 3, rank, kinds=TABLES, reduces=False, device="cpu")
    steps.append(("told", job, job.schedule(name, reduce_dense_gradients=False)))
    assert_equal(_refusals(steps), [], where=f"{name} refusals")


def _unwrapped(rank: Rank, name: str) -> None:
    job = Job(rank.component("pipeline"), 3, rank, kinds=TABLES, reduces=False, device="cpu")
    whole: Any = job.model
    wrapped: Any = DistributedDataParallel(whole, process_group=rank.group)
    job.model = wrapped
    schedule, loader = job.schedule(name), iter(job.batches(4))
    for step in range(2):
        schedule.attach(wrapped)
        with succeeds("a step", where=f"{name}, wrapped, step {step}"):
            schedule.progress(loader)
        schedule.attach(whole)
        with raises(ConfigError, mentions=("top.weight", "reduce_dense_gradients"), where=f"{name}, unwrapped"):
            schedule.progress(loader)


@requirement(
    "PIPE-534",
    "It MUST do so of each model that is attached: of one taken out of the DistributedDataParallel that it was driven "
    "in as well, and go on with that.",
)
def test_refused_when_attached(rank_pool: Any) -> None:
    for name in TRAINING[:3]:
        rank_pool.run(_unwrapped, 2, name)


def _evaluates(rank: Rank, name: str) -> None:
    job = Job(rank.component("pipeline"), 3, rank, kinds=TABLES, reduces=False)
    assert_equal(_refusals([("", job, job.schedule(name))]), [], where=f"{name} refusals")


@requirement(
    "PIPE-291",
    "It MUST NOT refuse parameters of DistributedDataParallel, DTensors, parameters with a gradient hook, frozen ones, "
    "data-parallel tables, which reduce by themselves, a model in evaluation, an evaluation, or what it is told of.",
)
def test_not_refused(rank_pool: Any) -> None:
    for name in TRAINING:
        rank_pool.run(_trains, 2, name)
    for name in EVALUATION:
        rank_pool.run(_evaluates, 2, name)


def _reduced(rank: Rank, name: str) -> None:
    pipeline = rank.component("pipeline")
    loop, job = (Job(pipeline, 4, rank, reduces=each) for each in (True, False))
    options: dict[str, Any] = {"start_batch": 10**6} if "Semi" in name else {}
    schedule, loader = job.schedule(name, reduce_dense_gradients=True, **options), iter(job.batches(4))
    for step, batch in enumerate(loop.batches(4)):
        expected = loop.step(batch)
        assert_bits(schedule.progress(loader), expected, f"{name} step {step}")
        assert_same_state(job, loop, f"{name} step {step}")


def _thawed(rank: Rank, name: str, *, added: bool) -> None:
    """A part that begins to train later: it was frozen, or comes in a group of its own."""
    pipeline = rank.component("pipeline")
    loop, job, apart = (Job(pipeline, 4, rank, reduces=each) for each in (True, False, False))
    for each in (loop, job, apart):
        each.model.bottom.requires_grad_(added)
        given = each.model.top if added else each.model
        each.optimizer = torch.optim.SGD(given.parameters(), lr=0.05)
    options: dict[str, Any] = {"start_batch": 10**6} if "Semi" in name else {}
    schedule, loader = job.schedule(name, reduce_dense_gradients=True, **options), iter(job.batches(4))
    refused, wrong = apart.schedule(name, **options), iter(apart.batches(4))
    apart.model.top.requires_grad_(False)
    where = f"{name}, {'added' if added else 'thawed'}"
    for step, batch in enumerate(loop.batches(4)):
        if step < 2:
            refused.progress(wrong)
        if step == 2:
            for each in (loop, job, apart):
                each.model.bottom.requires_grad_(True)
                if added:
                    each.optimizer.add_param_group({"params": each.model.bottom.parameters()})
            assert_equal(len(_refusals([("", apart, refused)])), 1, where=f"{where}: refusals")
        expected = loop.step(batch)
        assert_bits(schedule.progress(loader), expected, f"{where}, step {step}")
        assert_same_state(job, loop, f"{where}, step {step}")


@requirement(
    "PIPE-404",
    "Parameters that begin to train later, thawed or in a group that is added, MUST be reduced from then on, or "
    "refused as if they had been there from the first.",
)
@pytest.mark.parametrize("added", [False, True])
def test_thawed(rank_pool: Any, added: bool) -> None:
    for name in ("TrainPipelineBase", FUSED):
        rank_pool.run(functools.partial(_thawed, added=added), 2, name)


def _used_here_and_there(rank: Rank, name: str) -> None:
    """A parameter that one rank alone uses, and one that none uses."""
    job = Job(rank.component("pipeline"), 4, rank, reduces=False)
    some, none = (torch.nn.Parameter(values_of((3,), seed)) for seed in (1, 2))
    job.model.some, job.model.none = some, none
    job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.5)

    def forward(batch: Any) -> Any:
        losses, output = job.model(batch)
        return losses + some.sum() * (rank.rank == 1) if rank.rank == 1 else losses, output

    schedule = job.schedule(name, custom_model_fwd=forward, reduce_dense_gradients=True)
    schedule.progress(iter(job.batches(1)))
    assert_bits(some.detach(), values_of((3,), 1) - 0.25, f"{name} used on one rank of two")
    assert_bits(none.detach(), values_of((3,), 2), f"{name} used on no rank")
    assert_equal(none.grad is None, True, where=f"{name} no gradient of what no rank uses")


@requirement(
    "PIPE-292",
    "With reduce_dense_gradients=True a schedule MUST step with the mean of all ranks' dense gradients, bit for bit "
    "the loop's whose gradients are averaged; where one rank has none, it counts as 0.",
)
def test_reduced(rank_pool: Any) -> None:
    for name in TRAINING:
        rank_pool.run(_reduced, 2, name)
        rank_pool.run(_used_here_and_there, 2, name)


class _Flat(torch.optim.SGD):
    """Steps by one buffer, of which all gradients are views."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.mine = self.param_groups[0]["params"]
        sizes = [param.numel() for param in self.mine]
        self.flat = torch.zeros(sum(sizes), device=self.mine[0].device)
        parts = torch.split(self.flat, sizes)
        self.parts = [part.view(param.shape) for param, part in zip(self.mine, parts, strict=True)]
        for param, part in zip(self.mine, self.parts, strict=True):
            param.grad = part

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The views stay."""
        self.flat.zero_()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """SGD's formula."""
        for param, part in zip(self.mine, self.parts, strict=True):
            param.detach().add_(part, alpha=-self.param_groups[0]["lr"])


def _flat_gradients(rank: Rank, name: str) -> None:
    pipeline = rank.component("pipeline")
    loop, job = (Job(pipeline, 4, rank, reduces=each) for each in (True, False))
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.05)
    job.optimizer = _Flat(job.model.parameters(), lr=0.05)
    options: dict[str, Any] = {"start_batch": 10**6} if "Semi" in name else {}
    schedule, loader = job.schedule(name, reduce_dense_gradients=True, **options), iter(job.batches(3))
    for step, batch in enumerate(loop.batches(3)):
        assert_bits(schedule.progress(loader), loop.step(batch), f"{name} step {step}")
        for (named, mine), param in zip(job.model.named_parameters(), loop.model.parameters(), strict=True):
            assert_bits(mine.detach(), param.detach(), f"{name} step {step}, {named}")


@requirement(
    "PIPE-540",
    "Means MUST be put into the gradients that are there: an optimizer that keeps them as views of one buffer steps "
    "with the means.",
)
def test_flat_gradients(rank_pool: Any) -> None:
    for name in TRAINING[:3]:
        rank_pool.run(_flat_gradients, 2, name)


def _not_of_the_model(rank: Rank, name: str) -> None:
    """A parameter that only the forward of the caller's has, used on one rank."""
    job = Job(rank.component("pipeline"), 4, rank, reduces=False)
    free = torch.nn.Parameter(values_of((3,), 1))
    job.optimizer = torch.optim.SGD([*job.model.parameters(), free], lr=0.5)

    def forward(batch: Any) -> Any:
        losses, output = job.model(batch)
        return losses + free.sum() if rank.rank == 1 else losses, output

    with raises(ConfigError, mentions=("not the model's",)):
        job.schedule(name, custom_model_fwd=forward).progress(iter(job.batches(1)))
    assert_bits(free.detach(), values_of((3,), 1), f"{name}: refused")
    job.model.zero_grad()
    schedule = job.schedule(name, custom_model_fwd=forward, reduce_dense_gradients=True)
    schedule.progress(iter(job.batches(1)))
    assert_bits(free.detach(), values_of((3,), 1) - 0.25, f"{name}: stepped with the mean")


@requirement(
    "PIPE-491",
    "Parameters that the optimizer has and the model has not MUST be checked and reduced as the model's own where a "
    "forward of the caller's is given, which may use them.",
)
def test_not_of_the_model(rank_pool: Any) -> None:
    for name in (FUSED, "TrainPipelineBase"):
        rank_pool.run(_not_of_the_model, 2, name)


def _of_every_dtype(rank: Rank, name: str) -> None:
    """Parameters side by side, whose gradients a sum over two ranks cannot hold."""
    job = Job(rank.component("pipeline"), 4, rank, reduces=False)
    params = [torch.nn.Parameter(torch.zeros(3, dtype=dtype, device=job.device)) for dtype in DTYPES]
    job.model.more = torch.nn.ParameterList(params)
    job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.5)
    # Two of them are beyond the largest number.
    largest = [torch.finfo(dtype).max / 4 * 3 for dtype in DTYPES]

    def forward(batch: Any) -> Any:
        losses, output = job.model(batch)
        for param, most in zip(params, largest, strict=True):
            losses = losses + (param * param.new_tensor([most, -most, most * (-1) ** rank.rank])).sum().to(losses.dtype)
        return losses, output

    schedule = job.schedule(name, custom_model_fwd=forward, reduce_dense_gradients=True)
    schedule.progress(iter(job.batches(1)))
    for param, most in zip(params, largest, strict=True):
        expected = param.new_tensor([most, -most, 0.0]).detach()
        assert param.grad is not None
        assert_bits(param.grad, expected, f"{name}: the mean of {param.dtype}")
        assert_bits(param.detach(), 0 - 0.5 * expected, f"{name}: a step of {param.dtype}")


@requirement(
    "PIPE-433",
    "The mean of dense gradients MUST be that of each parameter's own dtype, of any dtypes side by side, also where "
    "the sum over the ranks is beyond the dtype's largest number.",
)
def test_means_of_every_dtype(rank_pool: Any) -> None:
    rank_pool.run(_of_every_dtype, 2, FUSED)


def _sparse_here_and_there(rank: Rank, name: str) -> None:
    """A table of torch's with sparse gradients, which one rank alone uses."""
    job = Job(rank.component("pipeline"), 4, rank, reduces=False)
    job.model.more = more = torch.nn.Embedding(5, 2, sparse=True)
    job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.5)
    before = {key: value.detach().clone() for key, value in job.model.named_parameters()}

    def forward(batch: Any) -> Any:
        losses, output = job.model(batch)
        return losses + more(torch.tensor([1])).sum() if rank.rank else losses, output

    schedule = job.schedule(name, custom_model_fwd=forward, reduce_dense_gradients=True)
    with raises(ConfigError, mentions=("sparse", "more.weight"), where=f"rank {rank.rank}"):
        schedule.progress(iter(job.batches(1)))
    for key, value in job.model.named_parameters():
        assert_bits(value.detach(), before[key], f"{name}: {key}")


@requirement(
    "PIPE-448",
    "A sparse gradient, of one rank alone, MUST be refused on every rank by the name of its parameter, before a dense "
    "parameter is stepped.",
)
def test_sparse_gradients(rank_pool: Any) -> None:
    rank_pool.run(_sparse_here_and_there, 2, "TrainPipelineBase")


class Documented(torch.nn.Module):
    """The model that the documentation speaks of: (losses, output) for a batch (dense [B, 4], ids, target [B])."""

    def __init__(self, tables: torch.nn.Module) -> None:
        super().__init__()
        self.tables, self.top = tables, torch.nn.Linear(4 + 128, 1)
        with torch.no_grad():
            for index, param in enumerate(self.top.parameters()):
                param.copy_(values_of(param.shape, index) / 16)

    def forward(self, batch: Any) -> Any:
        """The mean square of score less target."""
        dense, ids, target = batch
        scores = self.top(torch.cat([dense, self.tables(ids).values()], dim=1))[:, 0]
        return (scores - target).square().mean().reshape(1), scores.detach()


def _documented(rank: Rank, text: str) -> None:
    pipeline = rank.component("pipeline")
    generator = torch.Generator().manual_seed(rank.rank)
    lengths = torch.ones(6, dtype=torch.int64)
    ids = pipeline.KeyedJaggedTensor(["user", "item"], torch.randint(0, 50, (6,), generator=generator), lengths=lengths)
    loader = [(values_of((3, 4), rank.rank), ids, values_of((3,), rank.rank)) for _ in range(3)]
    names: dict[str, Any] = {"torch": torch, "device": torch.device("cpu"), "Model": Documented, "loader": loader}
    exec(compile(text, "docs/pipeline.md", "exec"), names)
    dense = torch.cat([param.detach().reshape(-1) for param in names["model"].top.parameters()])
    every = [torch.empty_like(dense) for _ in range(rank.world_size)]
    dist.all_gather(every, dense, group=rank.group)
    assert_bits(every[1], every[0], "dense parameters of both ranks")
    assert_equal(tuple(names["output"].shape), (3,), where="the output")


@requirement("PIPE-293", "The documented example MUST run on two ranks, whose dense parameters MUST stay the same.")
def test_documented(rank_pool: Any, pipeline: Any) -> None:
    # The first program of docs/pipeline.md, which an installation does not have; ci/checks.py holds the two together.
    program = Path(__file__).with_name("documented_program.txt").read_text(encoding="utf-8")
    package = pipeline.__name__.rpartition(".")[0]
    text = program.replace("from fastimpl.pipeline", f"from {package}.pipeline").replace("1_000_000", "1_000")
    rank_pool.run(_documented, 2, text)


def _left_out_of_ddp(job: Job, rank: Rank) -> list[str]:
    ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(job.model.bottom, ["bias"])
    _wrapped(job, rank)
    return ["bottom.module.bias"]


def _left_out_of_fsdp(job: Job, rank: Rank) -> list[str]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model, here = job.model, {"process_group": rank.group, "use_orig_params": True, "device_id": torch.device("cpu")}
    model.bottom = FullyShardedDataParallel(model.bottom, ignored_states=[model.bottom.bias], **here)  # type: ignore
    model.top = FullyShardedDataParallel(model.top, **here)  # type: ignore
    return ["bottom._fsdp_wrapped_module.bias"]


def _left_out_of_fully_shard(job: Job, rank: Rank) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, bias = init_device_mesh("cpu", (rank.world_size,)), job.model.bottom.bias
    fully_shard(job.model.bottom, mesh=mesh, ignored_params={bias})
    fully_shard(job.model.top, mesh=mesh)
    return ["bottom.bias"]


def _left_out_of_replicate(job: Job, rank: Rank) -> list[str]:
    from torch.distributed._composable.replicate import replicate

    replicate(job.model, ignored_modules=[job.model.bottom, *job.collections], process_group=rank.group)
    return ["bottom.weight", "bottom.bias"]


LEFT_OUT = (_left_out_of_ddp, _left_out_of_fsdp, _left_out_of_fully_shard, _left_out_of_replicate)


def _left_out(rank: Rank, name: str) -> None:
    for prepare in LEFT_OUT:
        # What torch wraps is of the host, as meshes are.
        loop = Job(rank.component("pipeline"), 3, rank, kinds=TABLES, device="cpu")
        for batch in loop.batches(3):
            loop.step(batch)
        for asked in (None, True):
            job = Job(rank.component("pipeline"), 3, rank, kinds=TABLES, reduces=False, device="cpu")
            names, where = prepare(job, rank), f"{name}, {prepare.__name__}, asked {asked}"
            job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.05, momentum=0.5)
            schedule = job.schedule(name, reduce_dense_gradients=asked)
            if asked is None:
                (found,) = _refusals([("", job, schedule)]) or ["nothing"]
                refused = [each for each in dict(job.model.named_parameters()) if repr(each) in found]
                assert_equal(sorted(refused), sorted(names), where=f"{where}: what is refused")
                continue
            loader = iter(job.batches(3))
            schedule.progress(loader)
            # Who reduces what is asked again, of wrappers that know more by now.
            schedule.detach()
            outputs_of(schedule, loader)
            mine = dict(job.model.named_parameters())
            for each in names:
                first, *_, last = each.split(".")
                expected = loop.model.get_parameter(f"{first}.{last}")
                assert_bits(mine[each].detach(), expected.detach(), f"{where}: {each} after three steps")


@requirement(
    "PIPE-424",
    "Parameters that DistributedDataParallel, FullyShardedDataParallel, fully_shard or replicate was told to leave out "
    "MUST be refused by their names, and no others; or averaged over the ranks, bit for bit, where that is asked for.",
)
def test_left_out(rank_pool: Any) -> None:
    rank_pool.run(_left_out, 2, FUSED)


class _Half(torch.nn.Module):
    """A bfloat16 layer alone; with masters or without, its optimizer never moves it."""

    def __init__(self, offload: Any, *, has_masters: bool, lr: float = 0.0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1, bias=False, dtype=torch.bfloat16)
        with torch.no_grad():
            self.layer.weight.copy_(values_of((1, 4), 1))
        self.masters = offload.MasterWeights(self.parameters()) if has_masters else None
        stepped = self.parameters() if self.masters is None else self.masters.parameters()
        self.optimizer = torch.optim.SGD(list(stepped), lr=lr)
        if self.masters is not None:
            self.masters.attach(self.optimizer)

    def forward(self, batch: torch.Tensor) -> Any:
        """The mean of squares, and itself."""
        loss = self.layer(batch.bfloat16()).float().square().mean()
        return loss, loss.detach()


def _masters_apart(rank: Rank) -> None:
    pipeline, offload = rank.component("pipeline"), rank.component("offload")
    batches = [values_of((3, 4), 10 * step + rank.rank) for step in range(4)]
    trained = []
    for has_masters in (False, True):
        model = _Half(offload, has_masters=has_masters, lr=0.25)
        options = {"process_group": rank.group}
        refused = pipeline.TrainPipelineBase(model, model.optimizer, torch.device("cpu"), **options)
        with raises(ConfigError, mentions=("layer.weight", "reduce_dense_gradients"), where=f"masters {has_masters}"):
            refused.progress(iter(batches))
        refused.detach()
        schedule = pipeline.TrainPipelineBase(
            model, model.optimizer, torch.device("cpu"), reduce_dense_gradients=True, **options
        )
        outputs_of(schedule, iter(batches))
        trained.append(model.layer.weight.detach().float())
        everyone = [torch.empty(1, 4) for _ in range(rank.world_size)]
        dist.all_gather(everyone, trained[-1], group=rank.group)
        for other in everyone:
            assert_bits(other, trained[-1], f"weights of the ranks, masters {has_masters}")


@requirement(
    "PIPE-510",
    "Where an optimizer steps masters, the dense parameters that they are rounded into MUST count as those that it "
    "trains: their gradients are reduced, or the ranks are refused, as without masters.",
)
def test_masters_on_ranks(offload: Any, rank_pool: Any) -> None:
    rank_pool.run(_masters_apart, 2)


@requirement(
    "PIPE-511",
    "Where an optimizer steps masters, the gradients of the model MUST be stashed and cleared as without masters, also "
    "behind a step that an error ended.",
)
@pytest.mark.parametrize("stashes", [False, True])
def test_gradients_of_masters(pipeline: Any, offload: Any, stashes: bool) -> None:
    seen = []
    for has_masters in (False, True):
        model, grads = _Half(offload, has_masters=has_masters), list[Any]()

        def note(*_: Any, model: Any = model, grads: Any = grads) -> None:
            grads.append(model.layer.weight.grad.tolist())
            if len(grads) == 2:
                raise LoaderError("here")

        model.optimizer.register_step_pre_hook(note)
        schedule = pipeline.TrainPipelineSemiSync(
            model, model.optimizer, torch.device("cpu"), start_batch=0, stash_gradients=stashes
        )
        loader = iter([values_of((3, 4), step) for step in range(6)])
        for _ in range(6):
            try:
                schedule.progress(loader)
            except LoaderError:
                grads.append("an error")
        seen.append(grads)
    assert_equal(seen[1], seen[0], where="gradients that steps begin with")


def _hooked(rank: Rank, name: str) -> None:
    job, loop = (Job(rank.component("pipeline"), 3, rank, kinds=TABLES, reduces=each) for each in (False, True))

    def mean(grad: torch.Tensor) -> torch.Tensor:
        found = grad / rank.world_size
        dist.all_reduce(found, group=rank.group)
        return found

    for param in (*job.model.bottom.parameters(), *job.model.top.parameters()):
        param.register_hook(mean)  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {"start_batch": 10**6} if "Semi" in name else {}
    schedule, loader = job.schedule(name, **options), iter(job.batches(3))
    for step, batch in enumerate(loop.batches(3)):
        with succeeds("a step", where=f"{name} step {step}, hooks of gradients"):
            output = schedule.progress(loader)
        assert_bits(output, loop.step(batch), f"{name} step {step}, hooks of gradients")
    for prepare in (_wrapped, _tables_alone, _frozen):
        job, loop = (Job(rank.component("pipeline"), 3, rank, kinds=TABLES, reduces=False) for _ in range(2))
        for each in (job, loop):
            prepare(each, rank)
        schedule, loader = job.schedule(name, reduce_dense_gradients=True, **options), iter(job.batches(3))
        for step, batch in enumerate(loop.batches(3)):
            where = f"{name} step {step}, nothing to reduce: {prepare.__name__}"
            with succeeds("a step", where=where):
                output = schedule.progress(loader)
            assert_bits(output, loop.step(batch), where)


@requirement(
    "PIPE-591",
    "Hooks of gradients themselves MUST count as what reduces them; where nothing is left to reduce a schedule that "
    "is asked to MUST step as one that is not.",
)
@pytest.mark.parametrize("name", ["TrainPipelineBase", FUSED, "TrainPipelineSemiSync"])
def test_nothing_to_reduce(rank_pool: Any, name: str) -> None:
    rank_pool.run(_hooked, 2, name)
