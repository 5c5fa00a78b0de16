"""Weights of few bits that have scales beside them are never loaded as plain numbers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from conformance.checkpoint.cases import load, load_with, random_bits
from conformance.checkpoint.trainer import alone
from conformance.harness import assert_equal, assert_same_tensor, raises, requirement, succeeds
from twinproof.errors import PlanError, UnsupportedError

FP8, INT8, UINT8 = torch.float8_e4m3fn, torch.int8, torch.uint8
FILE = "model.safetensors"
# What is asked for, its stored dtype, the scales beside it and their shape.
_UNKNOWN: dict[str, tuple[str, torch.dtype, str, tuple[int, ...]]] = {
    "one for each row (compressed-tensors, vLLM)": ("x.weight", FP8, "x.weight_scale", (8, 1)),
    "one for each tensor": ("x.weight", FP8, "x.weight_scale", ()),
    "one in a vector": ("x.weight", torch.float8_e5m2, "x.weight_scale", (1,)),
    "of int8": ("x.weight", INT8, "x.weight_scale", (8, 1)),
    "DeepSeek's own names": ("x.weight", FP8, "x.scale", (1, 1)),
    "bitsandbytes": ("x.weight", INT8, "x.SCB", (8,)),
    "bitsandbytes of 4 bits": ("x.weight", UINT8, "x.weight.absmax", (2,)),
    "ModelOpt's of 4 bits": ("x.weight", UINT8, "x.weight_scale", (8, 1)),
    "experts": ("experts.up", FP8, "experts.up_scale", (1,)),
    "experts in blocks": ("experts.up", FP8, "experts.up_scale_inv", (1, 1)),
    "a model without parts": ("weight", FP8, "weight_scale_inv", (1, 1)),
}


def _file(checkpoint: Any, folder: Path, name: str, dtype: torch.dtype, scales: str, shape: tuple[int, ...]) -> Path:
    folder.mkdir()
    state = {name: random_bits(dtype, (8, 8), 1), scales: torch.full(shape, 0.5), "plain": torch.ones(2)}
    checkpoint.save_file(state, folder / FILE)
    return folder


def _quantized(checkpoint: Any, folder: Path, name: str, target: torch.Tensor) -> torch.Tensor:
    load_with(checkpoint.QuantizedHuggingFaceStorageReader(folder), {name: target})
    return target


@requirement(
    "CKPT-911",
    "Weights of 8 bits or fewer with scales of a form that is not known MUST be refused by name by a reader of "
    "quantized weights, targets unchanged, unless they are asked for in the dtype that they have; such weights without "
    "scales, and other tensors beside them, MUST be loaded.",
)
def test_scales_of_other_forms(checkpoint: Any, tmp_path: Path) -> None:
    for number, (what, (name, dtype, scales, shape)) in enumerate(_UNKNOWN.items()):
        folder = _file(checkpoint, tmp_path / f"{number}", name, dtype, scales, shape)
        for wide in (torch.float32, torch.bfloat16):
            target = torch.full((8, 8), 3.0, dtype=wide)
            told = ("form that is not known", scales, f"{folder / FILE}: tensor {name!r}")
            with raises(UnsupportedError, mentions=told, where=f"{what}, {wide}"):
                _quantized(checkpoint, folder, name, target)
            assert_same_tensor(target, torch.full((8, 8), 3.0, dtype=wide), where=f"{what}: the target")
        expected = random_bits(dtype, (8, 8), 1)
        with succeeds("a load", where=f"{what}, as it is stored"):
            found = _quantized(checkpoint, folder, name, torch.zeros(8, 8, dtype=dtype))
            other = _quantized(checkpoint, folder, "plain", torch.zeros(2, dtype=torch.bfloat16))
        assert_same_tensor(found, expected, where=f"{what}, as it is stored")
        assert_same_tensor(other, torch.ones(2, dtype=torch.bfloat16), where=f"{what}: another tensor")
    alone_there = {
        "x.weight": torch.arange(8.0).to(FP8),
        "y.weight_scale": torch.ones(1),
        "x.weights_scale": torch.ones(1),
    }
    checkpoint.save_file(alone_there, tmp_path / FILE)
    with succeeds("a load", where="without scales"):
        found = _quantized(checkpoint, tmp_path / FILE, "x.weight", torch.zeros(8))
    assert_same_tensor(found, torch.arange(8.0), where="without scales")


# What plain readers must not take for plain: what the others know, too.
_KNOWN: dict[str, tuple[str, torch.dtype, str, tuple[int, ...]]] = {
    "blocks of 8-bit floats": ("x.weight", FP8, "x.weight_scale_inv", (1, 1)),
    "MXFP4": ("x_blocks", UINT8, "x_scales", (8,)),
}


@requirement(
    "CKPT-912",
    "A reader with cast=True MUST refuse, by name and with what to do, to convert weights that have scales beside them "
    "to another floating-point dtype, targets unchanged; the stored numbers MUST be read into targets of their dtype, "
    "and numbers of wider dtypes be converted whatever is beside them.",
)
def test_plain_readers_refuse_scaled(checkpoint: Any, tmp_path: Path) -> None:
    for number, (what, (name, dtype, scales, shape)) in enumerate({**_UNKNOWN, **_KNOWN}.items()):
        folder = _file(checkpoint, tmp_path / f"{number}", name, dtype, scales, shape)
        target = torch.full((8, 8), 3.0)
        told = ("without their scales", scales, "QuantizedHuggingFaceStorageReader", f"tensor {name!r}")
        with raises(PlanError, mentions=told, where=what):
            load(checkpoint, {name: target}, folder, cast=True)
        assert_same_tensor(target, torch.full((8, 8), 3.0), where=f"{what}: the target")
        stored = torch.zeros(8, 8, dtype=dtype)
        with succeeds("a load", where=f"{what}, as it is stored"):
            load(checkpoint, {name: stored}, folder, cast=True)
        assert_same_tensor(stored, random_bits(dtype, (8, 8), 1), where=f"{what}, as it is stored")
        with raises(PlanError, mentions=("dtypes differ", name), where=f"{what}, without cast"):
            load(checkpoint, {name: target}, folder)
    checkpoint.save_file({"x.weight": torch.ones(2, dtype=torch.bfloat16), "x.scale": torch.ones(1)}, tmp_path / FILE)
    target = torch.zeros(2)
    with succeeds("a load", where="a scale of a layer beside a wide weight"):
        load(checkpoint, {"x.weight": target}, tmp_path / FILE, cast=True)
    assert_same_tensor(target, torch.ones(2), where="a scale of a layer beside a wide weight")


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = torch.nn.Linear(8, 8, bias=False)


@requirement(
    "CKPT-913",
    "A manager's initial load MUST NOT take quantized weights for plain ones: without initial_load_in_hf_quantized it "
    "is refused with that option's name, the model unchanged; with it the model has the values.",
)
def test_initial_loads_of_quantized(checkpoint: Any, tmp_path: Path) -> None:
    folder = _file(checkpoint, tmp_path / "first", *_KNOWN["blocks of 8-bit floats"])
    values = torch.arange(64.0).reshape(8, 8).to(FP8)
    checkpoint.save_file({"x.weight": values, "x.weight_scale_inv": torch.full((1, 1), 0.5)}, folder / FILE)
    for is_told in (False, True):
        model = _Model()
        before = model.x.weight.detach().clone()
        options = {"initial_load_in_hf": True, "initial_load_in_hf_quantized": True} if is_told else {}
        given = {"interval": 1, "initial_load_path": folder, **options}
        with alone(), checkpoint.CheckpointManager(tmp_path / "run", model=model, **given) as manager:
            if is_told:
                with succeeds("a load", where="told"):
                    assert_equal(manager.load(), True, where="loaded")
            else:
                told = ("initial_load_in_hf_quantized", "x.weight_scale_inv", os.fspath(folder))
                with raises(PlanError, mentions=told, where="not told"):
                    manager.load()
        expected = values.float() * 0.5 if is_told else before
        assert_same_tensor(model.x.weight.detach(), expected, where=f"{is_told=}")


@requirement(
    "CKPT-986",
    "Scales of another dtype than their form's, uint8 of MXFP4 and floats of 8-bit weights, MUST be refused by name by "
    "a reader of quantized weights, targets unchanged; scales of floats that are powers of two alone MUST be taken.",
)
def test_dtypes_of_scales(checkpoint: Any, tmp_path: Path) -> None:
    powers = torch.tensor([[126], [129]], dtype=torch.uint8)
    weights = {"x.weight": random_bits(FP8, (8, 4), 1), "x_blocks": random_bits(UINT8, (2, 1, 4), 2)}
    beside = {"x.weight": "x.weight_scale_inv", "x_blocks": "x_scales"}
    wrong: dict[str, tuple[torch.Tensor, ...]] = {
        "x.weight": (powers, powers.int(), powers > 126, powers.to(torch.complex64)),
        "x_blocks": (powers.view(torch.int8), powers.view(torch.float8_e8m0fnu), powers.float(), powers.int()),
    }
    for name, scales in wrong.items():
        for given in scales:
            path = tmp_path / f"{name}-{given.dtype}.safetensors"
            checkpoint.save_file({name: weights[name], beside[name]: given}, path)
            target = torch.full((8, 4) if name == "x.weight" else (2, 8), 3.0)
            with raises(UnsupportedError, mentions=("another dtype", beside[name]), where=f"{name}, {given.dtype}"):
                load_with(checkpoint.QuantizedHuggingFaceStorageReader(path, block_size=4), {name: target})
            assert_equal(bool((target == 3.0).all()), True, where=f"{name}, {given.dtype}: the target is unchanged")
    found = {}
    for given in (powers.view(torch.float8_e8m0fnu), powers.view(torch.float8_e8m0fnu).float()):
        path = tmp_path / f"{given.dtype}.safetensors"
        checkpoint.save_file({"x.weight": weights["x.weight"], "x.weight_scale_inv": given}, path)
        found[given.dtype] = torch.empty(8, 4)
        with succeeds("a load", where=f"scales of {given.dtype}"):
            reader = checkpoint.QuantizedHuggingFaceStorageReader(path, block_size=4)
            load_with(reader, {"x.weight": found[given.dtype]})
    assert_same_tensor(found[torch.float8_e8m0fnu], found[torch.float32], where="the weights")
