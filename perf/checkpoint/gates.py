"""What must come out of the checkpoint bench; times only mean something where memory is the disk."""

from __future__ import annotations

from functools import partial

from perf.harness.gates import Gate, claim, counter, limit, memory, regression

__all__ = ["GATES"]

_ANY_CPU = ("cpu", "cpu-1")
_HALVED = "the published floor, halved: what is fixed per save weighs more on a small shape"
_ONE_PASS = "one pass in large blocks against whole tensors in Python"
_WRITTEN_ONCE = "each byte is written once, to its final place; headers and the index are below 1 %"
_BELOW_LIBC = "seen below libc, file by file, whatever the writer says of itself"

# Torch at its defaults, and with the options at which it is fastest; the control is torch itself.
_torch_in_memory = partial(claim, peer="torch", control="torch", filesystem="tmpfs", ceiling=60.0)
_torch_at_its_best = partial(
    claim, subject="ours-best", peer="torch-best", control="torch-best", filesystem="tmpfs", ceiling=60.0
)
# Processes that only move the same bytes.
_plain = partial(limit, peer="plain", ceiling=1.5, filesystem="tmpfs")
_load = partial(claim, peer="torch", control="torch", filesystem="tmpfs", ceiling=20.0)
_open = partial(claim, peer="torch", ceiling=200.0, control="torch")
_growth = partial(memory, metric="rss_growth_bytes", control="torch", hardware=_ANY_CPU)


def _save_times(cut: str, prototype: str) -> tuple[Gate, ...]:
    """Saves of tensors that are sharded by ``cut``, at two sizes, against torch at its defaults and at its best."""
    full, short = f"save-{cut}-2gib", f"save-{cut}-256mib"
    evidence = f"a Python prototype on 2 cores: {prototype} s"
    return (
        _torch_in_memory(
            f"save-{cut}-defaults",
            f"A save with {cut} sharded MUST take at most a sixth of torch's time at its defaults.",
            full=full,
            floor=6.0,
            evidence=evidence,
        ),
        _torch_at_its_best(
            f"save-{cut}-best",
            f"A save with {cut} sharded MUST take at most 1/3.5 of torch's time at its best.",
            full=full,
            floor=3.5,
            evidence=evidence,
        ),
        _torch_in_memory(
            f"save-{cut}-small-defaults",
            f"A small save with {cut} sharded MUST take at most a third of torch's time at its defaults.",
            short=short,
            floor=3.0,
            evidence=_HALVED,
        ),
        _torch_at_its_best(
            f"save-{cut}-small-best",
            f"A small save with {cut} sharded MUST take at most 1/1.75 of torch's time at its best.",
            short=short,
            floor=1.75,
            evidence=_HALVED,
        ),
    )


_write_calls = partial(
    counter,
    hardware=_ANY_CPU,
    sentence="A save MUST take at most one write per 4 MiB of payload, and 8 per rank and file.",
    metric="file_write_calls",
    ceiling="payload_bytes / 4194304 + 8 * rank_count * file_count",
    control="ours-64k",
    evidence=f"blocks of 8 MiB; the control writes blocks of 64 KiB; {_BELOW_LIBC}",
)


def _save_counts(cut: str) -> tuple[Gate, ...]:
    """What a save of tensors that are sharded by ``cut`` does to the files, counted below libc."""
    full, test = f"count-{cut}-256mib", f"count-{cut}-64mib"
    short = test if cut == "rows" else None
    count = partial(counter, hardware=_ANY_CPU, full=full, short=short, test=test)
    return (
        _write_calls(f"save-{cut}-write-calls", full=full, short=short, test=test),
        count(
            f"save-{cut}-file-bytes",
            "All ranks together MUST write at most 1.01 times the payload to the tensor files, and all of it.",
            metric="file_written_bytes",
            floor="payload_bytes",
            ceiling="1.01 * payload_bytes",
            control="torch",
            evidence=f"each byte is written once, to its final place; {_BELOW_LIBC}",
        ),
        count(
            f"save-{cut}-shared-pages",
            "No two ranks MUST write to the same 4 KiB of a file.",
            metric="shared_page_count",
            ceiling=0,
            control="plain",
            evidence="owners' borders are aligned; the control writes each rank's runs where they lie",
        ),
        count(
            f"save-{cut}-mappings",
            "A save MUST NOT store through a mapping of a file.",
            metric="store_mapping_count",
            ceiling=0,
            control="mapped",
            evidence="a fault in a mapping is a signal, not an error",
        ),
    )


_written = partial(counter, hardware=_ANY_CPU, metric="written_bytes", floor="payload_bytes", control="torch")
_read_bytes = partial(
    counter,
    hardware=_ANY_CPU,
    sentence="All ranks together MUST read at most 1 MiB during a save.",
    metric="read_bytes",
    ceiling=1_048_576,
    control="torch",
    evidence="nothing that was written is read back",
)

_SAVES = (
    *_save_times("rows", "1.0-1.5 s against 9.4 and 4.3-4.8"),
    # The short form saves rows: columns would take its minute once more. The first two are of the full form.
    *_save_times("columns", "1.6-1.9 s against 13.5 and 7.1")[:2],
    _plain(
        "save-rows-plain",
        "A save MUST reach 0.6 of what two processes reach that only write the same ranges.",
        full="save-rows-2gib",
        floor=0.6,
        control="torch",
        evidence="a Python prototype: 1.0-1.5 s against 0.7 s",
    ),
    _plain(
        "save-rows-small-plain",
        "A small save MUST reach 0.3 of what two processes reach that only write the same ranges.",
        short="save-rows-256mib",
        floor=0.3,
        control="torch",
        evidence=_HALVED,
    ),
    _torch_in_memory(
        "save-4-byte-runs",
        "A save with runs of 4 bytes MUST be 100 times as fast as torch's.",
        full="save-4-byte-runs-64mib",
        floor=100.0,
        ceiling=5000.0,
        evidence="torch merges such runs at 2 MiB/s",
    ),
    _written(
        "save-rows-written",
        "All ranks together MUST write at most 1.01 times the payload.",
        full="save-rows-2gib",
        short="save-rows-256mib",
        test="save-rows-64mib",
        ceiling="1.01 * payload_bytes",
        evidence=_WRITTEN_ONCE,
    ),
    _written(
        "save-columns-written",
        "All ranks together MUST write at most 1.01 times the payload to files and sockets, "
        "besides what they exchange.",
        full="save-columns-2gib",
        test="save-columns-64mib-1-file",
        ceiling="1.01 * payload_bytes * (2 - 1 / rank_count)",
        evidence=f"{_WRITTEN_ONCE}; the kernel counts sockets too, over which a rank sends all but its own share",
    ),
    _read_bytes("save-rows-read", full="save-rows-2gib", short="save-rows-256mib", test="save-rows-64mib"),
    _read_bytes("save-columns-read", full="save-columns-2gib", test="save-columns-64mib-1-file"),
    *_save_counts("rows"),
    *_save_counts("columns"),
    _write_calls("save-4-byte-runs-write-calls", full="count-4-byte-runs-64mib", test="count-4-byte-runs-2mib"),
    _growth(
        "save-memory",
        "A save MUST NOT grow a rank by more than 64 MiB and one row block.",
        full="save-columns-256mib-1-file",
        test="save-columns-256mib-1-file",
        ceiling="64 * 1048576 + 8 * 1048576",
        evidence="bounded blocks in flight, 8 MiB each",
    ),
    _growth(
        "save-memory-4x",
        "At four times the model, a save MUST NOT grow a rank by more than 64 MiB more, "
        "which is what may be in flight.",
        full="save-columns-256mib-1-file",
        test="save-columns-256mib-1-file",
        against={"full": "save-columns-64mib-1-file", "test": "save-columns-64mib-1-file"},
        ceiling="64 * 1048576",
        evidence="a model smaller than what may be in flight holds as little as a block, on a busy machine; "
        "torch adds 192 MiB",
    ),
)


def _load_time(cut: str) -> Gate:
    return _load(
        f"load-{cut}",
        f"A load of {cut} into preallocated tensors MUST be 1.3 times as fast as torch's.",
        full=f"load-{cut}-2gib",
        floor=1.3,
        evidence="torch copies through a map",
    )


_LOADS = (
    _load_time("rows"),
    _plain(
        "load-rows-plain",
        "A load MUST reach 0.8 of what two processes reach that only read the same ranges.",
        full="load-rows-2gib",
        floor=0.8,
        control="by-page",
        evidence="the kernel's copy out of the page cache is all there is to do; the control reads a page per call",
    ),
    _load_time("columns"),
    _load(
        "load-rows-small",
        "A small load into preallocated tensors MUST reach 0.85 of the speed of torch's.",
        short="load-rows-256mib",
        floor=0.85,
        control="by-512",
        evidence="a load through DCP whose reader only reads is as fast as torch's: 0.92 to 1.07 in four idle runs",
    ),
    _plain(
        "load-rows-small-plain",
        "A small load MUST reach 0.85 of a load through DCP whose reader only reads the same ranges.",
        short="load-rows-256mib",
        peer="plain-dcp",
        floor=0.85,
        control="by-512",
        evidence="0.91 to 0.99 in seven idle runs; the control reads 512 bytes per call, and was refused at 0.33",
    ),
    _growth(
        "load-memory",
        "A load into preallocated tensors MUST NOT grow a rank by more than 64 MiB.",
        full="load-rows-2gib",
        test="load-rows-256mib-1-file",
        ceiling="64 * 1048576",
        evidence="reads go into the caller's memory; torch maps the file",
    ),
)


# The name of a contender, its package, how it reads.
_LOADERS = (
    ("safetensors", "safetensors' load_file", "its load_file with backend pread, one thread"),
    ("fastsafetensors", "fastsafetensors", "its file loader without GDS, with as many threads as ours"),
    ("runai", "runai-model-streamer", "its streamer, with as many threads as ours"),
)
_PREDICTION = (
    "predicted from the least there is to do: both copy each byte once out of the page cache, at the bandwidth of the "
    "kernel's copy, so that a peer with as many threads can be equalled and one with a thread is slower"
)


def _fresh_loads(peer: str, name: str, how: str) -> tuple[Gate, ...]:
    """Loads into memory that the load makes, of one file and of many, against one library."""
    fresh = partial(claim, peer=peer, control="by-128", filesystem="tmpfs", ceiling=20.0)
    return (
        fresh(
            f"load-file-{peer}",
            f"A load of one file into fresh memory MUST NOT be slower than {name}.",
            full="load-1-file-512mib",
            short="load-1-file-64mib",
            floor=1.0,
            evidence=f"{how}; {_PREDICTION}",
        ),
        fresh(
            f"load-files-{peer}",
            f"A load of 32 files into fresh memory MUST be faster than {name}.",
            full="load-32-files-512mib",
            floor=1.0,
            evidence=f"{how}; {_PREDICTION}; one plan for all files",
        ),
    )


_FRESH_LOADS = (
    *(gate for loader in _LOADERS for gate in _fresh_loads(*loader)),
    limit(
        "load-file-plain",
        "A load of one file into fresh memory MUST reach 0.7 of one thread that only reads its bytes.",
        full="load-1-file-512mib",
        peer="plain",
        floor=0.7,
        ceiling=3.0,
        control="by-128",
        filesystem="tmpfs",
        evidence="the same copy by two threads, with a header to read; the control reads 128 bytes per call",
    ),
    limit(
        "load-file-mapped",
        "A load of one file into fresh memory MUST reach 0.1 of a map whose pages are touched.",
        full="load-1-file-512mib",
        peer="mapped",
        floor=0.1,
        ceiling=2.0,
        control="by-128",
        filesystem="tmpfs",
        evidence="a map copies nothing of what lies in the page cache, and each page when it is written to; one fault "
        "for 16 pages costs a quarter of their copy",
    ),
)

_QUANTIZED = (
    claim(
        "quantized-fp8",
        "A load of e4m3 in blocks of 128 x 128 MUST take at most a tenth of torch's time.",
        full="load-fp8-112mib",
        peer="torch",
        floor=10.0,
        ceiling=200.0,
        control="torch",
        filesystem="tmpfs",
        evidence="torch multiplies block by block in Python, ours in one pass in the core's cache",
    ),
    claim(
        "quantized-fp8-small",
        "A small load of e4m3 in blocks of 128 x 128 MUST take at most a fifth of torch's time.",
        short="load-fp8-14mib",
        peer="torch",
        floor=5.0,
        ceiling=200.0,
        control="torch",
        filesystem="tmpfs",
        evidence="the published floor, halved: what is fixed per load weighs more on a small shape",
    ),
    limit(
        "quantized-mxfp4",
        "A load of MXFP4 MUST reach 0.2 of a copy of the bytes that come out.",
        full="load-mxfp4-112mib",
        peer="plain",
        floor=0.2,
        ceiling=3.0,
        control="reference",
        filesystem="tmpfs",
        evidence="an eighth of the bytes is read, all are written once; torch 2.13 fills only a part of such a tensor",
    ),
    limit(
        "quantized-mxfp4-small",
        "A small load of MXFP4 MUST reach a tenth of a copy of the bytes that come out.",
        short="load-mxfp4-28mib",
        peer="plain",
        floor=0.1,
        ceiling=3.0,
        control="reference",
        filesystem="tmpfs",
        evidence="the bound, halved: torch's own load in a group takes 3 ms, twice as long as this copy",
    ),
)


def _consolidations(cut: str, times: float) -> tuple[Gate, ...]:
    """Consolidating a folder of shards that torch wrote, half as many times as fast where it is small."""
    return (
        _torch_in_memory(
            f"consolidate-{cut}-defaults",
            f"Consolidating a shard folder of {cut} MUST be {times:g} times as fast as torch's at its defaults.",
            full=f"consolidate-{cut}-2gib",
            floor=times,
            evidence=_ONE_PASS,
        ),
        _torch_at_its_best(
            f"consolidate-{cut}-best",
            f"Consolidating a shard folder of {cut} MUST be {times:g} times as fast as torch's at its best.",
            full=f"consolidate-{cut}-2gib",
            floor=times,
            evidence=_ONE_PASS,
        ),
        _torch_at_its_best(
            f"consolidate-{cut}-small",
            f"Consolidating a small shard folder of {cut} MUST be {times / 2:g} times as fast as torch's at its best.",
            short=f"consolidate-{cut}-256mib",
            floor=times / 2,
            evidence=_HALVED,
        ),
    )


_FOLDERS = (
    *_consolidations("rows", 3.0),
    _plain(
        "consolidate-rows-plain",
        "Consolidating rows with one thread MUST reach 0.95 of a plain copy of the same bytes.",
        full="consolidate-rows-2gib",
        floor=0.95,
        ceiling=2.5,
        control="by-page",
        evidence="the system copies each byte once, from page cache to fresh pages, and a plain copy twice, through "
        "memory in the cache; the control copies a page per call",
    ),
    # As for saves: the first is of the full form.
    *_consolidations("columns", 5.0)[:1],
    _open(
        "open",
        "Opening 2000 tensors in 64 files MUST take at most a fifth of torch's time.",
        full="open-2000x64",
        floor=5.0,
        evidence="torch takes 5 s",
    ),
    _open(
        "open-small",
        "Opening 500 tensors in 16 files MUST take at most half of torch's time.",
        short="open-500x16",
        floor=2.0,
        evidence="the published floor, for a shape where little repeats",
    ),
)


def _plan_time(ranks: int, *, full: str, short: str | None = None) -> Gate:
    return claim(
        f"plan-{ranks}-time",
        f"What is added to torch's planning of 1000 tensors on {ranks} ranks MUST NOT take longer than it.",
        full=full,
        short=short,
        subject=f"ours@{ranks}",
        peer=f"torch@{ranks}",
        floor=1.0,
        ceiling=50.0,
        control=f"torch-pickled@{ranks}",
        evidence="the control also pickles every plan, which costs more than planning it",
    )


def _plan_growth(id: str, ranks: int, fewer: int, *, full: str, short: str | None = None) -> Gate:
    return claim(
        id,
        f"Planning MUST be linear in ranks: an item at {ranks} ranks costs at most twice one at {fewer}.",
        full=full,
        short=short,
        subject=f"ours@{ranks}",
        peer=f"ours@{fewer}",
        metric="seconds_per_item",
        floor=0.5,
        ceiling=4.0,
        control="quadratic@64",
        control_peer="quadratic@8",
        evidence="the control looks through all items once per rank",
    )


def _plan_bytes(ranks: int, *, full: str, short: str | None = None, test: str | None = None) -> Gate:
    return counter(
        f"plan-{ranks}-bytes",
        f"What ranks send for a plan on {ranks} ranks MUST be at most a fifth of torch's pickled plans.",
        full=full,
        short=short,
        test=test,
        subject=f"ours@{ranks}",
        peer=f"torch@{ranks}",
        metric="plan_bytes",
        ceiling=0.2,
        control=f"torch@{ranks}",
        hardware=_ANY_CPU,
        evidence="packed integers against pickled objects",
    )


_PLANS = (
    _plan_time(8, full="plan-1000", short="plan-1000"),
    _plan_time(64, full="plan-1000", short="plan-1000"),
    _plan_time(512, full="plan-1000-large"),
    _plan_growth("plan-linear", 64, 8, full="plan-1000", short="plan-1000"),
    _plan_growth("plan-linear-512", 512, 64, full="plan-1000-large"),
    _plan_bytes(64, full="plan-1000", short="plan-1000", test="plan-200"),
    _plan_bytes(512, full="plan-1000-large"),
)


def _scale(placement: str, *, full: str | None = None, short: str | None = None) -> tuple[Gate, ...]:
    """What the plan of a large model says, against the formula in ``docs/checkpoint.md``."""
    ours, formula = f"ours@{placement}", f"formula@{placement}"
    count = partial(counter, hardware=_ANY_CPU, subject=ours, full=full, short=short, test=short)
    return (
        count(
            f"plan-{placement}-balance",
            "The busiest rank MUST NOT write more than 1.2 times what a rank writes on average.",
            metric="max_over_mean",
            floor=1,
            ceiling=1.2,
            control=f"rank0@{placement}",
            evidence="stages hold one layer more or less; the control lets one rank write",
        ),
        count(
            f"plan-{placement}-exchanged",
            "Ranks MUST NOT exchange more bytes than the formula says.",
            peer=formula,
            metric="exchanged_bytes",
            floor=0.4,
            ceiling=1,
            control=f"rank0@{placement}",
            evidence="runs of half a block or more stay; of a shared block, all but its owner's part moves",
        ),
        count(
            f"plan-{placement}-files",
            "A save MUST NOT make more files than the formula says.",
            peer=formula,
            metric="file_count",
            floor=0.4,
            ceiling=1,
            control=f"torch@{placement}",
            evidence="a file is closed when the next tensor does not fit; the control makes a file per rank as well",
        ),
        count(
            f"plan-{placement}-bytes",
            "Planning MUST NOT send more bytes, up and down, than the formula says.",
            peer=formula,
            metric="plan_bytes",
            floor=0.1,
            ceiling=1,
            control=f"torch@{placement}",
            evidence="packed integers; the control pickles items",
        ),
    )


def _scale_growth(id: str, subject: str, peer: str, *, full: str | None = None, short: str | None = None) -> Gate:
    return claim(
        id,
        f"Planning MUST be linear: a chunk of {subject} costs at most twice one of {peer}.",
        full=full,
        short=short,
        subject=f"ours@{subject}",
        peer=f"ours@{peer}",
        metric="cpu_seconds_per_chunk",
        floor=0.5,
        ceiling=4.0,
        control="quadratic@pp2-fsdp8-tp4",
        control_peer="quadratic@fsdp4-tp2",
        evidence="the control looks through all items once per rank",
    )


_AT_SCALE = (
    *_scale("pp8-ep8-fsdp8", full="scale-512"),
    *_scale("pp4-fsdp16-tp8", full="scale-512"),
    *_scale("pp2-ep4-fsdp8", short="scale-64"),
    *_scale("pp2-fsdp8-tp4", short="scale-64"),
    _scale_growth("plan-scale-linear-512", "pp4-fsdp16-tp8", "pp2-fsdp8-tp4", full="scale-linear-512"),
    _scale_growth("plan-scale-linear", "pp2-fsdp8-tp4", "fsdp4-tp2", short="scale-linear-64"),
)


def _regression(what: str, *, full: str, short: str | None = None) -> Gate:
    """From one run to the next, for ``bench compare``."""
    return regression(
        f"{what}-regression",
        f"Against torch, {what} MUST NOT become slower by more than 10 %.",
        full=full,
        short=short,
        peer="torch",
        floor=0.9,
        control="torch",
        evidence="ratios of paired runs move by a few percent between runs of the same code",
    )


_REGRESSIONS = (
    _regression("save-rows", full="save-rows-2gib", short="save-rows-256mib"),
    _regression("save-columns", full="save-columns-2gib"),
    _regression("load", full="load-rows-2gib"),
    _regression("consolidate", full="consolidate-columns-2gib"),
    _regression("open", full="open-2000x64", short="open-500x16"),
)

_ON_GPU = (
    limit(
        "checkpoint-gpu-stage-rate",
        "A save MUST bring tensors of a GPU to the host at 0.8 of one pinned copy of the same run.",
        full="checkpoint-gpu-stage-1gib",
        peer="copy",
        floor=0.8,
        ceiling=1.2,
        control="loop",
        hardware=("cuda",),
        evidence="two pinned buffers, of which one is always on its way; the control is a pageable loop of .to",
    ),
)

GATES = (*_SAVES, *_LOADS, *_FRESH_LOADS, *_QUANTIZED, *_FOLDERS, *_PLANS, *_AT_SCALE, *_REGRESSIONS, *_ON_GPU)
