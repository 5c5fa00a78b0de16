"""What must come out of the row store's bench."""

from __future__ import annotations

from functools import partial

from perf.harness.gates import Gate, claim, counter, limit, memory

__all__ = ["GATES"]

_COPIES = "the rate of copies in the same run; the control is the best plain-torch store"
_ONE_BY_ONE = "the rate of copies in the same run; the control asks for one row at a time"
_SORTED_SETS = "the rate of a gather in the same run; the control sorts the ids and gathers the rows in their order"
_SHARED_LOCK = "readers share the lock; the control reads behind one lock"
_SORTED_INSIDE = "both sort inside; the control only sorts, and is slower than that"

# What memory itself can do; the control is the best plain-torch store.
_memory = partial(limit, ceiling=1.5, control="torch", evidence=_COPIES)
_of_torch = partial(claim, peer="torch", ceiling=100.0, control="torch")
_files = partial(limit, ceiling=1.5, filesystem="tmpfs")
_sort_torch = partial(claim, peer="torch", ceiling=50.0, control="torch", evidence="a radix sort by bucket and id")
_rss = partial(memory, metric="rss_growth_bytes")
_map = partial(counter, full="kv-overhead-288-2e6", short="kv-overhead-288-5e5", control="dict")


def _kernel(id: str, what: str, floor: float, *, full: str, copy: str = "on the device") -> Gate:
    """A store on a GPU beside a copy of the bytes that it has to read and write."""
    return limit(
        id,
        f"{what} MUST reach {floor} of the rate of a copy {copy} in the same run.",
        full=full,
        peer="copy",
        floor=floor,
        ceiling=1.2,
        control="four-times",
        hardware=("cuda",),
        evidence="the bytes that the task has to move, once; the control makes four calls",
    )


def _get_copy(id: str, *, full: str, share: float = 0.45, ceiling: float = 1.5) -> Gate:
    sentence = f"Getting rows MUST reach {share:g} of a contiguous copy of the same bytes."
    return _memory(id, sentence, full=full, peer="copy", floor=share, ceiling=ceiling)


_get_memcpy = partial(
    limit,
    sentence="Getting rows MUST reach 0.4 of memcpy by two threads.",
    peer="memcpy",
    floor=0.4,
    ceiling=1.5,
    control="torch",
    evidence=_COPIES,
)
_get_gather = partial(
    limit,
    sentence="Getting rows MUST reach 0.55 of a gather by known position, fetched ahead, by two threads.",
    peer="gather",
    floor=0.55,
    ceiling=1.5,
    control="torch",
    evidence=_COPIES,
)
_set_copy = partial(
    limit,
    sentence="Setting rows that are there MUST reach 0.40 of a copy of the same bytes.",
    peer="copy",
    floor=0.4,
    ceiling=1.5,
    control="torch",
    evidence="the rate of copies in the same run",
)


def _get_torch(row_bytes: int, times: float) -> Gate:
    return _of_torch(
        f"kv-get-{row_bytes}-torch",
        f"Getting rows of {row_bytes} bytes MUST be {times:g} times as fast as the best plain-torch store.",
        full=f"kv-get-{row_bytes}-262144",
        floor=times,
        evidence="11 to 12 times at 544 bytes were measured before the store was written",
    )


def _sort(buckets: int, times: float, *, full: str) -> Gate:
    return claim(
        f"kv-sort-map-{buckets}",
        f"Ids MUST come into the order of {buckets} buckets {times:g} times as fast as through a map "
        "from bucket to list.",
        full=full,
        peer="map",
        floor=times,
        ceiling=100.0,
        control="torch",
        evidence=_SORTED_INSIDE,
    )


def _database(id: str, verb: str, name: str, times: float, *, full: str, peer: str) -> Gate:
    """A database that is not installed leaves its gates undecided."""
    return claim(
        id,
        f"{verb} batches of rows of 288 bytes MUST be {times:g} times as fast as {name}, files in memory.",
        full=full,
        peer=peer,
        floor=times,
        ceiling=1000.0,
        filesystem="tmpfs",
        control="dict",
        evidence="perf/peers/databases.py says how it is used; the control is a Python dictionary",
    )


GATES = (
    # Getting rows, by width and batch.
    _get_copy("kv-get-288-copy", full="kv-get-288-1e6"),
    _get_memcpy("kv-get-288-memcpy", full="kv-get-288-1e6"),
    _get_copy("kv-get-544-copy", full="kv-get-544-1e6"),
    _get_memcpy("kv-get-544-memcpy", full="kv-get-544-1e6"),
    _get_copy("kv-get-1056-copy", full="kv-get-1056-1e6"),
    _get_memcpy("kv-get-1056-memcpy", full="kv-get-1056-1e6"),
    _get_copy("kv-get-zipf-288-copy", full="kv-get-zipf-288-1e6", ceiling=3.0),
    _get_memcpy("kv-get-zipf-288-memcpy", full="kv-get-zipf-288-1e6", ceiling=3.0),
    _get_copy("kv-get-88-copy", full="kv-get-88-1e6", share=0.2),
    _get_copy("kv-get-152-copy", full="kv-get-152-1e6", share=0.35),
    _get_gather(
        "kv-get-288-1e3-gather", full="kv-get-288-1e3", ceiling=3.0, control="one-by-one", evidence=_ONE_BY_ONE
    ),
    _get_gather("kv-get-288-3e4-gather", full="kv-get-288-3e4", control="one-by-one", evidence=_ONE_BY_ONE),
    _get_gather("kv-get-288-1e6-gather", full="kv-get-288-1e6"),
    _get_gather("kv-get-88-gather", full="kv-get-88-1e6"),
    _get_gather("kv-get-152-gather", full="kv-get-152-1e6"),
    _get_gather("kv-get-544-gather", full="kv-get-544-1e6"),
    _get_gather("kv-get-1056-gather", full="kv-get-1056-1e6"),
    _memory(
        "kv-get-small-gather",
        "Getting rows of a small store MUST reach 0.45 of a gather by known position, fetched ahead, by two threads.",
        short="kv-get-288-1e5",
        peer="gather",
        floor=0.45,
        ceiling=3.0,
        control="by-ten",
        evidence="the rate of copies in the same run; the control asks for ten rows at a time",
    ),
    _of_torch(
        "kv-get-small-torch",
        "Getting rows of a small store MUST be 1.5 times as fast as the best plain-torch store.",
        short="kv-get-288-1e5",
        floor=1.5,
        evidence="2.4 times on 2 busy cores",
    ),
    _get_torch(544, 10.0),
    _get_torch(1056, 3.0),
    _get_torch(1552, 3.0),
    # Setting rows.
    _set_copy("kv-set-288-copy", full="kv-set-288-1e6"),
    limit(
        "kv-set-small-copy",
        "Setting a small batch of rows that are there MUST reach 0.1 of a copy of the same bytes.",
        short="kv-set-288-1e5",
        peer="copy",
        floor=0.1,
        ceiling=1.5,
        control="by-ten",
        evidence="0.14 to 0.37 on 2 cores that others used as well; the control makes a call for every ten rows",
    ),
    _set_copy("kv-set-1056-copy", full="kv-set-1056-262144"),
    _memory(
        "kv-set-reserved-copy",
        "Setting new rows after reserve MUST reach 0.25 of a copy of the same bytes.",
        full="kv-set-fresh-288-2e6",
        peer="touched",
        floor=0.25,
        evidence=_SORTED_SETS,
    ),
    _memory(
        "kv-set-fresh-copy",
        "Setting new rows MUST reach 0.5 of a copy into memory that is as fresh.",
        full="kv-set-fresh-288-2e6",
        subject="unreserved",
        peer="fresh",
        floor=0.5,
        evidence=_SORTED_SETS,
    ),
    # Reader threads.
    claim(
        "kv-readers-cache",
        "Two reader threads MUST read 1.6 times as fast as one from a store inside the cache.",
        full="kv-readers-288-5e4",
        peer="one",
        floor=1.6,
        ceiling=2.2,
        control="locked",
        evidence=_SHARED_LOCK,
    ),
    limit(
        "kv-readers-memory",
        "A second reader MUST add 0.9 of what it adds to a gather without locks.",
        full="kv-readers-288-2e6",
        peer="gather",
        metric="shared_seconds",
        floor=0.9,
        ceiling=2.2,
        control="locked",
        evidence=_SHARED_LOCK,
    ),
    # Whole rows to files and back.
    _files(
        "kv-save-plain",
        "A whole-row save MUST reach 0.5 of a plain write of the same bytes.",
        full="kv-save-288-2e6",
        peer="plain",
        floor=0.5,
        control="separate",
        evidence="one pass over the pool in bucket order; the control saves weight, metadata and state apart",
    ),
    _rss(
        "kv-save-memory",
        "A whole-row save MUST NOT take more memory than 64 MiB and 8 bytes for each row.",
        full="kv-save-288-2e6",
        short="kv-save-288-8e5",
        ceiling="64 * 1048576 + 8 * payload_bytes / 288",
        control="gathered",
        evidence="rows pass through bounded chunks; the control gathers all rows first",
    ),
    _files(
        "kv-load-fresh",
        "A whole-row load into an empty store MUST reach 0.5 of a copy into memory that is as fresh.",
        full="kv-load-288-2e6",
        peer="fresh",
        floor=0.5,
        control="applied",
        evidence="each byte is copied twice, from the page cache and into blocks a ninth longer than rows, and ids "
        "come into the map; the control applies the separate form",
    ),
    _rss(
        "kv-load-memory",
        "A whole-row load MUST NOT take more memory than 1.05 of the store, two chunks and 64 MiB.",
        full="kv-load-288-2e6",
        short="kv-load-288-8e5",
        ceiling="1.05 * (payload_bytes * 320 / 288 + 24 * payload_bytes / 288) + 2 * 16777216 + 64 * 1048576",
        control="applied",
        evidence="a row of 288 bytes stands in a block of 320; the control holds the separate form and the store",
    ),
    # Ids into bucket order.
    _sort(100, 4.0, full="kv-sort-1e7"),
    _sort(10000, 6.0, full="kv-sort-1e7-10000"),
    _sort_torch(
        "kv-sort-torch",
        "Ids MUST come into bucket order, sorted inside, twice as fast as torch sorts them.",
        full="kv-sort-1e7",
        floor=2.0,
    ),
    _sort_torch(
        "kv-sort-small-torch",
        "A million ids MUST come into bucket order, sorted inside, 1.5 times as fast as torch sorts them.",
        short="kv-sort-1e6",
        floor=1.5,
    ),
    # Memory of the map from ids to rows.
    _map(
        "kv-map-bytes",
        "Finding a row MUST NOT take more than 24 bytes for each row.",
        metric="map_bytes_per_row",
        ceiling=24,
        evidence="64 bytes for every 10 entries, 40 to 80 % of them used",
    ),
    _map(
        "kv-map-truth",
        "What stats() reports MUST be within 5 % of resident memory.",
        metric="unaccounted_share",
        ceiling=0.05,
        evidence="every allocation that grows with rows is counted; the control forgets its integers",
    ),
    _database("kv-lmdb-get", "Getting", "LMDB", 30.0, full="kv-get-288-databases", peer="lmdb"),
    _database("kv-lmdb-set", "Setting", "LMDB", 30.0, full="kv-set-288-databases", peer="lmdb"),
    _database("kv-rocksdb-get", "Getting", "RocksDB", 60.0, full="kv-get-288-databases", peer="rocksdb"),
    _database("kv-rocksdb-set", "Setting", "RocksDB", 60.0, full="kv-set-288-databases", peer="rocksdb"),
    # A store on a GPU.
    _kernel("kv-gpu-get-256", "Getting rows of 256 bytes on a GPU", 0.5, full="gpu-kernel-get-256"),
    _kernel("kv-gpu-get-1056", "Getting rows of 1056 bytes on a GPU", 0.5, full="gpu-kernel-get-1056"),
    _kernel("kv-gpu-export", "Reading every row of a store on a GPU", 0.6, full="gpu-kernel-export-256"),
    _kernel("kv-gpu-insert", "Setting new rows on a GPU", 0.35, full="gpu-kernel-insert-256"),
    _kernel(
        "kv-gpu-host-rows",
        "Getting rows of 256 bytes from host memory on a GPU",
        0.8,
        full="gpu-kernel-host-256",
        copy="over the link",
    ),
)
