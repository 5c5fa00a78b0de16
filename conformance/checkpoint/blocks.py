"""Who is to write which bytes of a save, byte by byte: what plans are compared with. Shares no code with them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any

import torch

from twinproof.checkpoint.catalog import Box
from twinproof.checkpoint.format import FileLayout, lay_out

DTYPES = (torch.uint8, torch.int16, torch.float32)


@dataclass
class Part:
    """A rectangle of a tensor, the rank whose plan has it at ``position``, and all ranks that have it."""

    name: str
    shape: tuple[int, ...]
    box: Box
    rank: int
    position: int
    holders: tuple[int, ...]


@dataclass
class File:
    """A file, what lies in it, and of each byte the number of the part that it belongs to, or -1."""

    layout: FileLayout
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    owners: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def runs(self, number: int) -> list[tuple[int, int]]:
        """(begin, end) in the file of each run of bytes of a part."""
        places = (self.owners == number).nonzero().view(-1)
        if not len(places):
            return []
        breaks = (places.diff() > 1).nonzero().view(-1) + 1
        cuts = [0, *breaks.tolist(), len(places)]
        return [(int(places[a]), int(places[b - 1]) + 1) for a, b in pairwise(cuts)]

    def bytes_in(self, start: int, end: int) -> dict[int, int]:
        """Bytes of each part that has some there."""
        return {part: count for part, count in Counter(self.owners[start:end].tolist()).items() if part >= 0}


def _cuts(source: random.Random, length: int) -> list[int]:
    inner = source.sample(range(1, length), min(source.choice((0, 0, 1, 2)), length - 1)) if length > 1 else []
    return sorted({0, length, *inner})


def make_files(seed: int, file_count: int, rank_count: int) -> list[File]:
    """Files of tensors that are cut along any dimensions; some parts lie on several ranks, some are empty."""
    source, positions, files = random.Random(seed), [0] * rank_count, []
    for file_number in range(file_count):
        specs = []
        for number in range(source.randint(0, 4)):
            shape = [source.randint(1, 6) for _ in range(source.randint(0, 2))]
            shape.append(source.choice((0, 1, 32, 64, 128, 192, 256, 512, source.randint(1, 300))))
            specs.append((f"{file_number}.{number}", source.choice(DTYPES), tuple(shape)))
        file = File(lay_out(specs, None), {name: dtype for name, dtype, _ in specs})
        file.owners = torch.full((file.layout.file_bytes,), -1, dtype=torch.int32)
        for spec in specs:
            _fill(file, source, spec, positions)
        files.append(file)
    return files


def _fill(
    file: File, source: random.Random, spec: tuple[str, torch.dtype, tuple[int, ...]], positions: list[int]
) -> None:
    name, dtype, shape = spec
    numbers = torch.full(shape, -1, dtype=torch.int32)
    for cell in product(*(pairwise(_cuts(source, length)) if length else [(0, 0)] for length in shape)):
        box = Box(tuple(begin for begin, _ in cell), tuple(end - begin for begin, end in cell))
        count = 1 if source.random() < 0.5 else source.randint(1, min(len(positions), 5))
        holders = source.sample(range(len(positions)), count)
        rank = source.choice(holders)
        numbers[tuple(slice(*ends) for ends in cell)] = len(file.parts)
        file.parts.append(Part(name, shape, box, rank, positions[rank], tuple(holders)))
        positions[rank] += 1
    begin, flat = file.layout.begins[name], numbers.view(-1).repeat_interleave(dtype.itemsize)
    file.owners[begin : begin + len(flat)] = flat


def _direct(files: Sequence[File], rules: Any, rank_count: int) -> list[list[tuple[int, int, int]]]:
    # Long runs, each with one of those who have it; a run that several have is shared out, least loaded first.
    load, long = [0] * rank_count, [[file.runs(number) for number in range(len(file.parts))] for file in files]
    for file, runs_of in zip(files, long, strict=True):
        for part, runs in zip(file.parts, runs_of, strict=True):
            if len(part.holders) == 1 and runs and runs[0][1] - runs[0][0] >= rules.direct_bytes:
                load[part.rank] += sum(end - begin for begin, end in runs)
    found = []
    for file, runs_of in zip(files, long, strict=True):
        here = []
        for part, runs in zip(file.parts, runs_of, strict=True):
            for begin, end in runs:
                if end - begin < rules.direct_bytes:
                    continue
                share = max((end - begin + len(part.holders) - 1) // len(part.holders), rules.direct_bytes)
                ranks = sorted(part.holders, key=lambda rank: (load[rank], rank))
                for start in range(begin, end, share):
                    stop, rank = min(start + share, end), ranks.pop(0)
                    here.append((start, stop, rank))
                    load[rank] += stop - start if len(part.holders) > 1 else 0
        found.append(sorted(here))
    return found


def _stretches(runs: Sequence[tuple[int, int, int]], length: int, rules: Any) -> list[tuple[int, int, int | None]]:
    # (begin, end, owner): where nobody has a long run, the owner is None. Short gaps belong to what lies behind them.
    found: list[tuple[int, int, int | None]] = []
    position = 0
    for run_begin, run_end, owner in runs:
        begin = run_begin // rules.align_bytes * rules.align_bytes
        end = run_end if run_end == length else run_end // rules.align_bytes * rules.align_bytes
        if begin - position >= rules.absorb_bytes:
            found.append((position, begin, None))
            position = begin
        if end > position:
            found.append((position, end, owner))
            position = end
    if 0 < length - position < rules.absorb_bytes and found and found[-1][2] is not None:
        found[-1] = (found[-1][0], length, found[-1][2])
    elif position < length:
        found.append((position, length, None))
    return found


def expected_writes(
    files: Sequence[File], rules: Any, rank_count: int, much_bytes: int
) -> list[tuple[int, int, int, int]]:
    """(file, start, end, owner) of every write.

    ``much_bytes``: where a rank has as much of a write, those that have less than half as much do not write it.
    """
    direct = _direct(files, rules, rank_count)
    writes: list[tuple[int, int, int, int | None]] = []
    for number, file in enumerate(files):
        length = file.layout.file_bytes
        if rank_count == 1:
            stretches: list[tuple[int, int, int | None]] = [(0, length, 0)]
        elif rules.sequential:
            stretches = [(0, length, None)]
        else:
            stretches = _stretches(direct[number], length, rules)
        for begin, end, owner in stretches:
            if owner is None:
                ends = [at for at in range(begin + 1, end) if at % rules.block_bytes == 0]
            else:
                # As few writes as may be, all but the last of one length: whole units.
                count = (end - begin + rules.direct_max_bytes - 1) // rules.direct_max_bytes
                unit = ((end - begin + count - 1) // count + rules.align_bytes - 1) // rules.align_bytes
                ends = [*range(begin + unit * rules.align_bytes, end, unit * rules.align_bytes)]
            writes += [(number, a, b, owner) for a, b in pairwise([begin, *ends, end])]
    return _with_owners(writes, files, rank_count, sequential=rules.sequential, much_bytes=much_bytes)


def _with_owners(
    writes: Sequence[tuple[int, int, int, int | None]],
    files: Sequence[File],
    rank_count: int,
    *,
    sequential: bool,
    much_bytes: int,
) -> list[tuple[int, int, int, int]]:
    load, found, whole = [0] * rank_count, [], dict[int, int]()
    for _, start, end, owner in writes:
        if owner is not None:
            load[owner] += end - start
    for number, start, end, given in writes:
        if given is not None:
            found.append((number, start, end, given))
            continue
        if sequential:
            ranks: Sequence[int] = [whole[number]] if number in whole else range(rank_count)
        else:
            held = Counter[int]()
            for part, count in files[number].bytes_in(start, end).items():
                held.update(dict.fromkeys(files[number].parts[part].holders, count))
            most = max(held.values(), default=0)
            ranks = [rank for rank in held if most < much_bytes or held[rank] >= most / 2] or [0]
        owner = whole[number] = min(ranks, key=lambda rank: (load[rank], rank))
        load[owner] += end - start
        found.append((number, start, end, owner))
    return found
