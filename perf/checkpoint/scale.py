"""What a save of a very large model costs, planned for simulated ranks: the real planner, placements, and no data.

Contenders are ``who@placement``. ``ours`` is the plan that the writer would carry out. ``torch`` is torch's plan, whose
ranks write files of their own. ``rank0`` is a planner that lets rank 0 write everything. ``quadratic`` looks through
all items once per rank. ``formula`` is what ``docs/checkpoint.md`` promises.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from conformance.harness import Mismatch, Rank
from fastimpl.checkpoint.geometry import geometry
from fastimpl.checkpoint.pause import collector_paused
from fastimpl.checkpoint.plan import BlockRules, SavePieces, plan_blocks
from fastimpl.checkpoint.replicas import find_holders
from fastimpl.checkpoint.wire import PackedPlan, message_size_bytes, pack_plans, unpack_plan
from fastimpl.checkpoint.writer import PlannedWrites
from perf.checkpoint.placements import PLACEMENTS, Placement, Tensor, local_plans
from perf.harness.counters import Counters
from perf.harness.paired import Round, Sample, interleave
from perf.harness.workloads import Workload
from twinproof.checkpoint.format import PAGE_BYTES
from twinproof.checkpoint.plan import Arrangement, WriterOptions, arrange

__all__ = ["Plans", "costs_by_formula", "costs_of_plan", "make_plans", "measure_scale", "options_of"]

BLOCK_BYTES = 8 << 20  # The writer's default.
SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Plans:
    """Local plans of all ranks, torch's global plan of them, and the CPU time that torch took for it."""

    placement: Placement
    local: list[SavePlan]
    planned: list[SavePlan]
    torch_cpu_s: float

    @property
    def chunk_count(self) -> int:
        """Chunks that all ranks hold, replicas included."""
        return sum(len(plan.items) for plan in self.local)


def measure_scale(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """Plan a save for each contender's placement and count what the plan says."""
    options = options_of(folder)
    plans = {name: make_plans(PLACEMENTS[name]) for name in {who.split("@")[1] for who in workload.contenders}}
    jobs: dict[str, Callable[[Plans, WriterOptions], Sample]] = {
        "ours": costs_of_plan,
        "torch": _torch,
        "rank0": _rank_0,
        "quadratic": _quadratic,
        "formula": lambda found, _: costs_by_formula(found.placement),
    }

    def run_of(who: str) -> Callable[[], Sample]:
        kind, _, name = who.partition("@")
        return partial(_timed, jobs[kind], plans[name], options)

    # Counts repeat exactly; only times need a round that is thrown away.
    contenders = {who: run_of(who) for who in workload.contenders}
    return interleave(contenders, round_count=round_count, seed=seed, warm_up=round_count > 1)


def _timed(job: Callable[[Plans, WriterOptions], Sample], plans: Plans, options: WriterOptions) -> Sample:
    begun, begun_cpu = time.perf_counter(), time.process_time()
    sample = job(plans, options)
    cpu_s = sample.setdefault("cpu_seconds", time.process_time() - begun_cpu)
    return {**sample, "seconds": time.perf_counter() - begun, "cpu_seconds_per_chunk": cpu_s / plans.chunk_count}


def options_of(folder: str) -> WriterOptions:
    """A writer's defaults, and files of 5 GB."""
    flags = dict.fromkeys(("enable_consolidation", "durable", "overwrite"), True)
    flags |= dict.fromkeys(("save_distributed", "single_file", "page_align", "check_replicas"), False)
    return WriterOptions.make(
        folder,
        mapping=None,
        thread_count=1,
        thread_count_consolidation=1,
        max_shard_size=SHARD_BYTES,
        metadata=None,
        export_dtype=None,
        export_keep=(),
        write_mode="random",
        block_bytes=BLOCK_BYTES,
        **flags,
    )


@collector_paused()
def make_plans(placement: Placement) -> Plans:
    """What the coordinator has when it begins to plan the files."""
    local = local_plans(placement)
    begun = time.process_time()
    planned, _ = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(local)
    return Plans(placement, local, planned, time.process_time() - begun)


# What a plan says.


def costs_of_plan(plans: Plans, options: WriterOptions) -> Sample:
    """Plan the save as the coordinator does, and count what each rank is told to write and send."""
    counters = Counters()
    held = [PlannedWrites().announce(plan.items) for plan in plans.local]
    counters.start()
    begun = time.process_time()
    with collector_paused():
        arrangement = arrange(plans.planned, options)
    holders = find_holders(arrangement, held)
    pieces = plan_blocks(arrangement, len(plans.local), BlockRules.of(BLOCK_BYTES), holders)
    packed = pack_plans(pieces, list(arrangement.files.values()))
    cpu_s = time.process_time() - begun
    growth = counters.stop().get("rss_growth_bytes")
    _check(arrangement, packed)
    return {
        "cpu_seconds": cpu_s,
        **({} if growth is None else {"rss_growth_bytes": growth}),
        **_counts(arrangement, pieces),
        "plan_bytes": float(sum(part.size_bytes for part in packed) + sum(map(len, held))),
        "rank_plan_bytes": float(max(part.size_bytes for part in packed)),
    }


def _counts(arrangement: Arrangement, pieces: SavePieces) -> Sample:
    rank_count = len(pieces.pieces)
    written, sent = [0] * rank_count, [0] * rank_count
    files: list[set[int]] = [set() for _ in range(rank_count)]
    exchanged = messages = 0
    for block in pieces.blocks:
        written[block.owner] += block.end - block.start
        files[block.owner].add(block.file)
        for rank, size_bytes in block.message_bytes.items():
            sent[rank] += message_size_bytes(block.message_words[rank], size_bytes)
            exchanged += size_bytes
            messages += 1
    return {
        **_spread(written),
        "exchanged_bytes": float(exchanged),
        "sent_max_bytes": float(max(sent)),
        "message_count": float(messages),
        "block_count": float(len(pieces.blocks)),
        "turn_count": float(max(block.turn for block in pieces.blocks) + 1),
        "file_count": float(len(arrangement.files)),
        "rank_file_count": float(max(map(len, files))),
    }


def _spread(written: Sequence[int]) -> Sample:
    mean = sum(written) / len(written)
    return {
        "saved_bytes": float(sum(written)),
        "rank_bytes": float(max(written)),
        "max_over_mean": max(written) / mean,
    }


def _check(arrangement: Arrangement, packed: Sequence[PackedPlan]) -> None:
    """The blocks that ranks unpack and own cover every file exactly once."""
    plans = map(unpack_plan, packed)
    owned = sorted(
        (block.file, block.start, block.end)
        for rank, plan in enumerate(plans)
        for block in plan.blocks
        if block.owner == rank
    )
    reached = [0] * len(arrangement.files)
    for file, start, end in owned:
        if start != reached[file]:
            raise Mismatch("blocks leave a gap or overlap", got=start, expected=reached[file], where=f"file {file}")
        reached[file] = end
    sizes = [layout.file_bytes for layout in arrangement.files.values()]
    if reached != sizes:
        raise Mismatch("blocks do not reach the end of a file", got=reached, expected=sizes)


def _torch(plans: Plans, options: WriterOptions) -> Sample:
    """Torch's own files: one per rank and output file, that rank 0 or all ranks merge later."""
    arrangement = arrange(plans.planned, options)
    written = [sum(item.tensor_storage_size() or 0 for item in plan.items) for plan in plans.planned]
    files = [{arrangement.tensors[item.index.fqn].file for item in plan.items} for plan in plans.planned]
    pickled = len(pickle.dumps(plans.local[0]))
    return {
        "cpu_seconds": plans.torch_cpu_s,
        **_spread(written),
        "file_count": float(sum(map(len, files))),
        "rank_file_count": float(max(map(len, files))),
        # One rank's plan is pickled for all: the others' have as many items, more or less.
        "plan_bytes": pickled / len(plans.local[0].items) * plans.chunk_count,
    }


def _rank_0(plans: Plans, options: WriterOptions) -> Sample:
    saved = [tensor.size_bytes for tensor in plans.placement.model.tensors()]
    own = sum(item.tensor_storage_size() or 0 for item in plans.local[0].items)
    others = sum(len(plan.items) for plan in plans.planned[1:])
    return {
        **_spread([sum(saved), *[0] * (len(plans.local) - 1)]),
        "exchanged_bytes": float(sum(saved) - own),
        "message_count": sum(saved) / options.block_bytes + others,
    }


def _quadratic(plans: Plans, options: WriterOptions) -> Sample:
    owners = [number for number, plan in enumerate(plans.local) for _ in plan.items]
    for rank in range(len(plans.local)):
        sum(1 for owner in owners if owner == rank)
    return {}


# What the documentation promises.


def costs_by_formula(placement: Placement) -> Sample:
    """The most that a save may exchange, send and make, from the placement alone."""
    payload = largest = exchanged = messages = chunks = 0.0
    for tensor in placement.model.tensors():
        size_bytes = float(tensor.size_bytes)
        cut = _cut_of(placement, tensor)
        if cut.run_bytes >= BLOCK_BYTES // 2:
            exchanged += PAGE_BYTES * cut.run_count
            messages += cut.run_count
        else:
            exchanged += size_bytes * (1 - 1 / cut.holders_of_block) if size_bytes > BLOCK_BYTES else size_bytes
            messages += cut.holders_of_block * (size_bytes / BLOCK_BYTES + 2)
        payload, largest, chunks = payload + size_bytes, max(largest, size_bytes), chunks + cut.holder_count
    return {
        "exchanged_bytes": exchanged,
        "message_count": messages,
        "file_count": 1 + payload / (SHARD_BYTES - largest),
        "plan_bytes": 24 * chunks + 8 * messages,
        "payload_bytes": payload,
    }


@dataclass(frozen=True)
class _Cut:
    """How ranks divide a tensor: length and number of its runs, holders, and how many hold parts of a block."""

    run_bytes: int
    run_count: int
    holder_count: int
    holders_of_block: int


def _cut_of(placement: Placement, tensor: Tensor) -> _Cut:
    boxes = [(offsets, sizes) for _, offsets, sizes in placement.holders(tensor)]
    distinct = set(boxes)
    geometries = [geometry(tensor.shape, offsets, sizes, 2) for offsets, sizes in distinct]
    widest = max(geometries, key=lambda found: found.total_bytes)
    last = widest.locate(widest.total_bytes - 1) + 1
    beside = len({offsets[1:] for offsets, _ in distinct})
    touched = min(len(distinct) // beside, 2 + BLOCK_BYTES // (last - widest.first))
    run_count = sum(found.total_bytes // found.run_bytes for found in geometries)
    return _Cut(widest.run_bytes, run_count, len(boxes), beside * touched)
