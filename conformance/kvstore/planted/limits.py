"""Faults that ``test_limits`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched, swap

load_counts_from_the_clocks_start = patched(
    "The seconds of a load's checks begin with the clock.",
    mutated("twinproof.kvstore.disk:StoreFiles.load", "checked - started", "checked + started"),
    kills="KV-220",
)

buckets_without_ids = patched(
    "Buckets of no ids are taken.",
    mutated("twinproof.kvstore.rows:Buckets.__post_init__", "1 <= size < 2**63", "0 <= size < 2**63"),
    kills="KV-221",
)

largest_bucket_refused = patched(
    "The largest number of ids in a bucket is refused.",
    mutated("twinproof.kvstore.rows:Buckets.__post_init__", "1 <= size < 2**63", "1 <= size < 2**62"),
    kills="KV-221",
)

absent_states_unnamed = patched(
    "All states are named where some are absent.",
    mutated("twinproof.kvstore.statedict:_incoming", "set(target.state_slots) - set(states)", "target.state_slots"),
    kills="KV-222",
)

first_dimension_is_one = patched(
    "Rows are said to be dimension 1.",
    mutated("twinproof.kvstore.rows:check_row_range", "expected=0", "expected=1"),
    kills="KV-223",
)

last_row_out_of_range = patched(
    "The last row is outside.",
    mutated("twinproof.kvstore.rows:check_row_range", "> row_count", ">= row_count"),
    kills="KV-223",
)

names_of_another_release = patched(
    "Contents have other names, which no delta of an earlier release knows.",
    swap("twinproof.kvstore.deltas:_FACTOR", ~0x61C8864680B583EB),
    kills="KV-224",
)

room_by_count = patched(
    "A load removes what was used least often.",
    mutated("twinproof.kvstore.deltas:evict_for_load", "else words & (2**32 - 1)", "else words // (2**32 - 1)"),
    kills="KV-225",
)

names_of_one_chunk = patched(
    "The rows of one chunk alone are named.",
    mutated("twinproof.kvstore.deltas:digest_rows", "return sum(_digest", "return max(_digest"),
    kills="KV-226",
)

rows_of_other_ranks_told = patched(
    "A view that does not fit is told with its width.",
    mutated(
        "twinproof.kvstore.views:LazyRows.place", "got=(row_offset, self.shape[0])", "got=(row_offset, self.shape[-1])"
    ),
    kills="KV-227",
)

last_place_refused = patched(
    "The last place of a view is refused.",
    mutated("twinproof.kvstore.views:LazyRows.place", "<= global_row_count - self", "< global_row_count - self"),
    kills="KV-227",
)

negative_seeds_end_early = patched(
    "Seeds below the half of the negative ones are refused.",
    mutated("twinproof.kvstore.options:StoreOptions._check", "-(2**63)", "-(2**62)"),
    kills="KV-233",
)

infinite_in_float32 = patched(
    "A learning rate that float32 does not hold is an infinite one.",
    mutated("twinproof.optimizers:Hyper.__post_init__", "abs(self.lr) <= FLOAT32_MAX", "math.isfinite(self.lr)"),
    kills="KV-334",
)

values_are_bytes = patched(
    "Where a range of bytes ends is worked out with the number of its values.",
    mutated("twinproof.kvstore.store:KVStore.place", "begin + raw.shape[1] <=", "begin + values.shape[1] <="),
    kills="KV-376",
)

last_byte_is_not_written = patched(
    "A range of bytes that ends with the row is refused.",
    mutated("twinproof.kvstore.store:KVStore.place", "raw.shape[1] <= layout", "raw.shape[1] < layout"),
    kills="KV-376",
)

ranges_of_memory_unchecked = patched(
    "Where a range of bytes that is read ends is left to whoever reads it.",
    mutated("twinproof.kvstore.rows:RowSource.get_rows", "<= end <= row_bytes", "<= row_bytes"),
    kills="KV-376",
)

columns_are_bytes = patched(
    "Where the columns of a wrapper end is worked out as if each had one byte.",
    mutated("twinproof.kvstore.modules:KVTensorWrapper._range", "self.shape[1] * self.dtype.itemsize", "self.shape[1]"),
    kills="KV-377",
)
rows_of_any_width = patched(
    "A row may be as wide as somebody says.",
    mutated("twinproof.kvstore.options:RowLayout.__post_init__", "if self.row_bytes >= ROW_BYTES_END:", "if False:"),
    kills="KV-423",
)
widest_row_and_one_more = patched(
    "A row of 2**40 bytes is taken, and the store that is made of it says something else.",
    mutated("twinproof.kvstore.options:RowLayout.__post_init__", ">= ROW_BYTES_END", "> ROW_BYTES_END"),
    kills="KV-423",
)
any_buckets_are_expected = patched(
    "A number of buckets that is refused is told that any number is right.",
    mutated("twinproof.kvstore.rows:Buckets.__post_init__", 'f"an int from 1 to {2**31 - 1}"', '"an int >= 1"'),
    kills="KV-423",
)
