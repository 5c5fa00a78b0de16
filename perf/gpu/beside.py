"""One call beside a copy of as many bytes on the same device, in rounds: what gates of kernels compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from perf.gpu.bandwidth import timed
from perf.harness.nvml import open_gpu
from perf.harness.paired import Round, Sample, interleave

__all__ = ["CONTENDERS", "beside_a_copy"]

CONTENDERS = ("ours", "copy", "four-times")


def beside_a_copy(
    call: Callable[[], object],
    moved_bytes: int,
    device: torch.device,
    *,
    contenders: Sequence[str],
    round_count: int,
    seed: int,
    call_count: int = 8,
    clean: Callable[[], object] = lambda: None,
    over_link: bool = False,
) -> list[Round]:
    """``seconds`` of a call, of the copy, and of the call made four times, which no gate may let pass.

    Args:
        call: what is measured. Samples are of several calls, so that the host's own work is hidden behind the device's.
        moved_bytes: the least that the call has to read and write; the copy reads one half and writes the other.
        device: of the copy, and whose events time it.
        contenders: some of ``CONTENDERS``.
        round_count: how often each contender is measured.
        seed: draws the order in each round.
        call_count: how many calls a sample has.
        clean: called after each sample, outside of it.
        over_link: the copy's half that is read lies in pinned memory of the host.
    """
    size_bytes = max(1, moved_bytes // 2)
    if over_link:
        source = torch.ones(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    else:
        source = torch.ones(size_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source, device=device)

    def sample(job: Callable[[], object], times: int) -> Sample:
        def several() -> None:
            for _ in range(call_count * times):
                job()

        found = {"seconds": timed(several, device)["seconds"] / call_count}
        clean()
        return found

    runs: dict[str, Callable[[], Sample]] = {
        "ours": partial(sample, call, 1),
        "copy": partial(sample, lambda: target.copy_(source, non_blocking=True), 1),
        "four-times": partial(sample, call, 4),
    }
    with open_gpu() as gpu:
        return interleave({name: runs[name] for name in contenders}, round_count=round_count, seed=seed, gpu=gpu)
