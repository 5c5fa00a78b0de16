"""Bandwidth of a CUDA operator's kernels beside a device copy of as many bytes, interleaved in the same run.

    python -m perf.gpu.bandwidth pipeline_pool --device cuda --json rate.json

The share is the median over rounds of copy seconds by operator seconds: 1 means that the operator moves what its task
demands at the rate of a copy. A sample is several calls, one behind the other, so that the host's own work is hidden
behind the device's; uploads and waits for the host are not.
With ``--device cpu`` this is a rehearsal, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from fastimpl import ops
from perf.gpu.operators import OperatorCall, calls_of, on_device, outputs
from perf.harness.paired import Sample, interleave

__all__ = ["Rate", "main", "measure", "timed"]

_COUNTS = (1_000_000, 8_000_000)
_ROUNDS = 9
_CALLS = 8
_SECONDS = 40.0


@dataclass(frozen=True)
class Rate:
    """Of one call: every round's seconds a call, the copy's of the same rounds, and the share."""

    operator: str
    label: str
    count: int
    moved_bytes: int
    seconds: list[float]
    copy_seconds: list[float]
    share: float


def timed(job: Callable[[], object], device: torch.device) -> Sample:
    """Seconds of a job: on a GPU between two events of its stream, which leaves the host's own work out of it."""
    if device.type != "cuda":
        begun = time.perf_counter()
        job()
        return {"seconds": time.perf_counter() - begun}
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    first.record()
    job()
    last.record()
    last.synchronize()
    return {"seconds": first.elapsed_time(last) / 1e3}


def _repeated(call: Callable[[], object]) -> None:
    for _ in range(_CALLS):
        call()


def measure(operator: str, call: OperatorCall, *, count: int, device: torch.device, round_count: int) -> Rate:
    """Operator and copy, interleaved. A copy of n bytes reads and writes n, so that it is given half of them."""
    arguments = on_device(call.arguments, device)
    source = torch.ones(max(1, call.moved_bytes // 2), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    calls: dict[str, Callable[[], object]] = {
        "operator": lambda: outputs(operator, arguments),
        "copy": lambda: target.copy_(source),
    }
    jobs = {name: partial(_repeated, call) for name, call in calls.items()}
    contenders = {name: partial(timed, job, device) for name, job in jobs.items()}
    rounds = interleave(contenders, round_count=round_count, seed=0)
    ours, copies = ([each[name]["seconds"] / _CALLS for each in rounds] for name in ("operator", "copy"))
    share = statistics.median(copy / own for own, copy in zip(ours, copies, strict=True))
    return Rate(operator, call.label, count, call.moved_bytes, ours, copies, share)


def _rates(operator: str, device: torch.device, counts: Sequence[int], seconds: float, rounds: int) -> Iterator[Rate]:
    """Of every call that there is time for; the others are named."""
    calls, ends = calls_of(operator), time.monotonic() + seconds
    if calls is None:
        return
    for count in counts:
        for call in calls(count, torch.Generator().manual_seed(count)):
            if time.monotonic() > ends:
                print(f"{operator}: {count}, {call.label} and what follows are left out: {seconds:.0f} s are over")
                return
            rate = measure(operator, call, count=count, device=device, round_count=rounds)
            size, median_s = rate.moved_bytes / 1e9, statistics.median(rate.seconds)
            print(
                f"{operator}: {count}, {rate.label}: {size / median_s:.1f} GB/s, {rate.share:.3f} of a copy", flush=True
            )
            yield rate


def main(argv: Sequence[str] | None = None) -> int:
    """0 when something was measured; the figures are judged by gates, not here."""
    parser = argparse.ArgumentParser(prog="perf.gpu.bandwidth", description="Bandwidth of a CUDA operator.")
    parser.add_argument("operator")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--counts", type=int, nargs="+", default=_COUNTS, help="of ids or elements")
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="no call is begun after so many")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every sample")
    given = parser.parse_args(argv)
    if given.operator not in ops.cuda_operators():
        parser.error(f"no CUDA operator of that name: {given.operator}")
    device = torch.device(given.device)
    # The collector runs before every sample: what was imported need not be looked at each time.
    gc.freeze()
    rates = list(_rates(given.operator, device, given.counts, given.seconds, given.rounds))
    if given.json is not None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"rehearsal on {device}"
        found = {"device": name, "rates": [asdict(rate) for rate in rates]}
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if not rates:
        print(f"{given.operator}: nothing was measured")
        return 1
    shares = sorted(rate.share for rate in rates)
    print(f"{given.operator}: {len(rates)} calls, shares of a copy {shares[0]:.3f} to {shares[-1]:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
