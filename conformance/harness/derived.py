"""Tolerances that are measured, never chosen: a chosen one hides the next bug or reports the last rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conformance.harness.compare import Mismatch, unravel

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["assert_within_derived"]


def assert_within_derived(
    fast: Tensor, naive_same_dtype: Tensor, upcast64: Tensor, *, factor: float = 2.0, where: str = ""
) -> None:
    """Demand that ``fast`` errs at most ``factor`` times as much as the naive computation in the same dtype.

    The rule is flash-attention's: the tolerance is measured, never chosen. Errors are maxima of absolute differences
    against ``upcast64``, the same computation in float64. Where the naive result is not finite, ``fast`` must agree
    with it, since no error can be derived there.

    Raises:
        Mismatch: with both errors and the worst index, or with the first difference in dtype, shape or finiteness.
    """
    __tracebackhide__ = True
    if fast.dtype != naive_same_dtype.dtype or not fast.shape == naive_same_dtype.shape == upcast64.shape:
        raise Mismatch(
            "dtype or shape differs",
            got=(fast.dtype, tuple(fast.shape)),
            expected=(naive_same_dtype.dtype, tuple(naive_same_dtype.shape), tuple(upcast64.shape)),
            where=where,
        )
    a, b, exact = (tensor.detach().cpu().double().reshape(-1) for tensor in (fast, naive_same_dtype, upcast64))
    finite = b.isfinite()
    odd = ~finite & ~((a == b) | (a.isnan() & b.isnan()))
    if bool(odd.any()):
        position = int(odd.nonzero()[0])
        place = f"{where}{list(unravel(position, tuple(fast.shape)))}"
        raise Mismatch("non-finite values differ", got=a[position].item(), expected=b[position].item(), where=place)
    if not bool(finite.any()):
        return
    errors = (a - exact).abs().masked_fill(~finite, 0.0)
    # A NaN in fast alone would vanish in a maximum; it counts as an infinite error instead.
    errors = errors.nan_to_num(nan=float("inf"), posinf=float("inf"))
    bound = factor * float((b - exact).abs().masked_fill(~finite, 0.0).max())
    worst = int(errors.argmax())
    if float(errors[worst]) > bound:
        raise Mismatch(
            f"error exceeds {factor} x the error of the naive computation",
            got=f"error {float(errors[worst])} (value {a[worst].item()})",
            expected=f"error <= {bound} (exact value {exact[worst].item()})",
            where=f"{where}{list(unravel(worst, tuple(fast.shape)))}",
        )
