"""Tensors that wrap others, or whose memory was freed: stored by what they say they are, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_map

from conformance.checkpoint.cases import FILE, PT, load_with, oracle, random_bits, save_with
from conformance.harness import assert_equal, assert_same_bytes, assert_same_tensor, raises, requirement, succeeds
from twinproof.errors import UnsupportedError


class _Wrapper(torch.Tensor):
    """Integers and a scale that pass for float32."""

    numbers: torch.Tensor
    scale: float

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scale: float) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)
        made.numbers, made.scale = numbers, scale
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scale)
        return func(*tree_map(cls._answer, args), **tree_map(cls._answer, kwargs or {}))

    @staticmethod
    def _answer(value: Any) -> Any:
        return value.numbers.float() * value.scale if isinstance(value, _Wrapper) else value


class _Pair(_Wrapper):
    """One that stays a wrapper whatever is asked of it."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        found = func(*tree_map(cls._answer, args), **tree_map(cls._answer, kwargs or {}))
        return cls(found, 1.0) if isinstance(found, torch.Tensor) else found


def _freed(count: int) -> torch.Tensor:
    # As sharded training leaves what it has gathered.
    made = torch.ones(count)
    made.untyped_storage().resize_(0)
    return made


# Small ones are sent between ranks or put into a block, large ones are written from where they lie.
_COUNTS = (3, 40_000)
_NO_MEMORY: dict[str, Callable[[int], torch.Tensor]] = {
    "_Pair": lambda count: _Pair(torch.ones(count, dtype=torch.int8), 0.5),
    "Tensor": _freed,
}


def _ways(checkpoint: Any, path: Path) -> dict[str, Callable[[Any], None]]:
    writer = partial(checkpoint.HuggingFaceStorageWriter, path, block_bytes=4096, durable=False)
    return {
        "a save": lambda state: save_with(writer(), state),
        "shards": lambda state: save_with(writer(enable_consolidation=False), state),
        "replicas compared": lambda state: save_with(writer(check_replicas=True), state),
        "one file": lambda state: checkpoint.save_file(state, path),
    }


@requirement(
    "CKPT-830",
    "A tensor that wraps others MUST be stored as the values that it answers with, one that a collective is still to "
    "fill as what it fills; one without memory, a wrapper or freed, MUST be refused by name, and nothing be made.",
)
@pytest.mark.parametrize("count", _COUNTS)
def test_values_of_wrappers(checkpoint: Any, tmp_path: Path, count: int) -> None:
    numbers = random_bits(torch.int8, (count,), 1)
    wrapped = {"q": _Wrapper(numbers, 0.5), "sent": AsyncCollectiveTensor(numbers.float())}
    stored = oracle({"q": numbers.float() * 0.5, "sent": numbers.float()}, PT)
    for what, save in _ways(checkpoint, tmp_path / "ck").items():
        where = f"{what}, {count} values"
        for name, make in _NO_MEMORY.items():
            with raises(UnsupportedError, mentions=("without memory of its own", name, "lost"), where=where):
                save({"kept": torch.ones(2), "lost": make(count)})
            assert_equal(list(tmp_path.iterdir()), [], where=f"{where}: what a refused save made")
    for what in _ways(checkpoint, tmp_path):
        with succeeds(what, where=f"{count} values"):
            _ways(checkpoint, tmp_path / what)[what](wrapped)
    assert_same_bytes(tmp_path / "a save" / FILE, stored, where=f"a save of {count} values")
    loaded = checkpoint.load_file(tmp_path / "one file")
    assert_same_tensor(loaded["q"], numbers.float() * 0.5, where="one file, a wrapper")
    assert_same_tensor(loaded["sent"], numbers.float(), where="one file, what a collective fills")


@requirement(
    "CKPT-831",
    "A target that wraps others, or whose memory was freed, MUST be refused by name before anything is filled, by the "
    "plain reader and that of quantized tensors; what a collective has filled MUST be filled.",
)
@pytest.mark.parametrize("reader_name", ["HuggingFaceStorageReader", "QuantizedHuggingFaceStorageReader"])
def test_targets_that_wrap(checkpoint: Any, tmp_path: Path, reader_name: str) -> None:
    values = random_bits(torch.float8_e4m3fn, (5, 4), 2).float().nan_to_num(0.0)
    state: dict[str, torch.Tensor] = {"w.weight": values}
    if reader_name.startswith("Quantized"):
        state = {"w.weight": values.to(torch.float8_e4m3fn), "w.weight_scale_inv": torch.ones(1, 1)}
    checkpoint.save_file({**state, "other": torch.ones(2)}, tmp_path / "f.safetensors")
    kinds: Sequence[Any] = (
        _Wrapper(torch.ones(5, 4, dtype=torch.int8), 1.0),
        _Pair(torch.ones(5, 4, dtype=torch.int8), 1.0),
        _freed(20).view(5, 4),
    )
    for target in kinds:
        other, name = torch.zeros(2), type(target).__name__
        with raises(UnsupportedError, mentions=("without memory of its own", name, "w.weight"), where=name):
            load_with(
                getattr(checkpoint, reader_name)(tmp_path / "f.safetensors"), {"other": other, "w.weight": target}
            )
        assert_same_tensor(other, torch.zeros(2), where=f"another target beside {name}")
    plain = torch.zeros(5, 4)
    with succeeds("a load", where="what a collective has filled"):
        load_with(
            getattr(checkpoint, reader_name)(tmp_path / "f.safetensors"), {"w.weight": AsyncCollectiveTensor(plain)}
        )
    assert_same_tensor(plain, values, where="what a collective has filled")
