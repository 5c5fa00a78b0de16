"""What must come out of the pipeline's bench."""

from __future__ import annotations

from functools import partial

from perf.harness.gates import Gate, claim, counter, limit

__all__ = ["GATES"]

_GPU = ("cuda",)
_QUIET = "bench, 2 EPYC cores, one quiet run"

_KERNELS = "2 cores, interleaved, with and without huge pages"
# What is plausible of short rows, where FBGEMM's fixed work for a row weighs most.
_SHORT_ROWS = 30.0
_REENCODED = (
    "FBGEMM's code takes no turns between AVX and SSE, which some processors punish (perf/peers/fbgemm_code.py)"
)
_fbgemm = partial(claim, peer="fbgemm", control="fbgemm", evidence=_KERNELS)
_read = partial(
    limit,
    peer="read",
    metric="forward_seconds",
    ceiling=1.5,
    control="one-thread",
    evidence="the loop is perf/peers/plain_bags.cpp; the control has one thread",
)
_torchrec = partial(
    claim, subject="fused", peer="torchrec-sparse-dist", control="torchrec-sparse-dist", evidence=_QUIET
)
_peak = partial(counter, subject="fused:data_dist", peer="sparse-dist", ceiling=1.03)
_gpu_step = partial(claim, subject="fused:data_dist", peer="sparse-dist", ceiling=2.0, hardware=_GPU)
_gpu_saving = partial(limit, peer="saved", floor=0.8, ceiling=2.0, control_peer="saved-by-blocking", hardware=_GPU)


def _kernel(id: str, what: str, floor: float, *, full: str) -> Gate:
    """An operator on a GPU beside a copy of the bytes that it has to read and write."""
    return limit(
        id,
        f"{what} on a GPU MUST reach {floor} of the rate of a copy on the device in the same run.",
        full=full,
        peer="copy",
        floor=floor,
        ceiling=1.2,
        control="four-times",
        hardware=_GPU,
        evidence="the bytes that the task has to move, once; the control does the work four times",
    )


def _step(id: str, what: str, share: str, *, full: str, floor: float, ceiling: float = 8.0) -> Gate:
    """A whole step: forward, backward and the optimizer."""
    return _fbgemm(
        id, f"A step {what} MUST take at most {share} of FBGEMM's time.", full=full, floor=floor, ceiling=ceiling
    )


def _forward(id: str, what: str, share: str, *, full: str, floor: float, ceiling: float = 8.0) -> Gate:
    sentence = f"{what} MUST take at most {share} of FBGEMM's time."
    return _fbgemm(id, sentence, full=full, metric="forward_seconds", floor=floor, ceiling=ceiling)


_TRAINING = (
    _step("pipe-sgd-step", "with SGD", "half", full="train-sgd-128", floor=2.0),
    _step("pipe-adagrad-step", "with Adagrad", "an eighth", full="train-adagrad-128", floor=8.0, ceiling=20.0),
    _step("pipe-rowwise-step", "with row-wise Adagrad", "1/1.6", full="train-rowwise-128", floor=1.6),
    _forward("pipe-forward", "Pooling", "1/1.3", full="train-rowwise-128", floor=1.3, ceiling=6.0),
    _read(
        "pipe-forward-read",
        "Pooling MUST reach 0.8 of a loop that reads the same rows and does nothing with them.",
        full="train-rowwise-128",
        short="train-rowwise-128-small",
        floor=0.8,
    ),
    _step("pipe-half-step", "on float16 tables", "a quarter", full="train-rowwise-half-128", floor=4.0, ceiling=20.0),
    _read(
        "pipe-half-forward-read",
        "Pooling float16 rows MUST reach 0.65 of a loop that reads them and does nothing with them.",
        full="train-rowwise-half-128",
        floor=0.65,
    ),
    _step("pipe-zipf-step", "on ids with Zipf's frequencies", "1/1.3", full="train-rowwise-zipf-128", floor=1.3),
    _forward(
        "pipe-zipf-forward", "Pooling of ids with Zipf's frequencies", "1/1.3", full="train-rowwise-zipf-128", floor=1.3
    ),
    _step("pipe-one-step", "on bags of one id", "1/1.4", full="train-rowwise-one-128", floor=1.4, ceiling=12.0),
    _forward(
        "pipe-one-forward", "Pooling bags of one id", "1/1.15", full="train-rowwise-one-128", floor=1.15, ceiling=20.0
    ),
    _fbgemm(
        "pipe-8-step",
        "A step on rows of 8 MUST NOT take longer than FBGEMM's.",
        full="train-rowwise-8",
        floor=1.0,
        ceiling=_SHORT_ROWS,
        control_peer="ours",
        evidence=f"both touch a line of each row and of its state; the control asks the same of FBGEMM; {_REENCODED}",
    ),
    _step("pipe-16-step", "on rows of 16", "1/1.2", full="train-rowwise-16", floor=1.2, ceiling=_SHORT_ROWS),
    _forward("pipe-16-forward", "Pooling rows of 16", "1/1.3", full="train-rowwise-16", floor=1.3),
    _step("pipe-512-step", "on rows of 512", "1/1.6", full="train-rowwise-512", floor=1.6),
    _forward("pipe-512-forward", "Pooling rows of 512", "1/1.4", full="train-rowwise-512", floor=1.4),
    claim(
        "pipe-torch-step",
        "A step with Adagrad MUST take at most a thirtieth of that of torch's sparse embedding bags.",
        full="train-adagrad-128-torch",
        peer="torch",
        floor=30.0,
        ceiling=400.0,
        control="torch",
        evidence=_KERNELS,
    ),
    claim(
        "pipe-small-torch-step",
        "A small step with Adagrad MUST take at most a fifth of that of torch's sparse embedding bags.",
        short="train-adagrad-128-small",
        peer="torch",
        floor=5.0,
        ceiling=400.0,
        control="torch",
        evidence="the published floor is 30; what is fixed per step weighs more on a small shape",
    ),
)

_SCHEDULES = (
    claim(
        "pipe-sharded",
        "Training on sharded tables with Adagrad, 2 ranks, MUST take at most 1/1.3 of torchrec's time "
        "under the same plan.",
        full="sparse-nn-20x50k",
        peer="torchrec",
        floor=1.3,
        ceiling=10.0,
        control="torchrec",
        evidence=_QUIET,
    ),
    claim(
        "pipe-fused-rowwise",
        "With row-wise Adagrad a step of our Fused MUST NOT take longer than that of torchrec's SparseDist, 2 ranks, "
        "the same plan.",
        full="sparse-nn-20x50k-rowwise",
        subject="fused",
        peer="torchrec-sparse-dist",
        floor=1.0,
        ceiling=10.0,
        control="reference",
        evidence=f"{_REENCODED}; half of a step is the model's own, and kernels of both are near the memory's limit",
    ),
    limit(
        "pipe-fused-rowwise-read",
        "With row-wise Adagrad a step of our Fused MUST reach 0.8 of the speed of one that only reads the rows.",
        full="sparse-nn-20x50k-rowwise",
        subject="fused",
        peer="read-tables",
        floor=0.8,
        ceiling=1.1,
        control="reference",
        evidence="each id's row is read once to pool and once to step, and none is written",
    ),
    _torchrec(
        "pipe-fused",
        "A step of our Fused MUST take at most 1/1.5 of that of torchrec's SparseDist, 2 ranks, the same plan.",
        full="sparse-nn-20x50k",
        floor=1.5,
        ceiling=10.0,
    ),
    _torchrec(
        "pipe-progress",
        "What progress() of our Fused adds to a loop over the same modules MUST take at most half of what "
        "torchrec's SparseDist adds to a loop over its own.",
        full="sparse-nn-tiny",
        metric="progress_seconds",
        floor=2.0,
        ceiling=20.0,
    ),
    _peak(
        "pipe-table-allocated",
        "Fused MUST allocate at most 3 % more than SparseDist at its peak.",
        full="seed-table-20x20k",
        short="seed-table-20x2k",
        metric="peak_allocated_bytes",
        control="semi-sync",
        evidence="tensors that ops hand out; the lookup begins when the last one's columns are dead; "
        "the control has two in flight",
    ),
    _peak(
        "pipe-gpu-reserved",
        "Fused MUST reserve at most 3 % more device memory than SparseDist, at the size of torchrec PR 2916.",
        full="seed-table-gpu-200x100k",
        metric="peak_reserved_bytes",
        control="hoarder",
        hardware=_GPU,
        evidence="torchrec PR 2916 came to 10 % more; the control holds an eighth of the tables besides",
    ),
    _gpu_step(
        "pipe-gpu-a-step",
        "With a dense optimizer that fills the device a step of Fused MUST NOT take 1 % longer than SparseDist's.",
        full="gpu-config-a-100x100k",
        floor=0.99,
        control="blocking",
        evidence="on one GPU there is nothing to win but the ends of kernels: beside the products of Muon an H200 hid "
        "0.3 ms of a lookup, whatever its length, grid or priority; the control's host waits for every step",
    ),
    _gpu_saving(
        "pipe-gpu-a-saving",
        "Of what two streams hide of lookup and dense optimizer, Fused MUST save 0.8.",
        full="gpu-config-a-100x100k",
        subject="hideable",
        control="hideable",
        evidence="one stream less two, each with the same lookup and optimizer and nothing else, in the same run; "
        "the control's host waits for every step; an H200 has 0.1 ms to save, which it could not decide",
    ),
    _gpu_step(
        "pipe-gpu-b-step",
        "With a dense optimizer that is bound by memory a step of Fused MUST NOT take 1 % longer than SparseDist's.",
        full="gpu-config-b-100x100k",
        floor=0.99,
        control="blocking",
        evidence="both need the memory's whole bandwidth: two streams of an H200 hid 0.1 of 0.9 ms; the control's "
        "host waits for every step",
    ),
    _gpu_saving(
        "pipe-gpu-c-gap",
        "Where the host's waits leave the device idle, Fused MUST close 0.8 of the gap.",
        full="gpu-config-c-100x100k",
        subject="idle",
        control="idle",
        evidence="the traces of torchrec PR 2916: the gap between the end of the input dist and the lookup; an H200 "
        "was done in 1.7 ms with what the host took 9 to queue, a gap that no schedule closes",
    ),
)

_KERNELS_ON_GPU = (
    _kernel("pipe-gpu-pool", "Pooling", 0.8, full="gpu-kernel-pool-128"),
    _kernel("pipe-gpu-pool-float16", "Pooling float16 rows", 0.7, full="gpu-kernel-pool-float16-128"),
    _kernel("pipe-gpu-pool-bfloat16", "Pooling bfloat16 rows", 0.7, full="gpu-kernel-pool-bfloat16-128"),
    _kernel("pipe-gpu-pool-one", "Pooling bags of one id", 0.5, full="gpu-kernel-pool-one-128"),
    _kernel("pipe-gpu-step", "The backward with row-wise Adagrad", 0.5, full="gpu-kernel-step-128"),
)

_PRETEND = "pretend-step-8x200"
_counted = partial(counter, full=_PRETEND, short=_PRETEND, test=_PRETEND, control="careless")
_WAITS = (
    "sizes of both modules and what the checks of their ids found are read in one copy; launchers wait for nothing; 29 "
    "once; the control looks at each batch's lengths and sends them back"
)


def _counts(schedule: str, name: str) -> tuple[Gate, ...]:
    """What a step of one schedule makes the host and the link do, on the pretend device."""
    return (
        _counted(
            f"pipe-pretend-{schedule}-waits",
            f"In a step of {name} with two modules the host MUST wait for the device at most twice.",
            subject=schedule,
            metric="wait_count",
            ceiling=2,
            evidence=_WAITS,
        ),
        _counted(
            f"pipe-pretend-{schedule}-sent",
            f"A step of {name} MUST send nothing to the device but the batch.",
            subject=schedule,
            metric="extra_to_device_bytes",
            ceiling=0,
            evidence="batches in pinned memory, copied once; launches carry their arguments",
        ),
        _counted(
            f"pipe-pretend-{schedule}-pageable",
            f"A step of {name} MUST copy nothing to the device from memory that is not pinned.",
            subject=schedule,
            metric="pageable_count",
            ceiling=0,
            evidence="once 3 lists of arguments for each call of a launcher; the control sends lengths",
        ),
        _counted(
            f"pipe-pretend-{schedule}-read",
            f"A step of {name} MUST read back at most two numbers a module and what sizes are made of.",
            subject=schedule,
            metric="to_host_bytes",
            ceiling="2 * 8 * (2 + 3) + 8 * tensor_count",
            evidence="ids outside of tables and the first; three words of a module, and the ids of each feature",
        ),
        _counted(
            f"pipe-pretend-{schedule}-launches",
            f"A step of {name} MUST take at most 167 operators on the device.",
            subject=schedule,
            metric="launch_count",
            ceiling=167,
            evidence="a bound that must not grow; an operator counts once, however many kernels it launches",
        ),
    )


_CALLS = "host-calls-16x20"
_called = partial(
    counter, full=_CALLS, short=_CALLS, test=_CALLS, control="careless", metric="calls_per_table", ceiling=90
)


def _calls(schedule: str, name: str) -> Gate:
    """What a table more costs the host in a step of one schedule."""
    return _called(
        f"pipe-{schedule}-calls",
        f"A table more MUST NOT cost the host more than 90 calls of Python's functions in a step of {name}.",
        subject=schedule,
        evidence="69 here, 339 once, of which a step of 100 tables took half its time on the host; "
        "the control looks for weights as torch does, ten times",
    )


_MIXED = "pretend-mixed-step-8x200"
_mixed = partial(counter, full=_MIXED, short=_MIXED, test=_MIXED, control="careless")


def _counts_of_mixed(schedule: str, name: str) -> tuple[Gate, ...]:
    """The same of collections that mix table-, row-, column-wise and replicated tables."""
    return (
        _mixed(
            f"pipe-pretend-{schedule}-mixed-waits",
            f"In a step of {name} with two modules of mixed plans the host MUST wait for the device at most twice.",
            subject=schedule,
            metric="wait_count",
            ceiling=2,
            evidence="cuts go over all features; sizes for replicated tables come with those of the exchange; 5 once",
        ),
        _mixed(
            f"pipe-pretend-{schedule}-mixed-sent",
            f"A step of {name} with mixed plans MUST send nothing to the device but the batch.",
            subject=schedule,
            metric="extra_to_device_bytes",
            ceiling=0,
            evidence="batches in pinned memory, copied once; what a plan is made of lies there",
        ),
    )


_PLACES = tuple(
    gate
    for schedule, name in (
        ("base", "Base"),
        ("sparse-dist", "SparseDist"),
        ("fused", "Fused"),
        ("semi-sync", "SemiSync"),
    )
    for gate in (*_counts(schedule, name), *_counts_of_mixed(schedule, name), _calls(schedule, name))
)

GATES = (*_TRAINING, *_SCHEDULES, *_KERNELS_ON_GPU, *_PLACES)
