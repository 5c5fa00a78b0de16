"""Loads of every two options: the table, targets of all kinds, and what each option means alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner

from conformance.checkpoint.cases import Tiled, cut, part_of
from conformance.checkpoint.paired import BLOCK, USER, Case, Here, State, chunks_of, content, damaged, quiet
from conformance.harness import assert_equal, assert_same_tensor, raises, succeeds
from twinproof.errors import ConfigError, CorruptionError, MissingKeyError, PlanError

READER: dict[str, Sequence[Any]] = {
    "form": ("index", "no index", "one file", "shards", "torch's shards"),
    "aligned": (False, True),
    "sums": (True, False),
    "damage": (None,),
    "reader": ("plain", "through float32", "through bfloat16"),
    "thread_count": (1, 3),
    "cast": (True, False),
    "verify_checksums": (False, True),
    "progress": (False, True),
    "planner": ("partial", "strict", "default"),
    "absent": (False, True),
    "dtype": ("same", "wider", "narrower"),
    "memory": ("dense", "turned", "gaps", "lazy", "parameter"),
    "shape": ("whole", "parts"),
    "use": ("first", "second", "after a refusal"),
    "user": (None, USER),
}
# Bytes that are not those that were summed, with and without a look at the sums.
DAMAGED = READER | {
    "sums": (True,),
    "damage": ("h", "q.weight", "q.weight_scale_inv"),
    "verify_checksums": (True, False),
}
DAMAGED |= {"cast": (True,), "progress": (False,), "planner": ("strict",), "absent": (False,), "user": (None,)}
DAMAGED |= {"memory": ("dense", "turned", "lazy")}
REFUSED = {name: READER[name] for name in ("reader", "sums", "verify_checksums", "cast", "planner", "absent", "dtype")}
REFUSED |= {name: READER[name] for name in ("memory", "shape", "use")}
_DTYPES: dict[str, dict[torch.dtype, torch.dtype]] = {
    "same": {},
    "wider": {
        torch.float32: torch.float64,
        torch.bfloat16: torch.float32,
        torch.int32: torch.int64,
        torch.bool: torch.uint8,
        torch.float8_e4m3fn: torch.float16,
        torch.complex64: torch.complex128,
    },
    "narrower": {torch.float32: torch.bfloat16, torch.bfloat16: torch.float16, torch.int64: torch.int32},
}
_CUTS: dict[str, list[list[int]]] = {
    "w": [[4], [3]],
    "h": [[2], []],
    "i": [[3]],
    "c": [[], [1]],
    "b": [[4]],
    "f8": [[], [2]],
    "q.weight": [[3], []],
    "g_blocks": [[1], [5]],
    "q.weight_scale_inv": [[1], []],
    "g_scales": [[2], []],
}


def _seen(case: Case, state: State) -> State:
    """What a reader gives, before the targets' dtypes: with the quantized one numbers times scales."""
    if case["reader"] == "plain":
        return state
    found = {name: value for name, value in state.items() if "_scale" not in name}
    scales = state["q.weight_scale_inv"].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    numbers = {"q.weight": state["q.weight"].double() * scales[:6, :10]}
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    halves = torch.stack([state["g_blocks"] % 16, state["g_blocks"] // 16], -1).flatten(-2)
    powers = torch.exp2(state["g_scales"].double() - 127)
    numbers["g_blocks"] = (table[halves.long()] * powers[..., None]).flatten(-2)
    through = torch.bfloat16 if case["reader"].endswith("bfloat16") else torch.float32
    return found | {name: value.float().to(through) for name, value in numbers.items()}


def _dtype_of(case: Case, value: torch.Tensor, *, is_quantized: bool) -> torch.dtype:
    dtype = torch.float32 if is_quantized else value.dtype
    return _DTYPES[case["dtype"]].get(dtype, dtype)


def _memory(shape: Sequence[int], dtype: torch.dtype, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A target of zeros, and all memory around it."""
    complexes = {torch.float32: torch.complex64, torch.float64: torch.complex128}
    complexes |= {dtype: dtype for dtype in (torch.complex64, torch.complex128)}
    if kind == "lazy" and dtype in complexes:
        base = torch.zeros(tuple(shape), dtype=complexes[dtype])
        return (base.conj() if dtype.is_complex else base.conj().imag), base
    if kind == "gaps":
        base = torch.zeros((*shape, 2), dtype=dtype)
        return base[..., 0], base
    if kind == "turned":
        base = torch.zeros(tuple(reversed(shape)), dtype=dtype)
        return base.permute(tuple(reversed(range(len(shape))))), base
    base = torch.zeros(tuple(shape), dtype=dtype)
    is_parameter = kind == "parameter" and (dtype.is_floating_point or dtype.is_complex)
    return (torch.nn.Parameter(base) if is_parameter else base), base


@dataclass
class Targets:
    """What a load fills: whole tensors, or this rank's rectangles of them."""

    boxes: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    parts: dict[tuple[str, tuple[int, ...]], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @staticmethod
    def of(case: Case, seen: State, rank: int) -> Targets:
        """Of one rank."""
        made, through = Targets(), case["reader"] != "plain"
        for name, value in seen.items():
            dtype = _dtype_of(case, value, is_quantized=through and name in ("q.weight", "g_blocks"))
            # A plain reader converts no numbers that have scales beside them.
            dtype = value.dtype if name == "q.weight" and not through else dtype
            is_cut = case["shape"] == "parts" and name in _CUTS
            cuts = [*_CUTS[name], *[[]] * value.dim()] if is_cut else [[] for _ in value.shape]
            cuts = [[at for at in inner if at < size] for inner, size in zip(cuts, value.shape, strict=False)]
            boxes = cut(value.shape, cuts)
            made.boxes[name] = boxes[rank :: case["world"]] if is_cut else boxes
            for offsets, sizes in made.boxes[name]:
                made.parts[name, offsets] = _memory(sizes, dtype, case["memory"])
            held = {offsets: made.parts[name, offsets][0] for offsets, _ in made.boxes[name]}
            made.given[name] = Tiled.of(value.shape, held, dtype) if is_cut else held[(0,) * value.dim()]
        if case["absent"]:
            made.given["absent"] = torch.full((2,), 7.0)
        return made

    def compared(self, case: Case, state: State) -> tuple[set[str], set[tuple[str, tuple[int, ...]]]]:
        """Names that are read in part, and chunks that are read whole."""
        partial, whole = set(), set()
        for name, boxes in self.boxes.items():
            for offsets, sizes in chunks_of(case["form"], name, state):
                if case["reader"] != "plain" and name == "g_blocks":
                    offsets, sizes = (offsets[0], 0), (sizes[0], 16)
                for begin, lengths in boxes:
                    inside = [
                        (max(a, b), min(a + n, b + m))
                        for a, n, b, m in zip(offsets, sizes, begin, lengths, strict=True)
                    ]
                    if any(low >= high for low, high in inside):
                        continue
                    if [high - low for low, high in inside] == list(sizes):
                        whole.add((name, offsets))
                    else:
                        partial.add(name)
        scales = {"q.weight": "q.weight_scale_inv", "g_blocks": "g_scales"} if case["reader"] != "plain" else {}
        for name, beside in scales.items():
            chunks = {chunk for chunk in whole if chunk[0] == name}
            # Of a quantized tensor all is compared, scales included, or nothing.
            if name in partial:
                partial.add(beside)
                whole -= chunks
            elif chunks:
                whole |= {(beside, (0,) * state[beside].dim())}
        return partial, whole

    def assert_filled(self, seen: State, where: str) -> None:
        """Every rectangle holds its values, and nothing lies in the gaps."""
        for (name, offsets), (target, base) in self.parts.items():
            expected = part_of(seen[name], offsets, target.shape).to(target.dtype)
            got = target.detach().resolve_conj().resolve_neg().contiguous()
            assert_same_tensor(got, expected.contiguous(), where=f"{where}: {name} at {offsets}")
            if base.dim() > target.dim():
                assert_equal(bool((base[..., 1] != 0).any()), False, where=f"{where}: memory beside {name}")
        self.assert_absent(where)

    def assert_untouched(self, where: str) -> None:
        """No target was written."""
        changed = [key for key, (_, base) in self.parts.items() if bool((base != 0).any())]
        assert_equal(changed, [], where=f"{where}: targets that changed")
        self.assert_absent(where)

    def assert_absent(self, where: str) -> None:
        """What the checkpoint lacks is as it was."""
        assert_equal(self.given.get("absent", torch.full((2,), 7.0)).tolist(), [7.0, 7.0], where=f"{where}: absent")


def is_possible(case: Case) -> bool:
    """The reader of quantized weights tells nobody how far it is."""
    return case["reader"] == "plain" or not case.get("progress")


def is_loadable(case: Case) -> bool:
    """Without what is refused."""
    return is_possible(case) and _refused_load(case, {}, Targets()) is None


def _refused_load(
    case: Case, state: State, targets: Targets
) -> tuple[type[BaseException], tuple[str, ...], bool] | None:
    """What a load of these ranks raises, what it names, and whether targets stay as they were."""
    if case["absent"] and case["planner"] != "partial":
        return (MissingKeyError if case["planner"] == "strict" else RuntimeError), ("absent",), True
    if case["verify_checksums"] and not case["sums"]:
        return ConfigError, ("verify_checksums",), True
    if case["reader"] == "plain" and not case["cast"] and case["dtype"] != "same":
        return PlanError, ("cast=True", "'w'"), True
    name = case.get("damage")
    if name is None or not case["verify_checksums"]:
        return None
    if (name, (0,) * state[name].dim()) in targets.compared(case, state)[1]:
        return CorruptionError, ("do not agree with their checksums", str(name)), False
    return None


def _reader(here: Here, case: Case, path: Path, told: list[tuple[int, int]]) -> Any:
    options = {"thread_count": case["thread_count"], "verify_checksums": case["verify_checksums"]}
    if case["reader"] != "plain":
        dtype = torch.bfloat16 if case["reader"].endswith("bfloat16") else torch.float32
        made = here.checkpoint.QuantizedHuggingFaceStorageReader
        return made(path, target_dtype=dtype, block_size=BLOCK, **options)
    tell = (lambda done, total: told.append((done, total))) if case["progress"] else None
    return here.checkpoint.HuggingFaceStorageReader(path, cast=case["cast"], progress=tell, **options)


def _dcp_load(here: Here, targets: Any, reader: Any, planner: Any, path: Path) -> None:
    with quiet():
        alone = here.mesh is None
        dcp.load(targets, checkpoint_id=path, storage_reader=reader, planner=planner, no_dist=alone)


def _planner_of(here: Here, kind: str) -> Any:
    if kind == "default":
        return DefaultLoadPlanner()
    return here.checkpoint.HuggingFaceLoadPlanner(strict=kind == "strict")


def load_case(here: Here, case: Case, path: Path, decoy: Path) -> None:
    """A load, behind another one of the same reader where the case has it; ``decoy`` is another checkpoint."""
    where = ", ".join(f"{name}: {value}" for name, value in case.items())
    state = damaged(content(1), case["damage"])
    mine = Targets.of(case, _seen(case, state), here.rank)
    told: list[tuple[int, int]] = []
    reader = _reader(here, case, decoy if case["use"] == "second" else path, told)
    if case["use"] == "second":
        part = Tiled.of((6, 8), {(0, 0): torch.zeros(3, 8, dtype=torch.bfloat16)}, torch.bfloat16)
        with succeeds("a load", where=f"another folder before {where}"):
            _dcp_load(here, {"h": part}, reader, None, decoy)
        assert_equal(reader.unverified, ("h",) if case["verify_checksums"] else (), where=f"before {where}")
    elif case["use"] == "after a refusal":
        with raises(PlanError, mentions=["'w'"], where=f"another shape before {where}"):
            _dcp_load(here, {"w": torch.zeros(2, 2)}, reader, _planner_of(here, "strict"), path)
    told.clear()
    planner, refused = _planner_of(here, case["planner"]), _refused_load(case, state, mine)
    if refused is None:
        with succeeds("a load", where=where):
            _dcp_load(here, mine.given, reader, planner, path)
        mine.assert_filled(_seen(case, state), where)
        unverified = tuple(sorted(mine.compared(case, state)[0])) if case["verify_checksums"] else ()
        assert_equal(reader.unverified, unverified, where=f"{where}: unverified")
        _check_progress(case, state, mine, told, where)
        return
    with raises(refused[0], mentions=refused[1], where=where):
        _dcp_load(here, mine.given, reader, planner, path)
    if refused[2]:
        mine.assert_untouched(where)


def _check_progress(case: Case, state: State, mine: Targets, told: Sequence[tuple[int, int]], where: str) -> None:
    size_bytes = sum(target.numel() * state[name].element_size() for (name, _), (target, _) in mine.parts.items())
    assert_equal({total for _, total in told}, {size_bytes} if case["progress"] else set(), where=f"{where}: progress")
    assert_equal([done for done, _ in told], sorted({done for done, _ in told}), where=f"{where}: progress")
    assert_equal(told[-1:], [(size_bytes, size_bytes)] if case["progress"] else [], where=f"{where}: progress")
