"""Scales beside weights of few bits: whoever reads such weights as plain numbers without them gets another model.

The names are those of compressed-tensors, vLLM and ModelOpt (``X.weight_scale``), DeepSeek (``X.weight_scale_inv``,
``X.scale``), bitsandbytes (``X.SCB``, ``X.weight.absmax``) and gpt-oss (``X_scales`` beside ``X_blocks``).
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

import torch

from twinproof.checkpoint.format import torch_dtype
from twinproof.errors import PlanError, UnsupportedError

if TYPE_CHECKING:
    from twinproof.checkpoint.catalog import Catalog

__all__ = ["check_plain"]

_FEW_BITS = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "F4")


def scales_of(names: Container[str], name: str) -> str | None:
    """The name of the scales that a weight has among these names, if any."""
    stem, dot, last = name.rpartition(".")
    candidates = [f"{name}{suffix}" for suffix in ("_scale", "_scale_inv", "_scales", "_scale_2", ".absmax", ".scale")]
    if last == "weight":
        candidates += [f"{stem}{dot}{beside}" for beside in ("scale", "scales", "SCB")]
    if name.endswith("_blocks"):
        candidates.append(f"{name.removesuffix('_blocks')}_scales")
    return next((each for each in candidates if each in names), None)


def check_plain(catalog: Catalog, name: str, dtype: torch.dtype, *, reads_scales: bool) -> None:
    """Demand that a stored tensor means its own numbers where it is converted to another floating-point dtype.

    Args:
        catalog: has the tensor, and its scales if there are any.
        name: of the tensor.
        dtype: of the target.
        reads_scales: whether the reader multiplies by scales of the forms that it knows, and these are of another.

    Raises:
        PlanError: a plain reader. UnsupportedError: one of quantized weights; floats of 4 bits.
    """
    stored = catalog.tensors[name].dtype
    scales = scales_of(catalog.tensors, name) if dtype.is_floating_point and stored in _FEW_BITS else None
    if scales is None:
        if torch.float4_e2m1fn_x2 in (dtype, torch_dtype(stored)):
            raise UnsupportedError(
                "torch converts no floats of 4 bits",
                got=f"{stored} for a target of {dtype}",
                expected="a target of the stored dtype",
                where=catalog.where(name),
            )
        return
    got = f"{stored} beside {scales}, for a target of {dtype}"
    if reads_scales:
        raise UnsupportedError(
            "quantized weights of a form that is not known",
            got=got,
            expected="X.weight of 8-bit floats with X.weight_scale_inv of blocks, or X_blocks with X_scales",
            where=catalog.where(name),
        )
    raise PlanError(
        "quantized weights would be loaded without their scales",
        got=got,
        expected="QuantizedHuggingFaceStorageReader (initial_load_in_hf_quantized), or a target of the stored dtype",
        where=catalog.where(name),
    )
