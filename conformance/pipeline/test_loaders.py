"""B. Iterators that end: told once, and then asked again, whether they were begun anew, go on or have really ended."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from conformance.harness import Rank, assert_equal, assert_le, raises, requirement, succeeds
from conformance.pipeline.cases import EVALUATION, FUSED, TRAINING, LoaderError
from conformance.pipeline.jobs import Batch, Job, assert_same_state, outputs_of
from conformance.pipeline.model import assert_bits
from twinproof.errors import ConfigError

ALL = (*TRAINING, *EVALUATION)
# Before its start SemiSync is the exact loop.
BEGUN = {"TrainPipelineSemiSync": {"start_batch": 10**6}}
LATE = {"enqueue_batch_after_forward": True}


class Said(Iterator[Any]):
    """Says one thing after the other: a batch, its end where there is None, or an error; then its end for good."""

    def __init__(self, things: Iterable[Any]) -> None:
        self._things, self.count = list(things), 0

    def __next__(self) -> Any:
        self.count += 1
        thing = self._things.pop(0) if self._things else None
        if thing is None:
            raise StopIteration
        if isinstance(thing, BaseException):
            raise thing
        return thing


class Anew:
    """A loader that is its own iterator, begun anew by each ``iter()``: so many batches of ``give`` an epoch."""

    def __init__(self, give: Callable[[], Any], count: int) -> None:
        self._give, self._count, self._left = give, count, 0

    def __iter__(self) -> Anew:
        self._left = self._count
        return self

    def __next__(self) -> Any:
        if not self._left:
            raise StopIteration
        self._left -= 1
        return self._give()


class Persistent(torch.utils.data.DataLoader[Any]):
    """Begins its iterator anew as torch's does that has persistent workers, without processes."""

    _begun: Any = None

    def __iter__(self) -> Any:
        if self._begun is None:
            self._begun = super().__iter__()
        else:
            self._begun._reset(self)
        return self._begun


class Numbers(torch.utils.data.Dataset[Any]):
    """Batches from ``give``, so many an epoch."""

    def __init__(self, give: Callable[[], Any], count: int) -> None:
        self._give, self._count = give, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._give()


def _persistent(give: Callable[[], Any], count: int) -> Persistent:
    return Persistent(Numbers(give, count), batch_size=None)


def _giver(job: Job) -> Callable[[], Batch]:
    """Gives the job's batches by number, one after the other, whoever asks."""
    numbers = iter(range(10**6))
    return lambda: job.batches(1, next(numbers))[0]


def _loop_of(pipeline: Any, name: str, seed: int = 3) -> Job:
    loop = Job(pipeline, seed)
    loop.model.train(name not in EVALUATION)
    return loop


def _assert_loop(loop: Job, found: list[torch.Tensor], where: str, first: int = 0) -> None:
    for number, (got, batch) in enumerate(zip(found, loop.batches(len(found), first), strict=True), first):
        assert_bits(got, loop.step(batch), f"{where}: output {number}")


def _outcomes(schedule: Any, loader: Any, count: int) -> tuple[list[str], list[torch.Tensor]]:
    """What so many calls end in, and their outputs."""
    outcomes, found = list[str](), list[torch.Tensor]()
    for _ in range(count):
        try:
            found.append(schedule.progress(loader))
            outcomes.append("done")
        except (StopIteration, LoaderError) as error:
            outcomes.append(type(error).__name__)
    return outcomes, found


@requirement(
    "PIPE-713",
    "Each end that an iterator tells MUST come out of progress() once, under every schedule, and the next call ask it "
    "again: one that goes on, as a loader that begins anew by itself does, is another epoch, and what it raises comes "
    "out.",
)
@pytest.mark.parametrize("name", ALL)
def test_told_once(pipeline: Any, name: str) -> None:
    for options in ({}, LATE) if name == "TrainPipelineSparseDist" else ({},):
        job, loop = Job(pipeline, 3), _loop_of(pipeline, name)
        one, two, three, four = job.batches(4)
        # Behind its end an iterator raises, and goes on; then it has ended for good.
        things = [one, two, three, None, LoaderError("here"), four, None, None]
        schedule, loader = job.schedule(name, **BEGUN.get(name, {}), **options), Said(things)
        outcomes, found = _outcomes(schedule, loader, 9)
        stop = "StopIteration"
        expected = [*["done"] * 3, stop, "LoaderError", "done", stop, stop, stop]
        assert_equal(outcomes, expected, where=f"{name} {options}: outcomes")
        assert_equal(loader.count, 9, where=f"{name} {options}: how often the iterator was asked")
        _assert_loop(loop, found, f"{name} {options}")
        assert_same_state(job, loop, f"{name} {options}")


@requirement(
    "PIPE-714",
    "A loader whose iter() gives the same iterator, begun anew, MUST give every epoch its batches, as a loader of new "
    "iterators does, under every schedule, with execute_all_batches=False too.",
)
@pytest.mark.parametrize("name", ALL)
def test_begun_anew(pipeline: Any, name: str) -> None:
    for every in (True, False):
        job, loop = Job(pipeline, 3), _loop_of(pipeline, name)
        schedule = job.schedule(name, execute_all_batches=every, **BEGUN.get(name, {}))
        new, count = Job(pipeline, 3), 5
        same, loader = new.schedule(name, execute_all_batches=every, **BEGUN.get(name, {})), Anew(_giver(job), count)
        counts, expected, found = list[int](), list[int](), list[torch.Tensor]()
        for epoch in range(3):
            outputs = outputs_of(schedule, iter(loader))
            if epoch == 0:
                # Asked once more, it has ended again, and what is held stays held.
                with raises(StopIteration, where=f"{name}: behind the end"):
                    schedule.progress(loader)
            counts.append(len(outputs))
            expected.append(len(outputs_of(same, iter(new.batches(count, epoch * count)))))
            found += outputs
        assert_equal(counts, expected, where=f"{name}, all {every}: steps of each epoch")
        _assert_loop(loop, found, f"{name}, all {every}")
        assert_same_state(job, loop, f"{name}, all {every}")


@requirement(
    "PIPE-715",
    "An iterator of torch's DataLoader that iter() began anew MUST be known as such where its end was never told: "
    "behind an epoch of counted steps, and of fewer steps than batches, where what was pulled is processed first.",
)
@pytest.mark.parametrize("name", ALL)
def test_counted_steps(pipeline: Any, name: str) -> None:
    job, loop, count = Job(pipeline, 3), _loop_of(pipeline, name), 5
    schedule, loader = job.schedule(name, **BEGUN.get(name, {})), _persistent(_giver(job), count)
    found = list[torch.Tensor]()
    for steps in (count, count, count - 1, count, count):
        iterator = iter(loader)
        outcomes, outputs = _outcomes(schedule, iterator, steps)
        assert_equal(outcomes, ["done"] * steps, where=f"{name}: an epoch of {steps} steps")
        found += outputs
    # The last end is told once; an iterator that has ended is the same for as long as nobody begins it anew.
    rest, outputs = _outcomes(schedule, iterator, 4)
    held = schedule.processed_count - len(found)
    assert_equal(rest, ["done"] * held + ["StopIteration"] * (4 - held), where=f"{name}: behind the last epoch")
    _assert_loop(loop, found + outputs, name)
    assert_same_state(job, loop, name)


def _endless(give: Callable[[], Any]) -> Iterator[Any]:
    while True:
        yield give()


def _loaders(rank: Rank, give: Callable[[], Any], kind: str) -> Callable[[], Iterator[Any]]:
    """What gives this rank's iterator of an epoch: new ones of rank 1, of other lengths and kinds elsewhere."""
    if rank.rank == 1:
        return lambda: (give() for _ in range(4))
    if rank.rank == 2:
        endless = _endless(give)
        return lambda: endless
    loader = Anew(give, 3) if kind in ("any", "held") else _persistent(give, 0 if kind == "empty" else 3)
    return lambda: iter(loader)


def _epochs_on_ranks(rank: Rank, name: str) -> None:
    """Each rank's batches are numbered as it pulls them, and so are those that it processes."""
    pipeline = rank.component("pipeline")
    for kind, counted in (("any", False), ("any", True), ("torch", True), ("empty", False), ("held", False)):
        where = f"{name}, {kind}, {'counted' if counted else 'told'} steps, rank {rank.rank}"
        options = {"execute_all_batches": kind != "held", **BEGUN.get(name, {})}
        job, loop = Job(pipeline, 4, rank), Job(pipeline, 4, rank)
        loop.model.train(name not in EVALUATION)
        begin = _loaders(rank, _giver(job), kind)
        schedule, found, counts = job.schedule(name, **options), list[torch.Tensor](), list[int]()
        for _ in range(2):
            iterator = begin()
            outputs = _outcomes(schedule, iterator, 3)[1] if counted else outputs_of(schedule, iterator)
            counts.append(len(outputs))
            found += outputs
        # What the first epoch leaves in flight is the second one's first.
        expected = [counts[0] if kind == "held" else 3, 3]
        assert_equal(counts, [0, 0] if kind == "empty" else expected, where=f"{where}: steps of each epoch")
        # What has ended on one rank has ended on all, again each time.
        ended = iter(()) if rank.rank == 0 else iterator
        assert_equal(_outcomes(schedule, ended, 3), (["StopIteration"] * 3, []), where=f"{where}: behind the end")
        _assert_loop(loop, found, where)
        assert_same_state(job, loop, where)


@requirement(
    "PIPE-716",
    "Ranks MUST go on together, and none wait, where one is given the iterator that has ended, begun anew, one a new "
    "iterator and one an endless one: each has its batches in order, whether an epoch's end was told or its steps were "
    "counted; behind the end all stop, again each time.",
)
@pytest.mark.parametrize("name", ALL)
def test_epochs_on_ranks(rank_pool: Any, name: str) -> None:
    rank_pool.run(_epochs_on_ranks, 3, name)


class Kept(Iterator[Any]):
    """Batches of a loader."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = iter(batches)

    def __next__(self) -> Any:
        return next(self._batches)


@requirement(
    "PIPE-717",
    "A pipeline MUST NOT keep an iterator that has ended: none once the end was told, and one of a class with weak "
    "references no longer than others do, though the end was found ahead and no call has told it; None, which stands "
    "there then, is refused as ever.",
)
@pytest.mark.parametrize("name", ALL)
def test_ended_not_kept(pipeline: Any, name: str) -> None:
    job, loop = Job(pipeline, 3), _loop_of(pipeline, name)
    schedule, found = job.schedule(name, **BEGUN.get(name, {})), list[torch.Tensor]()
    for told, wrapped in ((True, True), (False, False)):
        loader = Kept(job.batches(4, len(found)))
        watched, iterator = weakref.ref(loader), map(_same, loader) if wrapped else loader
        del loader
        outputs = outputs_of(schedule, iterator) if told else _outcomes(schedule, iterator, 4)[1]
        del iterator
        found += outputs
        assert_equal(watched() is None, True, where=f"{name}, told {told}: the iterator is gone")
    with raises(ConfigError, mentions=("no iterator",), where=f"{name}: None"):
        schedule.progress(None)
    _assert_loop(loop, found, name)
    found = outputs_of(schedule, iter(job.batches(2, 8)))
    assert_equal(len(found), 2, where=f"{name}: outputs of another")
    _assert_loop(loop, found, name, 8)


def _same(batch: Any) -> Any:
    return batch


@requirement(
    "PIPE-718",
    "What execute_all_batches=False leaves in flight MUST be looked up anew where tables were edited or the mode was "
    "switched behind the end, under every schedule: the next iterator's steps have the loop's bits.",
)
@pytest.mark.parametrize("name", ALL)
def test_edits_behind_an_end(pipeline: Any, name: str) -> None:
    placements: tuple[dict[str, Any], ...] = ({"embedding_lookup_after_data_dist": True}, {"emb_lookup_stream": "new"})
    for options in ({}, *(placements if name == FUSED else ())):
        job, loop = Job(pipeline, 6), _loop_of(pipeline, name, 6)
        schedule = job.schedule(name, execute_all_batches=False, **BEGUN.get(name, {}), **options)
        found, loader = list[torch.Tensor](), Anew(_giver(job), 5)
        for epoch in range(3):
            outputs = outputs_of(schedule, iter(loader))
            where = f"{name} {options}, epoch {epoch}"
            # As many as are held at most are left out of the first epoch.
            assert_le(2, len(outputs), where=f"{where}: steps")
            _assert_loop(loop, outputs, where, len(found))
            found += outputs
            for each in (job, loop):
                _edit(each)
            if name in TRAINING:
                for each in (job, loop):
                    each.model.train(epoch != 0)
        assert_same_state(job, loop, f"{name} {options}")


def _edit(job: Job) -> None:
    with torch.no_grad():
        for collection in job.collections:
            for _, weight, _ in collection.local_shards().values():
                weight.mul_(0.5)


class _Handed:
    """A batch of three parts that stays where it is, and itself, whatever it is filled with."""

    def __init__(self, batch: Batch) -> None:
        self.fill(batch)
        # Some tensors have no strides, and others not even sizes.
        parts, square = [torch.ones(2), torch.ones(3)], torch.eye(3)
        self.others = [torch.nested.nested_tensor(parts, layout=kind) for kind in (torch.strided, torch.jagged)]
        self.others += [square.to_sparse(), square.to_sparse_csr()]

    def fill(self, batch: Batch) -> _Handed:
        """With the parts of another."""
        self.dense, self.ids, self.target = batch.dense, batch.ids, batch.target
        return self

    def to(self, device: Any, non_blocking: bool = False) -> _Handed:
        """It is there."""
        return self


def _with_dense(batch: Batch, memory: torch.Tensor) -> Batch:
    return Batch(memory.copy_(batch.dense), batch.ids, batch.target)


def _with_ids(pipeline: Any, batch: Batch, memory: torch.Tensor, begin: int) -> Batch:
    first = batch.ids[0]
    values = memory[begin : begin + first.values().numel()].copy_(first.values())
    own = pipeline.KeyedJaggedTensor(first.keys(), values, first.weights_or_none(), first.lengths())
    return Batch(batch.dense, [own, batch.ids[1]], batch.target)


def _refilled(pipeline: Any, way: str, batches: list[Batch]) -> Iterator[Any]:
    """The batches, of which some part is written over what another is in."""
    ids, dense, handed = torch.zeros(99, dtype=torch.int64), torch.zeros(8, 4, 6), _Handed(batches[0])
    for number, batch in enumerate(batches):
        if way in ("a tensor", "slots in turn"):
            yield _with_dense(batch, dense[0 if way == "a tensor" else number % 8])
        elif way == "parts that overlap":
            yield _with_ids(pipeline, batch, ids, number % 3)
        elif way == "an object":
            yield handed.fill(batch)
        else:
            yield batches[0] if way == "the same again" else handed.fill(batches[0])


@requirement(
    "PIPE-773",
    "A loader that fills the memory, or the object, of a batch in flight with the next one MUST be refused by name on "
    "the host, where batches are not copied; one that fills others in turn, or gives the same again, MUST NOT be.",
)
@pytest.mark.parametrize(
    "way",
    ["a tensor", "parts that overlap", "an object", "slots in turn", "the same again", "the same object again"],
)
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning", "ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("name", ALL)
def test_refilled(pipeline: Any, name: str, way: str) -> None:
    job, loop = Job(pipeline, 8), _loop_of(pipeline, name, 8)
    if job.device.type != "cpu":
        pytest.skip("a device has a copy")
    batches = [job.batch(number) for number in range(6)]
    schedule, loader = job.schedule(name, **BEGUN.get(name, {})), _refilled(pipeline, way, batches)
    if name in EVALUATION:
        job.model.eval()
    if way in ("a tensor", "parts that overlap", "an object"):
        before = [weight.clone() for weight in job.model.parameters()]
        with raises(ConfigError, mentions=("written over", "where: dataloader_iter"), where=f"{name}, {way}"):
            schedule.progress(loader)
        for got, expected in zip(job.model.parameters(), before, strict=True):
            assert_bits(got, expected, f"a parameter behind {name}, {way}")
        return
    for step, batch in enumerate(batches):
        with succeeds("a step", where=f"{name}, {way}, step {step}"):
            output = schedule.progress(loader)
        assert_bits(output, loop.step(batch if way == "slots in turn" else batches[0]), f"{name}, {way}, step {step}")
    assert_same_state(job, loop, f"{name}, {way}")
