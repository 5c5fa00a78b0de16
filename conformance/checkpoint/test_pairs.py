"""Every two options, and every option with every kind of input and of place: what one option does may undo another.

What a case must give is put together from what each of its options means alone: files are the safetensors library's,
with metadata and padding set into their headers here; values are torch's own conversions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from conformance.checkpoint.cases import CHECKSUMS_KEY, INDEX, assert_same_json, sums_of
from conformance.checkpoint.paired import (
    NOTES,
    USER,
    Case,
    Here,
    assert_files,
    content,
    damaged,
    files_in,
    grouped,
    header_of,
    index_of,
    library_file,
    make_folder,
)
from conformance.checkpoint.paired_loads import DAMAGED, READER, REFUSED, is_loadable, is_possible, load_case
from conformance.checkpoint.paired_saves import (
    ALONE,
    WRITER,
    is_allowed,
    kinds,
    refusal,
    refuse_save,
    refused_saves,
    save_case,
)
from conformance.harness import (
    Rank,
    assert_equal,
    assert_same_bytes,
    assert_same_tensor,
    pairs_of,
    raises,
    requirement,
    succeeds,
)
from twinproof.errors import CorruptionError, DistributedError, PlanError


def _save_cases(rank: Rank, root: str, cases: list[tuple[int, Case]]) -> None:
    """Cases of several ranks, and what is refused there."""
    here = Here.of(rank)
    new = dist.new_group(backend="gloo")
    groups = {"none": None, "default": dist.group.WORLD, "new": new}
    for number, case in cases:
        folder = Path(root) / f"{number}"
        if rank.rank == 0:
            folder.mkdir()
        dist.barrier()
        refuse_save(here, case, folder) if refusal(case) else save_case(here, case, folder, groups)
    dist.destroy_process_group(new)


@requirement(
    "CKPT-648",
    "Every two options of the writer and of its planner MUST hold together, for every kind of tensor, on one rank and "
    "on two, in a first and in a second save of one writer; what excludes each other MUST be refused by name and leave "
    "nothing.",
)
def test_saves(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    tables = [pairs_of(table, allowed=is_allowed) for table in (WRITER, ALONE)]
    cases = list(enumerate([*tables[0], *tables[1], *refused_saves()]))
    on_ranks = [(number, case) for number, case in cases if case["world"] == 2]
    rank_pool.run(_save_cases, 2, str(tmp_path), on_ranks, timeout_s=300)
    here = Here(checkpoint)
    for number, case in cases:
        if case["world"] == 1:
            folder = tmp_path / f"{number}"
            folder.mkdir()
            refuse_save(here, case, folder) if refusal(case) else save_case(here, case, folder, {"none": None})


def _made(case: Case, folder: Path) -> Path:
    stated = content(1) if case["sums"] else None
    state = damaged(content(1), case["damage"])
    return make_folder(folder, case["form"], state, stated, case["user"], case["aligned"])


def _load_cases(rank: Rank, cases: list[tuple[Case, str]], decoy: str) -> None:
    here = Here.of(rank)
    for case, path in cases:
        load_case(here, {**case, "world": 2}, Path(path), Path(decoy))


@requirement(
    "CKPT-649",
    "Every two options of the readers, kinds of targets and forms of checkpoints MUST hold together, on one rank and "
    "on two, in a first load and in a later one; what is refused MUST be refused by name and leave every target as it "
    "was.",
)
def test_loads(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    decoy = make_folder(tmp_path / "decoy", "index", content(2), content(2), None, False)
    usual = {name: values[0] for name, values in READER.items()}
    sound = pairs_of(READER, allowed=is_loadable)
    refused = [{**usual, **case} for case in pairs_of(REFUSED) if not is_loadable({**usual, **case})]
    chosen = [*sound, *refused, *pairs_of(DAMAGED, allowed=is_possible)]
    cases = [(case, str(_made(case, tmp_path / f"{number}"))) for number, case in enumerate(chosen)]
    # What is made of damaged bytes is each rank's own business.
    rank_pool.run(_load_cases, 2, cases[: len(sound) + len(refused)], str(decoy), timeout_s=300)
    for case, path in cases:
        load_case(Here(checkpoint), {**case, "world": 1}, Path(path), decoy)


MERGE: dict[str, Sequence[Any]] = {
    "form": ("shards", "torch's shards", "index", "no index"),
    "sums": (False, True),
    "damage": (None, "h"),
    "mapping": (None, "two", "one short"),
    "num_threads": (1, 3),
    "user": (None, USER),
    "aligned": (False, True),
    "place": ("new", "over", "same"),
    "how": ("alone", "on every rank", "in a group"),
}


def _merge(here: Here, case: Case, source: Path, target: Path, group: Any) -> None:
    mapping = _mapping(case)
    if mapping is not None and case["mapping"] == "one short":
        del mapping["w"]
    options = {"fqn_to_index_mapping": mapping, "num_threads": case["num_threads"]}
    if case["how"] != "alone":
        group = group if case["how"] == "in a group" else None
        here.checkpoint.consolidate_safetensors_files_on_every_rank(source, target, process_group=group, **options)
    elif here.rank == 0:
        here.checkpoint.consolidate_safetensors_files(source, target, **options)


def _mapping(case: Case) -> dict[str, int] | None:
    return None if case["mapping"] is None else {name: 1 + number % 2 for number, name in enumerate(content(1))}


def _is_left_alone(case: Case) -> bool:
    """A final folder that is to become itself is looked through, and that is all."""
    return case["place"] == "same" and "shards" not in case["form"]


def _refused_merge(case: Case) -> tuple[type[Exception], str] | None:
    if case["mapping"] == "one short" and not _is_left_alone(case):
        return PlanError, "names without a file index"
    if case["damage"] and case["sums"]:
        return CorruptionError, "do not agree with their checksums"
    return None


def _merge_case(here: Here, case: Case, source: Path, group: Any) -> None:
    where = ", ".join(f"{name}: {value}" for name, value in case.items())
    target = source if case["place"] == "same" else source.with_name(f"{source.name} merged")
    before, inputs = files_in(target), files_in(source)
    here.everyone(None)
    refused, is_asked = _refused_merge(case), case["how"] != "alone" or here.rank == 0
    if refused is not None and is_asked:
        # Where one rank alone looks at the bytes, the others are told that it failed.
        with raises((refused[0], DistributedError), mentions=[refused[1]], where=where):
            _merge(here, case, source, target, group)
    else:
        with succeeds("a merge", where=where):
            _merge(here, case, source, target, group)
    here.everyone(None)
    if refused is not None or _is_left_alone(case):
        assert_files(files_in(target), before, where=where)
    else:
        _check_merged(case, target, before, where)
    if target != source:
        assert_files(files_in(source), inputs, where=f"{where}: the input")
    assert_equal([name for name in os.listdir(source.parent) if name.startswith(".")], [], where=f"{where}: left over")


def _check_merged(case: Case, target: Path, before: Mapping[str, bytes], where: str) -> None:
    stored = dict(sorted(damaged(content(1), case["damage"]).items()))
    groups = grouped(stored, _mapping(case) or dict.fromkeys(stored, 1))
    metadata = {"format": "pt", **(case["user"] or {})}
    expected = {name: kept for name, kept in before.items() if name == NOTES}
    expected |= {file: library_file({name: stored[name] for name in names}, metadata) for file, names in groups.items()}
    found = files_in(target)
    assert_same_json(json.loads(found.pop(INDEX, b"{}")), index_of(groups, stored, has_sums=case["sums"]))
    assert_files(found, expected, where=where)


def _merge_cases(rank: Rank, cases: list[tuple[Case, str]]) -> None:
    here, group = Here.of(rank), dist.new_group(backend="gloo")
    for case, path in cases:
        _merge_case(here, case, Path(path), group)
        dist.barrier()
    dist.destroy_process_group(group)


SINGLE: dict[str, Sequence[Any]] = {
    "metadata": (None, {}, {"k": "v"}, USER),
    "checksums": (False, True),
    "path": ("path", "text", "relative"),
    "there": (None, "another", "no file of the format"),
    "state": ("kinds", "none"),
    "backend": ("mmap", "pread"),
    "device": ("cpu", torch.device("cpu")),
}


def _single_case(checkpoint: Any, case: Case, folder: Path) -> None:
    where = ", ".join(f"{name}: {value}" for name, value in case.items())
    file = folder / "x.safetensors"
    old = {"another": library_file({"old": torch.ones(2)}, {"k": "old"}), "no file of the format": b"nothing"}
    if case["there"] is not None:
        file.write_bytes(old[case["there"]])
    given: dict[str, Any] = {"path": file, "text": str(file), "relative": os.path.relpath(file)}
    path, state = given[case["path"]], kinds(5) if case["state"] == "kinds" else {}
    stored = {name: value.detach().resolve_conj().resolve_neg() for name, value in state.items()}
    with succeeds("a file", where=where):
        checkpoint.save_file(state, path, case["metadata"], checksums=case["checksums"])
        loaded = checkpoint.load_file(path, case["device"], backend=case["backend"])
    written = file.read_bytes()
    entries, metadata, _ = header_of(written)
    wanted = case["metadata"]
    if case["checksums"]:
        assert_same_json(json.loads(metadata[CHECKSUMS_KEY]), sums_of(stored))
        wanted = {**(wanted or {}), CHECKSUMS_KEY: metadata[CHECKSUMS_KEY]}
    assert_same_bytes(written, library_file(stored, wanted), where=where)
    assert_equal(list(loaded), list(entries), where=f"{where}: names in their order")
    for name, value in stored.items():
        assert_same_tensor(loaded[name], value.contiguous(), where=f"{where}: {name}")
    assert_equal(os.listdir(folder), [file.name], where=f"{where}: files")


@requirement(
    "CKPT-650",
    "Every two options of a merge, of save_file and of load_file MUST hold together, for every form of folder, by one "
    "rank and by two, into a new folder, over a checkpoint and in place; what is refused MUST leave every file as it "
    "was.",
)
def test_merges_and_single_files(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    for world in (1, 2):
        cases: list[tuple[Case, str]] = []
        table = MERGE if world == 2 else MERGE | {"how": MERGE["how"][:2]}
        chosen = [*pairs_of(table, allowed=lambda case: _refused_merge(case) is None), *pairs_of(table)]
        for number, case in enumerate(chosen):
            source = _made(case, tmp_path / f"{world}" / f"{number}")
            if case["place"] == "over":
                target = make_folder(Path(f"{source} merged"), "index", content(3), None, None, False)
                (target / NOTES).write_text("mine")
            cases.append((case, str(source)))
        if world == 2:
            rank_pool.run(_merge_cases, 2, cases, timeout_s=300)
        for each, path in cases if world == 1 else ():
            _merge_case(Here(checkpoint), each, Path(path), None)
    for number, case in enumerate(pairs_of(SINGLE)):
        folder = tmp_path / f"file {number}"
        folder.mkdir()
        _single_case(checkpoint, case, folder)
