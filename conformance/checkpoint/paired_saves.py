"""Saves of every two options: the table, what each option means alone, and the look at what a save made."""

from __future__ import annotations

import json
import os
import unittest.mock
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlanner
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from conformance.checkpoint.cases import (
    CHECKSUMS_KEY,
    INDEX,
    assert_same_json,
    bits,
    cut,
    part_of,
    random_bits,
    sharded,
    sums_of,
    tiled,
)
from conformance.checkpoint.paired import (
    NOTES,
    SHARDING_KEY,
    USER,
    Case,
    Here,
    State,
    assert_files,
    files_in,
    grouped,
    header_of,
    index_of,
    library_file,
    quiet,
)
from conformance.checkpoint.sequences import files_of
from conformance.harness import assert_equal, assert_same_bytes, pairs_of, raises, succeeds
from twinproof.errors import CheckpointExistsError, ConfigError, DistributedError, PlanError

MAPPING = {"a.rows": 1, "b.half": 2, "c.turned": 1, "d.none": 2, "e.one": 1, "f.conj": 2, "g.neg": 1, "h.same": 2}
MAPPING |= {"i.param": 1, "j.flags": 2, "k.eight": 1, "l.four": 1}
_EXPORTS = {"float16": torch.float16, torch.bfloat16: torch.bfloat16}
LEFT_OUT = ("b.half", "h.same", "l.four")  # Of a second save of less.
CUT = ("a.rows", "b.half")
KEEP = ("*.param", "e.*")
WRITER: dict[str, Sequence[Any]] = {
    "files": ("one", "mapping", "size", "single"),
    "layout": ("final", "shards"),
    "world": (2,),
    "state": ("whole", "tiles", "placed"),
    "planner": ("lowest", "default", "of HF", "caching", "caching, kept"),
    "second": ("same", "other", "less"),
    "replicas": ("equal", "differ first", "differ second"),
    "overwrite": (True, False),
    "export_dtype": (None, torch.bfloat16, "float16"),
    "export_keep": ((), KEEP),
    "metadata": (None, USER),
    "page_align": (False, True),
    "check_replicas": (True, False),
    "checksums": (False, True),
    "write_mode": ("auto", "random", "sequential"),
    "block_bytes": (8 << 20, 64),
    "thread_count": (1, 3),
    "thread_count_consolidation": (1, 2),
    "durable": (False, True),
    "progress": (False, True),
    "process_group": ("none", "default", "new"),
}
# One process has no group, and nobody who could have another replica.
ALONE = WRITER | {"layout": ("final", "shards", "alone", "alone shards"), "world": (1,), "state": ("whole", "tiles")}
ALONE |= {"replicas": ("equal",), "process_group": ("none",), "files": (*WRITER["files"], "size as text")}
_FILES: dict[str, dict[str, Any]] = {
    "one": {},
    "mapping": {"fqn_to_index_mapping": MAPPING},
    "size": {"max_shard_size": 180},
    "size as text": {"max_shard_size": "0.1KB"},
    "single": {"single_file": True},
    "mapping and size": {"fqn_to_index_mapping": MAPPING, "max_shard_size": 180},
    "single and size": {"single_file": True, "max_shard_size": 180},
    "single and mapping": {"single_file": True, "fqn_to_index_mapping": MAPPING},
}
_LAYOUTS: dict[str, dict[str, bool]] = {
    "final": {},
    "shards": {"enable_consolidation": False},
    "alone": {"save_distributed": False},
    "alone shards": {"save_distributed": False, "enable_consolidation": False},
}
_BY_NAME: tuple[str, ...] = (
    "export_dtype",
    "export_keep",
    "metadata",
    "page_align",
    "check_replicas",
    "checksums",
    "write_mode",
)
_BY_NAME += ("block_bytes", "thread_count", "thread_count_consolidation", "durable", "overwrite")


def refusal(case: Case) -> tuple[type[Exception], tuple[str, ...]] | None:
    """What no writer can do, and what its error names: the constructor's errors first."""
    files, layout = case["files"], case["layout"]
    if files == "mapping and size":
        return ConfigError, ("fqn_to_index_mapping", "max_shard_size")
    if files.startswith("single and") or (files == "single" and case["checksums"]):
        return ConfigError, ("single_file",)
    if layout == "shards" and files not in ("one", "mapping"):
        return ConfigError, ("enable_consolidation", "single_file" if files == "single" else "max_shard_size")
    if layout.startswith("alone") and case["world"] > 1:
        return ConfigError, ("save_distributed",)
    if layout == "shards" and case["world"] == 1 and case["state"] == "tiles":
        return PlanError, ("one chunk",)
    return None


def is_allowed(case: Case) -> bool:
    """Without what is refused, and without what no promise says: which of two replicas that are trusted is stored."""
    # On which rank torch's planner leaves a replica decides what is first, where files are cut by size.
    follows = case["world"] == 1 or not case["files"].startswith("size") or case["planner"] != "default"
    compares = case["replicas"] == "equal" or case["check_replicas"]
    return follows and compares and refusal(case) is None


def kinds(seed: int) -> State:
    """Tensors of all kinds; those of other kinds of memory are views of what is stored."""
    generator = torch.Generator().manual_seed(seed)
    turned = torch.randn(7, 5, generator=generator).t()
    return {
        "a.rows": torch.randn(9, 5, generator=generator),
        "b.half": torch.randn(6, 4, generator=generator).bfloat16(),
        "c.turned": turned,
        "d.none": torch.empty(0, 3, dtype=torch.int64),
        "e.one": torch.randn((), generator=generator, dtype=torch.float64),
        "f.conj": torch.randn(3, generator=generator, dtype=torch.complex64).conj(),
        "g.neg": torch.randn(4, generator=generator, dtype=torch.complex64).conj().imag,
        "h.same": turned,
        "i.param": torch.nn.Parameter(torch.randn(8, generator=generator).half()),
        "j.flags": random_bits(torch.bool, (7,), seed),
        "k.eight": random_bits(torch.float8_e4m3fn, (4, 3), seed),
        "l.four": random_bits(torch.float4_e2m1fn_x2, (2, 2), seed),
    }


def _stored(case: Case, state: State) -> State:
    """The values that files hold: exported ones as torch converts them."""
    dtype = _EXPORTS.get(case["export_dtype"])
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    kept = [name for name in state if case["export_keep"] and (name.startswith("e.") or name.endswith(".param"))]
    plain = {name: value.detach().resolve_conj().resolve_neg() for name, value in state.items()}
    return {
        name: value.to(dtype) if dtype and value.dtype in floats and name not in kept else value
        for name, value in plain.items()
    }


def _placed(here: Here, value: torch.Tensor, placement: Placement) -> DTensor:
    assert here.mesh is not None
    return sharded(value, here.mesh, [placement])


def _held(here: Here, case: Case, state: State) -> dict[str, Any]:
    """This rank's part of a state."""
    held: dict[str, Any] = dict(state)
    for name in state.keys() & set(CUT):
        if case["state"] == "tiles":
            middle = state[name].shape[0] // 2
            boxes = cut(state[name].shape, [[middle], []])
            held[name] = tiled(state[name], boxes, here.rank, here.world_size)
        elif case["state"] == "placed":
            held[name] = _placed(here, state[name], Shard(1))
    if case["state"] == "placed":
        held["c.turned"] = _placed(here, state["c.turned"], Replicate())
    return held


@dataclass
class Planners:
    """The planner of each save of a case; a class of its own, so that no other case shares its cache."""

    kind: str
    made: list[Any] = field(default_factory=list)

    def next(self, checkpoint: Any) -> Any:
        """A fresh one, or that of the first save."""
        if self.kind == "caching, kept" and self.made:
            return self.made[0]
        lowest = self.kind != "default"
        if self.kind == "of HF":
            planner: Any = checkpoint.HuggingFaceSavePlanner(dedup_save_to_lowest_rank=lowest)
        else:
            cls = type("PlannerOfPairs", (DefaultSavePlanner,), {})
            planner = cls(dedup_save_to_lowest_rank=lowest, enable_plan_caching=self.kind.startswith("caching"))
        self.made.append(planner)
        return planner

    def close(self) -> None:
        """Forget what torch keeps for all planners of the class's name."""
        for name in ("save_plan", "all_plans", "global_plan", "metadata", "final_save_plan"):
            getattr(SavePlanner, f"_cached_{name}").pop("PlannerOfPairs", None)


@dataclass
class Watched:
    """What a save did on this rank beside its files: who it told how far it is, and what it synced."""

    told: list[tuple[int, int]] = field(default_factory=list)
    synced: set[int] = field(default_factory=set)

    def tell(self, done: int, total: int) -> None:
        """The writer's progress."""
        self.told.append((done, total))

    @contextmanager
    def syncs(self) -> Iterator[None]:
        """Note the files and folders that are synced."""
        right = os.fsync

        def sync(descriptor: int) -> None:
            self.synced.add(os.fstat(descriptor).st_ino)
            right(descriptor)

        with unittest.mock.patch("os.fsync", sync):
            yield


def _writer(here: Here, case: Case, path: Path, watched: Watched, groups: Mapping[str, Any]) -> Any:
    options = {name: case[name] for name in _BY_NAME} | _FILES[case["files"]] | _LAYOUTS[case["layout"]]
    options["progress"] = watched.tell if case["progress"] else None
    return here.checkpoint.HuggingFaceStorageWriter(path, process_group=groups[case["process_group"]], **options)


def _dcp_save(here: Here, state: Any, writer: Any, planner: Any, folder: Path) -> Any:
    with quiet():
        alone = here.mesh is None
        return dcp.save(state, checkpoint_id=folder, storage_writer=writer, planner=planner, no_dist=alone)


def save_case(here: Here, case: Case, root: Path, groups: Mapping[str, Any]) -> None:
    """A first and a second save of one writer, and a third where replicas differ in one of them."""
    where = ", ".join(f"{name}: {value}" for name, value in case.items())
    watched, planners = Watched(), Planners(case["planner"])
    with ExitStack() as stack:
        stack.callback(planners.close)
        writer = stack.enter_context(_writer(here, case, root / "first", watched, groups))
        for number in range(2 if case["replicas"] == "equal" else 3):
            folder = root / ("other" if number and case["second"] == "other" else "first")
            planner, at = planners.next(here.checkpoint), f"save {number} of {where}"
            watched.told, watched.synced = [], set()
            _save_once(here, case, number, folder, writer, planner, watched, at)
            here.everyone(None)
    assert_equal(set(os.listdir(root)) - {"first", "other"}, set(), where=f"folders beside, {where}")


def _save_once(
    here: Here, case: Case, number: int, folder: Path, writer: Any, planner: Any, watched: Watched, where: str
) -> None:
    state, before = kinds(number), files_in(folder)
    if number and case["second"] == "less":
        state = {name: value for name, value in state.items() if name not in LEFT_OUT}
    differs = number == {"differ first": 0, "differ second": 1}.get(case["replicas"])
    if differs and here.rank:
        state["e.one"] = state["e.one"] + 1
    held = _held(here, case, state)
    if differs or (before and not case["overwrite"]):
        # What costs nothing is looked at first.
        exists = before and not case["overwrite"]
        error, mentioned = (CheckpointExistsError, "overwrite") if exists else (DistributedError, "e.one")
        with raises(error, mentions=[mentioned], where=where):
            _dcp_save(here, held, writer, planner, folder)
        assert_files(files_in(folder), before, where=where)
        return
    with succeeds("a save", where=where), watched.syncs():
        metadata = _dcp_save(here, held, writer, planner, folder)
    everyone = here.everyone((watched, metadata.storage_data))
    if here.rank == 0:
        _check_save(case, folder, state, everyone, where)
        (folder / NOTES).write_text("mine")


def _check_save(case: Case, folder: Path, state: State, everyone: Sequence[tuple[Watched, Any]], where: str) -> None:
    """Look at the folder, and at what the ranks saw."""
    files = files_in(folder)
    stored, notes = _stored(case, state), files.pop(NOTES, b"mine")
    assert_same_bytes(notes, b"mine", where=f"{where}: a file of the user")
    if case["layout"] == "shards":
        _check_shards(case, files, stored, where)
    else:
        _check_final(case, files, stored, where)
    _check_watched(case, folder, files, [watched for watched, _ in everyone], where)
    assert_equal([placed for _, placed in everyone], [everyone[0][1]] * len(everyone), where=f"{where}: metadata")
    for index, info in everyone[0][1].items():
        entries, _, start = header_of(files[info.relative_path])
        begin, end = entries[index.fqn]["data_offsets"]
        at = f"{where}: where {index.fqn} at {index.offset} lies"
        assert_equal(info.offset, start + begin, where=at)
        if case["layout"] == "shards" or index.fqn not in CUT:
            assert_equal(info.length, end - begin, where=at)


def _check_watched(case: Case, folder: Path, files: Mapping[str, bytes], ranks: Sequence[Watched], where: str) -> None:
    totals = 0
    for told in (watched.told for watched in ranks):
        assert_equal([done for done, _ in told], sorted(done for done, _ in told), where=f"{where}: progress")
        assert_equal({total for _, total in told}, {told[-1][0]} if told else set(), where=f"{where}: progress")
        totals += told[-1][1] if told else 0
    sizes = sum(len(content) for name, content in files.items() if name.endswith(".safetensors"))
    assert_equal(totals, sizes if case["progress"] else 0, where=f"{where}: totals of progress")
    synced = set().union(*(watched.synced for watched in ranks))
    paths = [folder.parent, folder, *(folder / name for name in files)]
    lacking = [path.name for path in paths if path.stat().st_ino not in synced]
    assert_equal(lacking if case["durable"] else sorted(synced), [], where=f"{where}: durable")


def _check_final(case: Case, files: Mapping[str, bytes], stored: State, where: str) -> None:
    metadata = {**(case["metadata"] or {}), "format": "pt"}
    if case["files"] == "mapping":
        groups = grouped(stored, MAPPING)
    else:
        groups = files_of(stored, {"size": 180, "size as text": 100}.get(case["files"]))
    if case["files"] == "single":
        groups = {"model.safetensors": list(stored)}
    index = [] if case["files"] == "single" else [INDEX]
    assert_equal(sorted(files), sorted([*groups, *index]), where=f"{where}: files")
    for file, names in groups.items():
        expected = library_file({name: stored[name] for name in names}, metadata, page_align=case["page_align"])
        assert_same_bytes(files[file], expected, where=f"{where}: {file}")
    if index:
        assert_same_json(json.loads(files[INDEX]), index_of(groups, stored, has_sums=case["checksums"]))


def _check_shards(case: Case, files: Mapping[str, bytes], stored: State, where: str) -> None:
    """Each file as the library writes its tensors; all tiles of all files are the state, each once."""
    mapping = MAPPING if case["files"] == "mapping" else dict.fromkeys(stored, 1)
    counted = dict.fromkeys(stored, 0)
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for file, content in files.items():
        entries, metadata, _ = header_of(content)
        rank, number, count = (int(part) for part in file.removesuffix(".safetensors").split("-") if part.isdigit())
        assert_equal({mapping[name] for name in entries}, {number}, where=f"{where}: the number of {file}")
        assert_equal((rank <= case["world"], count), (True, max(mapping.values())), where=f"{where}: {file}")
        info = json.loads(metadata[SHARDING_KEY])
        tiles: State = {}
        for name, value in stored.items():
            if name in entries:
                sizes, offsets = entries[name]["shape"], info[name]["saved_offsets"]
                if value.dtype is torch.float4_e2m1fn_x2:
                    sizes = [*sizes[:-1], sizes[-1] // 2]
                assert_equal(info[name]["global_shape"], list(value.shape), where=f"{where}: shape of {name}")
                tiles[name] = part_of(bits(value), offsets, sizes).view(value.dtype)
                counted[name] += tiles[name].numel()
                assert_equal((name, tuple(offsets)) in seen, False, where=f"{where}: {name} at {offsets}, twice")
                seen.add((name, tuple(offsets)))
        said = json.loads(metadata.get(CHECKSUMS_KEY, "{}"))
        assert_same_json(said, sums_of(tiles) if case["checksums"] else {})
        own = {key: metadata[key] for key in (SHARDING_KEY, CHECKSUMS_KEY) if key in metadata}
        wanted = {**(case["metadata"] or {}), "format": "pt", "DCP_VERSION": "1.0", **own}
        expected = library_file(tiles, wanted, page_align=case["page_align"])
        assert_same_bytes(content, expected, where=f"{where}: {file}")
    assert_equal(counted, {name: value.numel() for name, value in stored.items()}, where=f"{where}: elements")
    assert_equal({name for name, _ in seen}, set(stored), where=f"{where}: names")


def refuse_save(here: Here, case: Case, root: Path) -> None:
    """The constructor or the first save raises, and no file or folder is made."""
    refused = refusal(case)
    assert refused is not None
    with raises(refused[0], mentions=refused[1], where=f"{dict(case)}"):
        writer = _writer(here, case, root / "first", Watched(), {"none": None})
        with writer:
            _dcp_save(here, _held(here, case, kinds(0)), writer, None, root / "first")
    assert_equal(os.listdir(root), [], where=f"what a refused save left, {dict(case)}")


def refused_saves() -> list[dict[str, Any]]:
    """All pairs that are refused, in cases that are usual else."""
    usual = {name: values[0] for name, values in WRITER.items()}
    part = {"files": tuple(_FILES), "layout": ALONE["layout"], "checksums": (False, True), "world": (1, 2)}
    part["state"] = ALONE["state"]
    found: list[dict[str, Any]] = [{**usual, **case} for case in pairs_of(part)]
    return [case for case in found if refusal(case) is not None]
