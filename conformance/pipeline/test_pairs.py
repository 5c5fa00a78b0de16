"""G. Pairs: what two options of tables, batches and schedules do to each other, where each alone is right.

Every two values of any two options meet in some case. The oracle of tables is in ``paired_tables``; that of schedules
is the model called in a loop.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from conformance.harness import Rank, assert_equal, pairs_of, raises, requirement
from conformance.pipeline.batches import place_of, values_of
from conformance.pipeline.cases import EVAL_FUSED, EVALUATION, FUSED, Context, LoaderError, with_bad_id
from conformance.pipeline.jobs import Batch, Between, Job, Model, Shifted, assert_same_state
from conformance.pipeline.model import OPTIMIZERS, assert_bits
from conformance.pipeline.paired_tables import (
    BAGS,
    BOUNDS,
    DENSE_LR,
    DTYPES,
    FEATURES,
    FORMS,
    KINDS,
    NAMES,
    PARTIAL,
    PLACES,
    ROWS,
    SIZES,
    STEPS,
    TABLES,
    Case,
    Given,
    Trained,
    assert_gradient,
    batch_in,
    features_in,
    is_allowed,
)
from conformance.pipeline.stale import StaleLoop
from twinproof.errors import ConfigError, DistributedError, IdRangeError


class Told(Batch):
    """A batch that takes the stream to copy on, as enable_inplace_copy_batch asks of one with a ``to`` of its own."""

    def to(self, device: Any, non_blocking: bool = False, data_copy_stream: Any = None) -> Batch:
        """Copies there, on the stream that it is told."""
        with nullcontext() if data_copy_stream is None else torch.cuda.stream(data_copy_stream):
            return super().to(device)


def _tables_of(components: tuple[Any, Any], places: Sequence[str], rank: Rank | None) -> None:
    for seed, case in enumerate(pairs_of(TABLES, allowed=is_allowed)):
        if case["place"] in places:
            Trained(components, case, seed, rank).run()


ROW_LOOKUPS = {
    "form": FORMS[:5],
    "dtype": tuple(DTYPES),
    "shared": tuple(FEATURES),
    "bags": BAGS,
    "sizes": SIZES,
    "bounds": BOUNDS,
    "need_indices": (False, True),
    "event": ("nothing", "loaded", "copied"),
}


class RowsTrained:
    """An ``EmbeddingCollection`` of a case beside rows that are taken one by one."""

    def __init__(self, pipeline: Any, case: Case, seed: int) -> None:
        kinds = dict.fromkeys(PLACES, "data_parallel")
        self.case = {**kinds, "weights": "none", "place": "not cut", "pooling": "sum", **case}
        self.pipeline, self.seed, self.place = pipeline, seed, place_of(pipeline)
        parts = zip(ROWS, NAMES, DTYPES[case["dtype"]], features_in(self.case), strict=True)
        configs = [pipeline.EmbeddingConfig(rows, 4, name, dtype, list(some)) for rows, name, dtype, some in parts]
        options = {"need_indices": case["need_indices"], "bounds_check": case["bounds"]}
        self.make: Any = lambda: pipeline.EmbeddingCollection(configs, **options).to(self.place)
        self.module = self.make()
        self.weights = [
            torch.nn.Parameter(values_of((rows, 4), 10 * seed + i, config.data_type))
            for i, (rows, config) in enumerate(zip(ROWS, configs, strict=True))
        ]
        names = [f"embeddings.{name}.weight" for name in NAMES]
        self.module.load_state_dict(dict(zip(names, self.weights, strict=True)))

    def run(self) -> None:
        """Some steps, the event behind the first."""
        for step in range(STEPS):
            self._step(step, f"rows, case {self.seed} {self.case}: step {step}")
            if step == 0 and self.case["event"] == "loaded":
                module, self.module = self.module, self.make()
                self.module.load_state_dict(module.state_dict())
            elif step == 0 and self.case["event"] == "copied":
                self.module = copy.deepcopy(self.module)

    def _step(self, step: int, where: str) -> None:
        batch = batch_in(self.case, self.seed, step, 0)
        kjt = Given(self.pipeline, self.case, batch).kjt()
        found = self.module(kjt.to(self.place))
        every = [name for names in features_in(self.case) for name in names]
        outputs: list[torch.Tensor] = []
        grads: list[torch.Tensor] = []
        for table, names in enumerate(features_in(self.case)):
            sums, weight = torch.zeros(ROWS[table], 4), self.weights[table]
            for name in names:
                part = found[f"{name}@{NAMES[table]}" if every.count(name) > 1 else name]
                bags = batch.picked([name]).bags[0]
                rows = [row for bag in bags for row in bag]
                expected = weight.detach()[torch.tensor(rows, dtype=torch.int64)].float()
                assert_bits(part.values().detach(), expected, f"{where}: rows of {name} in {NAMES[table]}")
                assert_equal(part.lengths().tolist(), [len(bag) for bag in bags], where=f"{where}: lengths of {name}")
                ids = rows if self.case["need_indices"] else None
                got = part.weights_or_none()
                assert_equal(None if got is None else got.tolist(), ids, where=f"{where}: ids of {name}")
                outputs.append(part.values())
                grads.append(values_of(expected.shape, 100 * self.seed + 10 * step + len(grads)))
                for row, grad in zip(rows, grads[-1], strict=True):
                    sums[row] += grad
            weight.grad = sums.to(weight.dtype)
        params = [self.module.embeddings[name].weight for name in NAMES]
        for param in params:
            param.grad = None
        torch.autograd.backward(outputs, [grad.to(self.place) for grad in grads])
        for name, param, weight in zip(NAMES, params, self.weights, strict=True):
            assert_gradient(param, weight.grad, f"{where}: gradient of {name}")
        for some in (params, self.weights):
            torch.optim.SGD(some, lr=DENSE_LR).step()


def _on_two_ranks(rank: Rank) -> None:
    _tables_of((rank.component("pipeline"), rank.component("kvstore")), ("2 ranks",), rank)


@requirement(
    "PIPE-494",
    "Tables MUST look up and train as loops over bags do, bit for bit, with every pair of kinds of tables, optimizer, "
    "dtype, pooling, shared features, weights and their gradients, processors, forms and sizes of batches, checks of "
    "ids, and loads, copies and other learning rates in between, on 1 and 2 ranks and not cut.",
)
def test_tables(pipeline: Any, kvstore: Any, rank_pool: Any, device: str) -> None:
    _tables_of((pipeline, kvstore), ("alone", "not cut"), None)
    for seed, case in enumerate(pairs_of(ROW_LOOKUPS)):
        RowsTrained(pipeline, case, seed).run()
    rank_pool.run(_on_two_ranks, 2, timeout_s=300)


LATE, SEMI_SYNC = {"enqueue_batch_after_forward": True}, "TrainPipelineSemiSync"
SCHEDULES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("TrainPipelineBase", {}),
    ("TrainPipelineSparseDist", {"context_type": Context, **LATE}),
    ("PrefetchTrainPipelineSparseDist", {}),
    (FUSED, {"emb_lookup_stream": "current", "defer_dp_lookup": True}),
    (FUSED, {"embedding_lookup_before_optimizer": True}),
    (FUSED, {"emb_lookup_stream": "new", "embedding_lookup_after_data_dist": True, **LATE}),
    (FUSED, {"use_emb_lookup_stream": True, "embedding_lookup_after_opt": False, "emb_lookup_max_blocks": 2, **LATE}),
    (SEMI_SYNC, {"start_batch": 10**6, "stash_gradients": True}),
    (SEMI_SYNC, {"start_batch": 0}),
    (SEMI_SYNC, {"start_batch": 2, "stash_gradients": True}),
    ("EvalPipelineSparseDist", {}),
    (EVAL_FUSED, {"enable_embedding_lookup_prefetch": True, **LATE}),
)
# Of the first module's tables, and of the second's only one.
PLANS = {
    "whole": ("table_wise", "column_wise", "table_wise", "column_wise"),
    "replicas": ("data_parallel", "row_wise", "column_wise", "data_parallel"),
    "keys": ("key_value", "row_wise", "data_parallel", "key_value"),
}
# What happens before each step; a step that only looks is in evaluation.
PROGRAMS = {
    "other lr": ("", "lr", "", ""),
    "detached": ("error", "detach", "edit", "attach"),
    "reset": ("iterator", "evaluation", "reset", "load"),
}
PIPELINES = {
    "schedule": SCHEDULES,
    "plan": tuple(PLANS),
    "program": tuple(PROGRAMS),
    "weights": ("none", "wanted", "wanted by one rank", "processed"),
    "optimizer": ("adagrad", "sgd", "partial_rowwise_adam"),
    "between": ("nothing", "a module", "a module ahead"),
    "ranks": (1, 2),
    "reduced": ("by hooks", "where asked"),
    "steps_each": (1, 2),
    "execute_all_batches": (True, False),
    "enable_inplace_copy_batch": (False, True),
    "own_forward": (False, True),
    "strict": (False, True),
}
_TABLES = {"form": "lengths", "dtype": "mixed", "pooling": "mixed", "shared": "between", "bags": "usual"}
_TABLES |= {"sizes": "uneven", "bounds": "fatal", "place": "2 ranks"}


def _is_stale(case: Case) -> bool:
    name, options = case["schedule"]
    return bool(name == SEMI_SYNC and options["start_batch"] < 10**6)


def _has(case: Case, option: str) -> bool:
    """Whether the schedule's class has an option; that of evaluation takes no gradients to reduce."""
    name, _ = case["schedule"]
    without = {
        "strict": ("TrainPipelineBase", "TrainPipelineSparseDist", "PrefetchTrainPipelineSparseDist", EVALUATION[0]),
        "pipeline_postproc": ("TrainPipelineBase",),
        "reduce_dense_gradients": EVALUATION,
    }
    return name not in without[option]


def _drivable(case: Case) -> bool:
    """What is refused otherwise, or would be another program for a loop."""
    trains = case["schedule"][0] not in EVALUATION
    reads_dense = case["plan"] in ("replicas", "keys") or case["weights"] == "processed"
    # One update stale, the loop knows of the plain model, whose steps follow one another.
    plain = case["program"] == "other lr" and case["between"] == "nothing" and case["steps_each"] == 1
    # Sums of gradients are averaged once, or as often as they are added to.
    averaged = case["reduced"] == "by hooks" or (case["steps_each"] == 1 and _has(case, "reduce_dense_gradients"))
    return (
        (case["weights"] != "processed" or case["plan"] == "whole")
        and (not case["strict"] or (_has(case, "strict") and not (trains and reads_dense)))
        and (case["between"] != "a module ahead" or _has(case, "pipeline_postproc"))
        and (not _is_stale(case) or plain)
        and averaged
    )


class EachSecond:
    """An optimizer that steps with the sum of two gradients: what steps as one is one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0

    @property
    def param_groups(self) -> list[Any]:
        """Of what is wrapped."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """Of what is wrapped."""
        return self.optimizer.state

    def zero_grad(self) -> None:
        """Before the first of two."""
        if self.count % 2 == 0:
            self.optimizer.zero_grad()

    def step(self) -> None:
        """Behind the second of two."""
        self.count += 1
        if self.count % 2 == 0:
            self.optimizer.step()


class Work(Job):
    """A job of a case's tables, of which it has two modules, and of what stands around them.

    Attributes:
        wanted: batch number -> the weights of its ids, of each module.
    """

    def __init__(self, components: tuple[Any, Any], case: Case, seed: int, rank: Rank | None, *, asks: bool) -> None:
        self.pipeline, self.seed, self.rank, self.case = components[0], seed, 0 if rank is None else rank.rank, case
        kinds = PLANS[case["plan"]]
        self.parts = []
        for index, some in enumerate((kinds[:3], kinds[3:])):
            chosen = {**_TABLES, "weights": case["weights"], "optimizer": case["optimizer"]}
            tables = {**chosen, **dict(zip(PLACES, some, strict=False))}
            self.parts.append(Trained(components, tables, 2 * seed + index, rank))
        self.collections = [part.module for part in self.parts]
        # All of a job is in one place; stores are the host's.
        self.device = self.parts[0].place
        self.stored = [
            (part.store, NAMES[table], part.mine(table))
            for part in self.parts
            for table, kind in enumerate(part.kinds)
            if kind == "key_value"
        ]
        widths = (config.embedding_dim * len(config.feature_names) for part in self.parts for config in part.configs)
        self.inner = self.model = Model(self.collections, sum(widths)).to(self.device)
        with torch.no_grad():
            for index, param in enumerate([*self.inner.bottom.parameters(), *self.inner.top.parameters()]):
                param.copy_(values_of(param.shape, 77 + index))
        if rank is not None and not asks:
            self._reduce(rank.group, rank.world_size)
        dense = torch.optim.SGD(self.inner.parameters(), lr=0.05, momentum=0.5)
        self.optimizer: Any = EachSecond(dense) if case["steps_each"] == 2 else dense
        if case["between"] != "nothing":
            self.model: Any = Between(self.inner, Shifted(self.pipeline))
        self.wanted: dict[int, list[torch.Tensor | None]] = {}

    def batch(self, number: int, stride: int = 0) -> Batch:
        """Batch ``number`` of this rank, of its own size."""
        one_rank, last = self.case["weights"] == "wanted by one rank", self.rank == self.parts[0].world_size - 1
        wanting = self.case["weights"] == "wanted" or (one_rank and last)
        given = []
        for part in self.parts:
            given.append(Given(self.pipeline, part.case, batch_in(part.case, part.seed, number, self.rank)))
        ids = [each.kjt(wanting=wanting) for each in given]
        self.wanted[number] = [each.weights if wanting else None for each in given]
        size, seed = ids[0].stride(), 1000 * self.seed + 10 * number + self.rank
        return Told(values_of((size, 6), seed), ids, values_of((size,), seed + 1))

    def edit(self) -> None:
        """Parameters, tables and stores are written."""
        with torch.no_grad():
            self.inner.top.weight.mul_(0.75)
            for collection in self.collections:
                for _, weight, _ in collection.local_shards().values():
                    weight.mul_(0.5)
            for store, table, ids in self.stored:
                store.set(table, ids, store.get(table, ids) * 0.5)

    def other_lr(self) -> None:
        """Of tables and dense parameters."""
        for handle in (self.optimizer, *(collection.fused_optimizer for collection in self.collections)):
            for group in handle.param_groups:
                group["lr"] *= 0.5

    def saved(self) -> tuple[Any, list[Any]]:
        """Copies of parameters and tables, and of the tables' states."""
        states = [collection.optimizer_state_dict() for collection in self.collections]
        return copy.deepcopy((self.model.state_dict(), states))

    def load(self, saved: tuple[Any, list[Any]]) -> None:
        """What was saved."""
        self.model.load_state_dict(saved[0])
        for collection, states in zip(self.collections, saved[1], strict=True):
            collection.load_optimizer_state_dict(states)


class Source(Iterator[Batch]):
    """Batches by number, so many; raises once in place of the next when it is told to."""

    def __init__(self, job: Work, count: int) -> None:
        self.job, self.count, self.number, self.fails = job, count, 0, False

    def __next__(self) -> Batch:
        if self.fails:
            self.fails = False
            raise LoaderError("here")
        if self.number == self.count:
            raise StopIteration
        self.number += 1
        return self.job.batch(self.number - 1)


class Driven:
    """A schedule of a case, beside the loop."""

    def __init__(self, components: tuple[Any, Any], case: Case, seed: int, rank: Rank | None) -> None:
        self.case, self.where = case, f"case {seed} {dict(case)}"
        asks = case["reduced"] == "where asked"
        self.job = Work(components, case, seed, rank, asks=asks)
        self.loop = Work(components, case, seed, rank, asks=False)
        name, options = case["schedule"]
        flags = {flag: case[flag] for flag in ("execute_all_batches", "enable_inplace_copy_batch")}
        flags |= {"strict": case["strict"]} if _has(case, "strict") else {}
        if _has(case, "pipeline_postproc"):
            flags["pipeline_postproc"] = case["between"] == "a module ahead"
        if asks:
            flags["reduce_dense_gradients"] = True
        if case["own_forward"]:
            flags["custom_model_fwd"] = lambda batch: self.job.model(batch)
        self.schedule = self.job.schedule(name, **flags, **options)
        self.trains = name not in EVALUATION
        self.stale = StaleLoop(self.loop, options.get("start_batch", 0), stashes="stash_gradients" in options)
        # At the end the loader has none left; reset() forgets some.
        self.source = Source(self.job, 9 if case["program"] == "reset" else 5)
        self.loader: Iterator[Batch] = self.source
        self.saved, self.at, self.done = self.loop.saved(), 0, 0

    def run(self) -> None:
        """The program, then all that is left."""
        for event in PROGRAMS[self.case["program"]]:
            if event:
                getattr(self, "_" + event)()
            self._step(f"{self.where}: step {self.done}, {event}")
        assert_same_state(self.job, self.loop, f"{self.where}: after the program")
        for each in (self.job, self.loop):
            each.model.train()
        while self._step(f"{self.where}: step {self.done}"):
            pass
        assert_same_state(self.job, self.loop, f"{self.where}: in the end")
        held = len(self.schedule.batches)
        assert_equal(held, self.source.count - self.at, where=f"{self.where}: batches that are held")
        assert_equal(held == 0, self.case["execute_all_batches"], where=f"{self.where}: all batches processed")
        assert_equal(self.schedule.processed_count, self.done, where=f"{self.where}: steps")

    def _step(self, where: str) -> bool:
        """One of both; whether there was a batch."""
        while True:
            try:
                output = self.schedule.progress(self.loader)
                break
            except StopIteration:
                return False
            except (LoaderError, DistributedError):
                continue
        assert_bits(output, self._expected(), f"{where}: output")
        for got, expected in zip(self.job.wanted[self.at], self.loop.wanted[self.at], strict=True):
            assert_equal(got is None or got.grad is None, expected is None or expected.grad is None, where=where)
            if got is not None and expected is not None and expected.grad is not None:
                assert_gradient(got, expected.grad, f"{where}: gradient of weights")
        self.at, self.done = self.at + 1, self.done + 1
        return True

    def _expected(self) -> torch.Tensor:
        loop = self.loop
        batch = self._ahead if self._ahead is not None else loop.there(loop.batch(self.at))
        if _is_stale(self.case):
            following = None
            if self.at + 1 < self.source.count:
                following = loop.there(loop.batch(self.at + 1))
            self._ahead = following
            return self.stale.step(batch, following, self.done)
        training = loop.model.training
        loop.model.train(training and self.trains)
        found = loop.step(batch)
        loop.model.train(training)
        return found

    # What the stale loop has looked up: a batch's weights are those of the one that it was.
    _ahead: Batch | None = None

    def _detach(self) -> None:
        self.schedule.detach()

    def _attach(self) -> None:
        self.schedule.detach()
        self.schedule.attach()

    def _error(self) -> None:
        self.source.fails = self.job.rank == self.job.parts[0].world_size - 1

    def _lr(self) -> None:
        for each in (self.job, self.loop):
            each.other_lr()

    def _edit(self) -> None:
        for each in (self.job, self.loop):
            each.edit()

    def _load(self) -> None:
        for each in (self.job, self.loop):
            each.load(self.saved)

    def _evaluation(self) -> None:
        for each in (self.job, self.loop):
            each.model.eval()

    def _iterator(self) -> None:
        self.loader = iter(self.source.__next__, None)

    def _reset(self) -> None:
        self.schedule.reset()
        self.at = self.source.number


def _schedules_of(components: tuple[Any, Any], rank: Rank | None) -> None:
    for seed, case in enumerate(pairs_of(PIPELINES, allowed=_drivable)):
        if case["ranks"] == (1 if rank is None else rank.world_size):
            Driven(components, case, seed, rank).run()


def _schedules_on_two_ranks(rank: Rank) -> None:
    _schedules_of((rank.component("pipeline"), rank.component("kvstore")), rank)


@requirement(
    "PIPE-495",
    "Schedules MUST have the outputs, states and gradients of weights of a loop, bit for bit, with every pair of "
    "schedule, option, plan, weights, optimizer, steps over several batches, modules on the way, loader errors, "
    "resets, detachments, modes, loads, edits and learning rates, on 1 and 2 ranks, and hold what they do not process.",
)
def test_schedules(pipeline: Any, kvstore: Any, rank_pool: Any, device: str) -> None:
    _schedules_of((pipeline, kvstore), None)
    rank_pool.run(_schedules_on_two_ranks, 2, timeout_s=300)


PLACEMENTS = {
    "name": (FUSED, EVAL_FUSED),
    "emb_lookup_stream": ("data_dist", "new", "current"),
    "use_emb_lookup_stream": (None, True, False),
    "embedding_lookup_after_data_dist": (False, True),
    # ``embedding_lookup_before_optimizer``, and the other name, which says the opposite.
    "order": ((False, None), (True, None), (False, True), (False, False), (True, True), (True, False)),
    "emb_lookup_stream_priority": (0, -1),
    "emb_lookup_max_blocks": (None, 1, 0),
    "strict": (False, True),
    "reduce_dense_gradients": (None, True),
    "asked": ("", "apply_jit", "free_features_storage_early", "clear_data_dist_inputs"),
}


def _reasons(case: Case) -> list[str]:
    """Names in the errors that refuse these options of a Fused pipeline whose optimizer updates what lookups read."""
    before, after = case["order"]
    use, stream = case["use_emb_lookup_stream"], case["emb_lookup_stream"]
    meant = stream if use is None else "new" if use else "data_dist"
    is_evaluation = case["name"] == EVAL_FUSED
    behind_both = (before or after is False) and case["embedding_lookup_after_data_dist"]
    found = {
        "embedding_lookup_after_opt": (before and after is True) or behind_both,
        "emb_lookup_stream": stream not in ("data_dist", meant),
        "emb_lookup_stream_priority": case["emb_lookup_stream_priority"] != 0 and meant != "new",
        "emb_lookup_max_blocks": case["emb_lookup_max_blocks"] == 0,
        "strict": case["strict"] and not is_evaluation,
        "embedding_lookup_before_optimizer": before and is_evaluation,
        "reduce_dense_gradients": bool(case["reduce_dense_gradients"]) and is_evaluation,
        case["asked"]: bool(case["asked"]),
    }
    return [name for name, is_so in found.items() if is_so]


def _placed(work: Work, expected: torch.Tensor, case: Case) -> None:
    """A pipeline that is refused by name, and leaves the model as it was, or one whose step is the loop's."""
    options = {name: value for name, value in case.items() if name not in ("name", "order", "asked")}
    options["embedding_lookup_before_optimizer"], options["embedding_lookup_after_opt"] = case["order"]
    options |= {case["asked"]: True} if case["asked"] else {}
    reasons, where, said = _reasons(case), f"{dict(case)}", ""
    try:
        schedule = work.schedule(case["name"], **options)
    except ConfigError as error:
        said = str(error)
    assert_equal(bool(said), bool(reasons), where=f"{where}: refused, for one of {reasons}: {said!r}")
    if said:
        assert_equal(any(name in said for name in reasons), True, where=f"{where}: {said!r} names one of {reasons}")
        assert_equal(["forward" in vars(each) for each in work.collections], [False, False], where=f"{where}: driven")
    else:
        assert_bits(schedule.progress(iter([work.batch(0)])), expected, f"{where}: output")
        schedule.detach()


PROCESSED = dict.fromkeys(PLACES, KINDS)
BAD_IDS = {"first": KINDS[:4], "second": KINDS, "third": KINDS, "optimizer": OPTIMIZERS[:3], "shared": ("none", "both")}


def _bad_ids(components: tuple[Any, Any], rank: Rank | None) -> None:
    """An id of the last rank is outside of the first table: every rank raises, and the next step is the first."""
    for seed, case in enumerate(pairs_of(BAD_IDS)):
        trained = Trained(components, {**_TABLES, **case, "weights": "none", "event": "nothing"}, seed, rank)
        ids = Given(components[0], trained.case, batch_in(trained.case, seed, 0, trained.rank)).kjt()
        if trained.rank == trained.world_size - 1:
            ids = with_bad_id(components[0], ids)
        with raises(IdRangeError, mentions=("1000000", "table t,")):
            trained.module(ids.to(trained.place))
        trained.step(0, f"case {seed} {dict(case)}: behind a bad id")


def _bad_ids_on_two_ranks(rank: Rank) -> None:
    _bad_ids((rank.component("pipeline"), rank.component("kvstore")), rank)


@requirement(
    "PIPE-496",
    "Options that contradict MUST be refused together as they are one by one, by name, and change nothing: placements "
    "of lookups, processors on tables without whole bags, a bad id beside tables of any kind.",
)
def test_refusals(pipeline: Any, kvstore: Any, rank_pool: Any, device: str) -> None:
    components = (pipeline, kvstore)
    chosen = {"weights": "none", "optimizer": "sgd", "between": "nothing", "steps_each": 1, "plan": "replicas"}
    work = Work(components, chosen, 1, None, asks=False)
    work.model.eval()
    expected = work.step(work.batch(0))
    # Of most cases several options are refused; then those of which one is, or none.
    for count in (len(PLACEMENTS), 1, 0):
        for case in pairs_of(PLACEMENTS, allowed=lambda case: len(_reasons(case)) <= count):  # noqa: B023
            _placed(work, expected, case)
    for seed, case in enumerate(pairs_of(PROCESSED)):
        with_kinds = {**_TABLES, **case, "weights": "processed", "optimizer": "sgd", "event": "nothing"}
        if is_allowed(with_kinds):
            Trained(components, with_kinds, seed, None).run()
            continue
        unfit = next(case[place] for place in PLACES if case[place] in (*PARTIAL, "data_parallel"))
        with raises(ConfigError, mentions=("feature processors", unfit)):
            Trained(components, with_kinds, seed, None)
    _bad_ids(components, None)
    rank_pool.run(_bad_ids_on_two_ranks, 2, timeout_s=300)
