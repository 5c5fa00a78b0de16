"""Faults that ``test_seldom_files`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_CATALOG = "twinproof.checkpoint.catalog"
_FORMAT = "twinproof.checkpoint.format"
_PUBLISH = "twinproof.checkpoint.publish"
_READ = "fastimpl.checkpoint.readio"
_BLOCK = "fastimpl.checkpoint.blockio"

any_pieces_make_a_sum = patched(
    "Whatever pieces there are make the sum of a tensor.",
    mutated(f"{_CATALOG}:sums_of", "[part[2:4] for part in pieces] != [(0, size_bytes)]", "not pieces"),
    kills="CKPT-776",
)
last_sum_counts = patched(
    "Of bytes that were summed twice the last sum counts.",
    mutated(f"{_CATALOG}:sums_of", "for part in pieces] != [", "for part in pieces[-1:]] != ["),
    kills="CKPT-776",
)
empty_pieces_count = patched(
    "A piece without bytes takes the place of one with bytes.",
    mutated(f"{_CATALOG}:sums_of", " for part in parts if part.size_bytes", " for part in parts"),
    kills="CKPT-776",
)
names_need_folders = patched(
    "A file cannot be written to a name without a folder.",
    mutated(f"{_PUBLISH}:write_file", 'os.path.dirname(path) or "."', "os.path.dirname(path)"),
    kills="CKPT-777",
)
all_errors_are_of_files = patched(
    "Whatever fails is told as an error of the file system.",
    mutated(
        f"{_PUBLISH}:write_file", "if isinstance(error, OSError) and not isinstance(error, TwinproofError):", "if True:"
    ),
    kills="CKPT-777",
)
working_folder_needed = patched(
    "A save fails where the working folder is gone.",
    mutated(f"{_PUBLISH}:_works_in", "except FileNotFoundError:", "except ():"),
    kills="CKPT-777",
)
links_followed = patched(
    "What a copied link leads to is synced.",
    mutated("twinproof.checkpoint.trees:Others._second", "if stat.S_ISREG(status.st_mode):", "if True:"),
    kills="CKPT-778",
)
any_refusal_is_copied = patched(
    "Files are copied whatever keeps them from a second name.",
    mutated("twinproof.checkpoint.trees:Others._second", "if error.errno not in _NO_LINK:", "if False:"),
    kills="CKPT-778",
)
cut_headers_parsed = patched(
    "A header that was cut short while it was read is parsed.",
    mutated(f"{_FORMAT}:read_header", "if len(raw) != length:", "if False:"),
    kills="CKPT-779",
)
no_tensors_no_file = patched(
    "A state without tensors that is split by size has no file.",
    mutated(
        "twinproof.checkpoint.plan:assign_files", "parse_size(max_shard_size)) or [[]]", "parse_size(max_shard_size))"
    ),
    kills="CKPT-780",
)
bare_errors_of_reads = patched(
    "A read that fails is an error without a file.",
    mutated(f"{_READ}:read_exactly", "except OSError as error:", "except () as error:"),
    kills="CKPT-785",
    of="fastimpl",
)
failing_columns_are_short = patched(
    "A read of columns that fails passes.",
    mutated(f"{_READ}:_fill_by_window", "if status > 0:", "if False:"),
    kills="CKPT-785",
    of="fastimpl",
)
bare_errors_of_opening = patched(
    "A file that cannot be opened is an error that does not say what failed.",
    mutated(f"{_READ}:_File.opened", "except OSError as error:", "except () as error:"),
    kills="CKPT-785",
    of="fastimpl",
)
bare_errors_of_merges = patched(
    "An input that cannot be opened is an error that does not say what failed.",
    mutated("fastimpl.checkpoint.consolidate:_Inputs.descriptor", "except OSError as error:", "except () as error:"),
    kills="CKPT-786",
    of="fastimpl",
)
probe_fails_a_save = patched(
    "A save fails where files have no random access.",
    mutated("fastimpl.checkpoint.writer:_has_random_access", "if error.errno in _NO_RANDOM_ACCESS:", "if False:"),
    kills="CKPT-787",
    of="fastimpl",
)
writes_of_nothing_pass = patched(
    "A write of nothing passes for one of everything.",
    mutated(
        f"{_BLOCK}:write_at",
        'raise OSError(errno.EIO, "the file system wrote nothing")',
        "break",
    ),
    kills="CKPT-787",
    of="fastimpl",
)
threads_need_no_start = patched(
    "A thread that does not start is passed over.",
    mutated(
        "fastimpl.checkpoint.run:Runner.run",
        "        self._fail(error)\n    self._rounds",
        "        pass\n    self._rounds",
    ),
    kills="CKPT-788",
    of="fastimpl",
)
memory_is_not_needed = patched(
    "Copies that get no memory are passed over.",
    mutated("fastimpl.checkpoint.run:Runner._stage", "self._fail(error)", "pass"),
    kills="CKPT-788",
    of="fastimpl",
)
no_scratch_is_passed_over = patched(
    "A thread that gets no memory for its writes is passed over.",
    mutated("fastimpl.checkpoint.run:Runner._work", "self._fail(error)", "pass"),
    kills="CKPT-788",
    of="fastimpl",
)
a_call_for_each_tensor = patched(
    "A block of many tensors is written in several calls.",
    mutated(f"{_BLOCK}:_zero_copy", "len(large) > _IOV_MAX // 2 or ", ""),
    kills="CKPT-789",
    of="fastimpl",
)
exchange_is_everywhere = patched(
    "A save fails where the system has no exchange of folders.",
    mutated(f"{_PUBLISH}:_exchange", "if renameat2 is None:", "if False:"),
    kills="CKPT-793",
)
gaps_are_written = patched(
    "A block with a gap is written.",
    mutated(f"{_BLOCK}:assemble", "if filled != size_bytes:", "if False:"),
    kills="CKPT-794",
    of="fastimpl",
)
gaps_are_merged = patched(
    "A merge writes a block with a gap.",
    mutated("fastimpl.checkpoint.consolidate:_MergePlan.pieces", "if filled != block.end - block.start:", "if False:"),
    kills="CKPT-794",
    of="fastimpl",
)
merges_always_sync = patched(
    "What is merged is synced though nobody asked for it.",
    mutated("fastimpl.checkpoint.consolidate:merge", "folder.durable and not failures", "not failures"),
    kills="CKPT-794",
    of="fastimpl",
)
vanished_files_end_a_look = patched(
    "A file that vanishes ends the look at leftovers.",
    mutated(f"{_PUBLISH}:_changed_s", "except FileNotFoundError:", "except ():"),
    kills="CKPT-799",
)
vanished_files_are_old = patched(
    "A save whose file vanishes counts as one that ended long ago.",
    mutated(f"{_PUBLISH}:_changed_s", "return time.time()", "return 0.0"),
    kills="CKPT-799",
)
no_shards_of_nothing = patched(
    "Shards of a state without tensors are a folder without files.",
    mutated("twinproof.checkpoint.shards:write_shards", "{1: []} if is_needed else {}", "{}"),
    kills="CKPT-812",
)
shards_of_nothing_everywhere = patched(
    "The first rank writes a file without tensors, also beside others with some.",
    mutated(
        "twinproof.checkpoint.dcp:HuggingFaceStorageWriter._written",
        "self.arrangement is not None and not self.arrangement.tensors",
        "self.rank == 0",
    ),
    kills="CKPT-812",
)
errors_of_other_files = patched(
    "What comes of another file under a name is an error of whatever was being done with it.",
    mutated(f"{_PUBLISH}:reading", "except Exception as error:", "except () as error:"),
    kills="CKPT-813",
    of="refimpl",
)
any_error_is_of_a_file = patched(
    "An error of the system is told as one of a file that is read, whatever it is of.",
    mutated(f"{_PUBLISH}:reading", " and error.filename in files", ""),
    kills="CKPT-813",
)
links_replaced = patched(
    "A link is replaced by the file, and what it names stays as it was.",
    mutated("twinproof.checkpoint.shards:save_file", "if os.path.islink(path):", "if False:"),
    kills="CKPT-840",
)
pipes_replaced = patched(
    "A pipe or a device is replaced by a file.",
    mutated("twinproof.checkpoint.shards:save_file", "if os.path.exists(path) and", "if False and"),
    kills="CKPT-840",
)
permissions_forgotten = patched(
    "A new file may be read by whoever could not read the old one.",
    mutated("twinproof.checkpoint.publish:write_file", "take_after(temporary, path)", "os.chmod(temporary, 0o644)"),
    kills="CKPT-840",
)
