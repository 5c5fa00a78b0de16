"""Faults that ``test_scales`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched, swap

_SCALES = "twinproof.checkpoint.scales"

scales_of_other_forms_ignored = patched(
    "Weights whose scales have another name are loaded as plain numbers.",
    swap("twinproof.checkpoint.dcp:check_plain", lambda *arguments, **options: None),
    kills=("CKPT-911", "CKPT-912", "CKPT-913"),
)
integers_have_no_scales = patched(
    "Of 8-bit integers nobody asks for scales.",
    swap(f"{_SCALES}:_FEW_BITS", ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")),
    kills=("CKPT-911", "CKPT-912"),
)
every_weight_has_scales = patched(
    "A weight of any dtype with a scale beside it is taken for a quantized one.",
    mutated(f"{_SCALES}:check_plain", " and stored in _FEW_BITS else", " else"),
    kills="CKPT-912",
)
stored_numbers_refused = patched(
    "Nobody can read the stored numbers of quantized weights.",
    mutated(
        "twinproof.checkpoint.dcp:HuggingFaceStorageReader.targets",
        "if target.dtype != stored and self.cast:",
        "if self.cast:",
    ),
    mutated(f"{_SCALES}:check_plain", "if dtype.is_floating_point and stored in", "if stored in"),
    kills="CKPT-911",
)
scales_of_any_dtype = patched(
    "Nobody looks at the dtype of scales.",
    mutated("twinproof.checkpoint.dcp:_check_scales", "if scale.dtype not in dtypes:", "if False:"),
    kills="CKPT-986",
)
powers_of_two_refused = patched(
    "Scales that are powers of two alone are refused.",
    swap("twinproof.checkpoint.dcp:_FP8_SCALES", ("F32", "BF16", "F16", "F64")),
    kills="CKPT-986",
)
