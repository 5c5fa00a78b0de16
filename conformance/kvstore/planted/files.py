"""Faults that ``test_files`` must notice."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import torch

from conformance.harness import fault, mutated, patched, swap, wrap
from conformance.kvstore.planted.planting import CHUNKS
from twinproof.errors import TwinproofError
from twinproof.kvstore.disk import SavedRows


def _as_columns(original: Any, rows: torch.Tensor, *chunk_rows: Any) -> Any:
    return original(rows.reshape(-1, 1), *chunk_rows)


def _saved_as_columns(original: Any, files: Any, part: Any) -> Any:
    return {name: value.reshape(value.shape[0], -1) for name, value in original(files, part).items()}


ids_saved_as_a_column = patched(
    "Ids are saved as [N, 1] instead of [N].",
    wrap("fastimpl.kvstore.files:dense_rows", _as_columns),
    wrap("refimpl.kvstore:WholeTensors.tensors", _saved_as_columns),
    kills="KV-100",
)


def _old_parts_cut(original: Any, waiting: Any, saved: Any, parts: range) -> None:
    original(waiting, saved, range(parts.start, parts.stop - (saved.version == 1), parts.step))


def _old_files_cut(original: Any, files: Any, saved: Any, table: str, begin: int, end: int, chunk_rows: int) -> Any:
    for ids, rows in original(files, saved, table, begin, end, chunk_rows):
        kept = ids.numel() - (saved.version == 1)
        yield ids[:kept], rows[:kept]


old_files_lose_a_row = patched(
    "The last row of a version 1 file is not loaded.",
    wrap(CHUNKS, _old_files_cut),
    wrap("fastimpl.kvstore.filling:WaitingRows.read", _old_parts_cut),
    kills="KV-099",
)


@fault(kills="KV-048", at="load")
def load_before_check(original: Any, store: Any, path: Any, **options: Any) -> Any:
    """A load writes rows before it has checked all of them."""
    with suppress(TwinproofError, OSError):
        saved = SavedRows(path)
        for table in saved.tables:
            store.set_rows(table, saved.rows(table, 0, min(1, saved.saved[table].row_count))[1])
    return original(store, path, **options)


newer_version_accepted = patched(
    "Files of a newer version are read as if they were of this one.",
    swap("twinproof.kvstore.deltas:FORMAT_VERSION", 99),
    kills="KV-048",
)


@fault(kills="KV-098", at="save")
def delta_holds_everything(original: Any, store: Any, path: Any, **options: Any) -> Any:
    """A delta holds every row ever written."""
    if options.get("since") is not None:
        options["since"] = 0
    return original(store, path, **options)


@fault(kills="KV-052", at="save")
def path_in_the_file(original: Any, store: Any, path: Any, **options: Any) -> Any:
    """The name of the folder is written into the file."""
    return original(store, path, **(options | {"metadata": {"folder": os.path.basename(os.fspath(path))}}))


@fault(kills="KV-053", at="load")
def single_row_not_loaded(original: Any, store: Any, path: Any, **options: Any) -> Any:
    """A table of one row loads as empty."""
    report = original(store, path, **options)
    for table in store.tables:
        if store.size(table) == 1:
            store.clear(table)
    return report


@fault(kills="KV-101", at="load")
def tables_silently_left_out(original: Any, store: Any, path: Any, **options: Any) -> Any:
    """Tables that only the file has are left out in silence."""
    if options.get("tables") is None:
        options["tables"] = tuple(t for t in store.tables if t in SavedRows(path).tables)
    return original(store, path, **options)


@fault(kills="KV-161", at="twinproof.checkpoint.catalog:Catalog.check_unchanged")
def replaced_files_read(original: Any, catalog: Any, files: Any = None) -> None:
    """Nobody looks whether the files that are read are still those whose headers were read."""


each_reading_of_its_moment = patched(
    "A load opens its files anew for each reading.",
    mutated("twinproof.kvstore.disk:StoreFiles.load", "opened.enter_context(saved.held(names))", "pass"),
    kills="KV-465",
)
held_and_not_read = patched(
    "Files stay open, and others are read by their paths.",
    mutated("twinproof.kvstore.disk:SavedRows.held", 'f"/proc/self/fd/{descriptor}"', "file"),
    kills="KV-465",
)
files_written_over = patched(
    "Nobody looks whether the files were written over while their rows were written.",
    mutated("twinproof.kvstore.disk:StoreFiles.load", "saved.catalog.check_unchanged()\n        known", "known"),
    kills="KV-466",
)
files_are_descriptors = patched(
    "An error of a load names the descriptor in place of the file.",
    mutated("twinproof.kvstore.disk:SavedRows.held", "if path is not None:", "if False:"),
    kills="KV-466",
)
systems_numbers_get_lost = patched(
    "An error of the system in a held file is told as a torn file.",
    mutated("twinproof.kvstore.disk:_said_of", "isinstance(error, OSError)", "False"),
    kills="KV-472",
)
what_went_is_not_missed = patched(
    "Nobody looks whether files are there before they are held.",
    mutated("twinproof.kvstore.disk:SavedRows.held", "catalog.check_unchanged(files)", "pass"),
    kills="KV-472",
)
names_of_descriptors_stay = patched(
    "Behind a load files go by the names of their descriptors.",
    mutated("twinproof.kvstore.disk:SavedRows.held", "self.catalog = catalog", "pass"),
    kills="KV-472",
)


too_few_counted_taken = patched(
    "Counts of buckets that are too small are taken.",
    mutated("twinproof.kvstore.disk:SavedRows._table_of", "int(counts.sum()) != ids[0]", "int(counts.sum()) > ids[0]"),
    kills="KV-235",
)


ids_of_later_buckets_taken = patched(
    "An id that stands before its bucket is found where it is read, not where it stands.",
    mutated("twinproof.kvstore.disk:SavedRows.check_order", "self.buckets) != buckets", "self.buckets) < buckets"),
    kills="KV-239",
)


def _not_looked_at(original: Any, *arguments: Any) -> None:
    return None


rows_at_the_places_of_before = patched(
    "Saved rows that were replaced are read at the places that the ids of before had.",
    wrap("twinproof.checkpoint.catalog:Catalog.check_unchanged", _not_looked_at),
    mutated("twinproof.kvstore.disk:_SavedReader.read", "if not torch.equal(found, expected):", "if False:"),
    kills="KV-278",
)
same_ids_are_the_same_rows = patched(
    "Saved rows are taken for those that were opened where their ids are.",
    wrap("twinproof.checkpoint.catalog:Catalog.check_unchanged", _not_looked_at),
    kills="KV-278",
)

every_form_is_rows = patched(
    "A form that there is not is that of whole rows.",
    mutated("twinproof.kvstore.deltas:read_content", "content.form not in FORMS", "content.form is None"),
    kills="KV-048",
)
exports_that_nobody_loads = patched(
    "A save in the separate form takes a dtype for its files that the layout it tells is not of.",
    mutated(
        "twinproof.kvstore.disk:_check_writer_options",
        '("export_dtype", None)',
        '("export_dtype", options.get("export_dtype"))',
    ),
    kills="KV-347",
)
shards_that_nobody_loads = patched(
    "A save leaves one file of each rank, which is no saved store.",
    mutated("twinproof.kvstore.disk:_check_writer_options", ', ("enable_consolidation", True)', ","),
    kills="KV-347",
)

bytes_behind_the_ids_read = patched(
    "Ids of a saved store are read from its file wherever they are asked for.",
    mutated(
        "twinproof.kvstore.disk:SavedRows.read_ids",
        'check_row_range(0, check_int(start, "start"), check_int(length, "length"), row_count)',
        "pass",
    ),
    kills="KV-351",
)
buckets_counted_from_the_end = patched(
    "Buckets of saved rows that there are not have no rows.",
    mutated("twinproof.kvstore.disk:SavedTable.rows_of", "0 <= begin <= end <= total", "True"),
    kills="KV-351",
)
chunks_refused_late = patched(
    "Chunks of no rows are those of no table.",
    mutated("twinproof.kvstore.disk:SavedRows.between", "_check_chunk(chunk_rows)", "pass"),
    kills="KV-351",
)
sums_not_compared = patched(
    "A load that verifies sums looks only whether there are any.",
    mutated("twinproof.kvstore.disk:StoreFiles.load", "verify_catalog(saved.catalog, path, crc32)", "pass"),
    kills="KV-361",
)
no_sums_are_right = patched(
    "A load that verifies sums takes a save that has none.",
    mutated("twinproof.kvstore.disk:StoreFiles.load", "check_present(saved.catalog, path)", "pass"),
    kills="KV-361",
)
fast_load_verifies_nothing = patched(
    "The fast load forgets that sums are to be verified.",
    mutated("fastimpl.kvstore.files:load", "verify_checksums=verify_checksums", "verify_checksums=False"),
    kills="KV-361",
    of="fastimpl",
)

no_default_of_a_load = patched(
    "A load takes no None in place of the rows of a chunk.",
    mutated(
        "twinproof.kvstore.disk:StoreFiles.load", "LOAD_CHUNK_ROWS if chunk_rows is None else chunk_rows", "chunk_rows"
    ),
    kills="KV-429",
    of="refimpl",
)
held_files_have_the_systems_error = patched(
    "A load that may not hold its files open says what the system says.",
    mutated(
        "twinproof.kvstore.disk:SavedRows.held",
        'with refusals(f"holding {len(files)} files open, as a load does,", file):',
        "if True:",
    ),
    kills="KV-491",
)
reads_of_held_files_have_the_systems_error = patched(
    "A held file that cannot be opened once more is told by its descriptor.",
    mutated("twinproof.kvstore.disk:SavedRows.held", "(CorruptionError, OSError)", "CorruptionError"),
    kills="KV-491",
)
versions_of_any_length = patched(
    "A version is read whatever its length is.",
    mutated("twinproof.kvstore.deltas:read_content", "len(text) > _VERSION_DIGITS", "False"),
    kills="KV-488",
)
content_of_any_depth = patched(
    "Content that is nested too deeply is left to Python.",
    mutated("twinproof.kvstore.deltas:read_content", "(KeyError, ValueError, RecursionError)", "KeyError"),
    kills="KV-488",
)
layouts_of_any_depth = patched(
    "A layout that is nested too deeply is left to Python.",
    mutated(
        "twinproof.kvstore.options:RowLayout.from_json",
        "ValueError, RecursionError)",
        "ValueError)",
    ),
    kills="KV-488",
)
