"""Faults that ``test_begun_anew`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_LOAD, _NOTE = "twinproof.kvstore.disk:StoreFiles.load", "twinproof.kvstore.deltas:note_load"
_WRITE = "twinproof.kvstore.disk:_Load.write"

others_stay = patched(
    "A load that is to clear leaves other rows.",
    mutated(_WRITE, "self.store.delete(table, present[~torch.isin(present, ids)].contiguous())", "pass"),
    kills="KV-456",
)
what_went_is_not_told = patched(
    "A load that clears tells only of rows that went when all were written.",
    mutated(
        _WRITE,
        "self.store.delete(table, present[~torch.isin(present, ids)].contiguous())",
        "other_count = self.store.delete(table, present[~torch.isin(present, ids)].contiguous())",
    ),
    kills="KV-456",
)
cleared_parts_count = patched(
    "A part that a load has cleared away counts as loaded.",
    mutated(_LOAD, "asked if clear else ", ""),
    kills="KV-459",
)
deltas_clear = patched(
    "A delta with clear=True is loaded, and clears.",
    mutated(_LOAD, 'clear and saved.kind != "full"', "False"),
    kills="KV-459",
)
last_table_alone = patched(
    "Of tables that are loaded one after the other the last one alone is a base.",
    mutated(_NOTE, "_is_unchanged(store, table, mark)", "False"),
    kills="KV-457",
)
written_tables_are_bases = patched(
    "A table that was written to stays what it was loaded from.",
    mutated("twinproof.kvstore.deltas:_is_unchanged", "changed.numel() == removed.numel() == 0", "True"),
    kills="KV-457",
)
parts_count_for_all = patched(
    "A part of a base counts for all of it when another table is loaded.",
    mutated(
        "twinproof.kvstore.deltas:Fingerprints.carry",
        "self.note(to, {table: name}, part)",
        "self.note(to, {table: name})",
    ),
    kills="KV-457",
)
