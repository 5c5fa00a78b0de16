"""Save a published model from many ranks as one Hugging Face checkpoint, load it on other ranks, and time both.

Shows: `HuggingFaceStorageWriter` and `HuggingFaceStorageReader` under `dcp.save` and `dcp.load`, with four ranks that
hold uneven and column tiles, three ranks that load other tiles, and one process. The files must equal, byte for byte,
those of the safetensors library; that library must read them back. Then the model and a Llama-shaped state in row
shards are saved and loaded by two ranks, in interleaved pairs with torch's own writer and reader.

Run it with the extra "test" installed; WORK needs about four times the Llama's bytes:

    python examples/checkpoint_published_model.py --model FILE.safetensors --work FOLDER [--llama-bytes N]
        [--impl PACKAGE] [--report FILE.json]

Prints a line for each verdict, "yes" or "NO" and why, and then seconds of saves and loads, ours and torch's, with their
ratio. Exits with 1 if any verdict is NO. FOLDER is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard

from conformance.checkpoint.cases import (
    PT,
    Tiled,
    assert_loads,
    assert_parts,
    cut,
    load_ranks,
    mesh_of,
    oracle,
    save_ranks,
    tiled,
)
from conformance.harness import Mismatch, Rank, RankPool, assert_equal, assert_same_bytes
from conformance.harness.implementation import component

State = dict[str, torch.Tensor]
FILE_COUNT = 3
GIB = 1 << 30
PAIRS = 3


def _uneven(index: int, value: torch.Tensor, ways: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Matrices alternate between uneven rows and uneven columns; vectors are cut unevenly, small ones left whole."""
    if value.dim() == 0 or value.numel() < 8 * ways:
        return cut(value.shape, [[] for _ in value.shape])
    dim = index % value.dim()
    size = value.shape[dim]
    edges = sorted({size * (way * way + way) // (ways * ways + ways) for way in range(1, ways)})
    return cut(value.shape, [edges if d == dim else [] for d in range(value.dim())])


def _mapping(state: State) -> dict[str, int]:
    return {name: 1 + i * FILE_COUNT // len(state) for i, name in enumerate(state)}


def _shards(state: State, rank: Rank, *, fill: bool = True) -> dict[str, Tiled]:
    return {
        name: tiled(value, _uneven(i, value, rank.world_size), rank.rank, rank.world_size, fill=fill)
        for i, (name, value) in enumerate(state.items())
    }


def save_model(rank: Rank, model: str, path: str) -> None:
    """Every rank saves its tiles of the model."""
    state = safetensors.torch.load_file(model)
    save_ranks(rank, _shards(state, rank), Path(path), fqn_to_index_mapping=_mapping(state))


def load_model(rank: Rank, model: str, path: str) -> int:
    """Every rank loads other tiles than were saved and compares them; returns how many."""
    state = safetensors.torch.load_file(model)
    targets = _shards(state, rank, fill=False)
    load_ranks(rank, targets, Path(path))
    for name, target in targets.items():
        assert_parts(target, state[name], where=f"{name} on rank {rank.rank}")
    return sum(len(target.parts) for target in targets.values())


def _prove_identical(model: Path, folder: Path) -> str:
    state = safetensors.torch.load_file(model)
    mapping = _mapping(state)
    for index in range(1, FILE_COUNT + 1):
        names = [name for name, file in mapping.items() if file == index]
        expected = oracle({name: state[name] for name in names}, PT)
        file = f"model-{index:05d}-of-{FILE_COUNT:05d}.safetensors"
        assert_same_bytes(folder / file, expected, where=file)
    return f"{FILE_COUNT} files, {len(state)} tensors"


def _prove_reload(model: Path, folder: Path, work: Path) -> str:
    """Merge the files back into one with the library and compare with the library's own copy of the original."""
    merged: State = {}
    for file in sorted(folder.glob("*.safetensors")):
        merged |= safetensors.torch.load_file(file)
    original = safetensors.torch.load_file(model)
    assert_equal(sorted(merged), sorted(original), where="names")
    for target, tensors in ((work / "one.safetensors", merged), (work / "two.safetensors", original)):
        safetensors.torch.save_file(tensors, target, PT)
    assert_same_bytes(work / "one.safetensors", (work / "two.safetensors").read_bytes(), where="merged file")
    return f"{len(merged)} tensors through the safetensors library"


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _timed(action: Callable[[], object]) -> float:
    dist.barrier()
    begun = time.perf_counter()
    with _quiet():
        action()
    dist.barrier()
    return time.perf_counter() - begun


def _pairs(rank: Rank, state: dict[str, Any], mapping: dict[str, int], work: str) -> dict[str, list[float]]:
    """Interleaved saves and loads of both implementations, the first pair thrown away."""
    ours = rank.component("checkpoint")
    times: dict[str, list[float]] = {"save ours": [], "save torch": [], "load ours": [], "load torch": []}

    def save_ours() -> None:
        with ours.HuggingFaceStorageWriter(f"{work}/ours", fqn_to_index_mapping=mapping) as writer:
            dcp.save(state, storage_writer=writer)

    def save_torch() -> None:
        writer = dcp.HuggingFaceStorageWriter(
            f"{work}/torch", fqn_to_index_mapping=mapping, save_distributed=True, enable_consolidation=True
        )
        dcp.save(state, storage_writer=writer)

    readers = {"ours": ours.HuggingFaceStorageReader, "torch": dcp.HuggingFaceStorageReader}
    for pair in range(PAIRS + 1):
        for kind, save in (("ours", save_ours), ("torch", save_torch)):
            if rank.rank == 0:
                shutil.rmtree(f"{work}/{kind}", ignore_errors=True)
            saved = _timed(save)
            reader = readers[kind](f"{work}/{kind}")
            loaded = _timed(lambda reader=reader: dcp.load(state, storage_reader=reader))  # type: ignore[misc]
            if pair:
                times[f"save {kind}"].append(saved)
                times[f"load {kind}"].append(loaded)
    return times


def time_model(rank: Rank, model: str, work: str) -> dict[str, list[float]]:
    """The model's float tensors, in rows: torch's own path fails on the integer one."""
    mesh = mesh_of(rank)
    floats = {n: v for n, v in safetensors.torch.load_file(model).items() if v.is_floating_point()}
    state = {n: _rows(v, mesh) for n, v in floats.items()}
    return _pairs(rank, state, _mapping(floats), work)


def _rows(value: torch.Tensor, mesh: Any) -> DTensor:
    part = (
        torch.chunk(value, mesh.size())[mesh.get_local_rank()] if mesh.get_local_rank() < value.shape[0] else value[:0]
    )
    return DTensor.from_local(part.clone(), mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.stride())


def llama_shapes(payload_bytes: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama with hidden size 2048 and enough layers for about this many bytes of float32."""
    hidden, inner, key, vocabulary = 2048, 5632, 512, 8192
    layer = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (key, hidden), "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    fixed = sum(4 * math.prod(shape) for shape in shapes.values())
    per_layer = sum(4 * math.prod(shape) for shape in layer.values())
    for number in range(max(1, (payload_bytes - fixed) // per_layer)):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def time_llama(rank: Rank, payload_bytes: int, work: str) -> dict[str, list[float]]:
    """A Llama-shaped state, FSDP's row shards."""
    mesh, state = mesh_of(rank), {}
    shapes = llama_shapes(payload_bytes)
    for number, (name, shape) in enumerate(shapes.items()):
        local = torch.full((shape[0] // rank.world_size, *shape[1:]), float(number))
        state[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    mapping = {name: 1 + 4 * i // len(shapes) for i, name in enumerate(shapes)}
    return _pairs(rank, state, mapping, work)


def _verdicts(pool: RankPool, model: Path, work: Path, checkpoint: Any) -> dict[str, str]:
    folder = work / "model"
    steps: dict[str, Callable[[], object]] = {
        "4 ranks save uneven and column tiles": lambda: pool.run(save_model, 4, str(model), str(folder)),
        "files byte-identical to the safetensors library's": lambda: _prove_identical(model, folder),
        "3 ranks load other tiles": lambda: f"{sum(pool.run(load_model, 3, str(model), str(folder)))} tiles",
        "one process loads": lambda: assert_loads(checkpoint, folder, safetensors.torch.load_file(model)),
        "the library reads it back": lambda: _prove_reload(model, folder, work),
    }
    verdicts = {}
    for name, step in steps.items():
        try:
            verdicts[name] = f"yes ({result})" if isinstance(result := step(), str) else "yes"
        except Mismatch as error:
            verdicts[name] = f"NO: {error}"
    return verdicts


def _print_times(title: str, all_times: list[dict[str, list[float]]], payload_bytes: int) -> dict[str, float]:
    times = {key: [max(rank[key][i] for rank in all_times) for i in range(PAIRS)] for key in all_times[0]}
    ratios = {}
    print(
        f"\n{title} ({payload_bytes / GIB:.2f} GiB, {len(all_times)} ranks, {PAIRS} interleaved pairs after a warm-up)"
    )
    for verb in ("save", "load"):
        pairs = zip(times[f"{verb} torch"], times[f"{verb} ours"], strict=True)
        ratios[verb] = statistics.median(torch_s / ours_s for torch_s, ours_s in pairs)
        middle = {kind: statistics.median(times[f"{verb} {kind}"]) for kind in ("ours", "torch")}
        print(
            f"  {verb}: {middle['ours']:7.3f} s ours, {middle['torch']:7.3f} s torch: {ratios[verb]:5.2f} times as fast"
        )
    return ratios


def main(argv: list[str] | None = None) -> int:
    """Run everything; returns 0 if every verdict is yes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--impl", default="fastimpl")
    parser.add_argument("--llama-bytes", type=int, default=2 * GIB)
    parser.add_argument("--report", type=Path, default=None)
    options = parser.parse_args(argv)
    options.work.mkdir(parents=True, exist_ok=True)
    pool = RankPool(options.impl)
    try:
        verdicts = _verdicts(pool, options.model, options.work, component(options.impl, "checkpoint"))
        print(f"\n{options.model.name} through {options.impl}")
        for name, verdict in verdicts.items():
            print(f"  {name}: {verdict}")
        size = options.model.stat().st_size
        model_times = pool.run(time_model, 2, str(options.model), str(options.work), timeout_s=300)
        ratios = {"model": _print_times("the model's float tensors in rows", model_times, size)}
        llama = pool.run(time_llama, 2, options.llama_bytes, str(options.work), timeout_s=900)
        ratios["llama"] = _print_times("a Llama-shaped state in rows", llama, options.llama_bytes)
    finally:
        pool.close()
        shutil.rmtree(options.work, ignore_errors=True)
    if options.report is not None:
        options.report.write_text(json.dumps({"verdicts": verdicts, "ratios": ratios}, indent=2) + "\n")
    return 0 if all(verdict.startswith("yes") for verdict in verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
