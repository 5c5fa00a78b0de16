"""Batches that are copied ahead on a stream of their own, as a training loop would; nothing here knows of a prover.

    twinproof race examples/race_prefetch.py                      # no hazard, exit status 0
    twinproof race examples/race_prefetch.py --forget wait        # exit status 1, with both lines of each hazard
    twinproof race --trace trace.html examples/race_prefetch.py --forget record

``--forget`` leaves one edge out: ``wait`` (the step does not wait for its batch), ``record`` (the allocator is not told
that the step reads the batch), ``synchronize`` (the host fills a buffer again that may not be copied yet) or
``read`` (the host reads the loss before it is there). With a GPU ``python examples/race_prefetch.py`` runs as well.
"""

from __future__ import annotations

import argparse

import torch

STEPS = 4


def fill(buffer: torch.Tensor, step: int) -> None:
    """What a loader does: write the next batch into a buffer of the host."""
    buffer.copy_(torch.full_like(buffer, float(step)))


def train(forget: str) -> float:
    """The mean loss of a few steps."""
    model = torch.nn.Linear(16, 1).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    buffers = [torch.empty(32, 16, pin_memory=True) for _ in range(2)]
    copied = [torch.cuda.Event() for _ in buffers]  # type: ignore[no-untyped-call]
    total = torch.zeros((), device="cuda")

    def fetch(step: int) -> torch.Tensor:
        turn = step % len(buffers)
        if forget != "synchronize":
            copied[turn].synchronize()
        fill(buffers[turn], step)
        with torch.cuda.stream(side):
            batch = buffers[turn].to("cuda", non_blocking=True)
            copied[turn].record()
        return batch

    ahead = fetch(0)
    for step in range(STEPS):
        if forget != "wait":
            torch.cuda.current_stream().wait_event(copied[step % len(buffers)])
        batch = ahead
        if forget != "record":
            batch.record_stream(torch.cuda.current_stream())
        ahead = fetch(step + 1)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    result = total.to("cpu", non_blocking=True)
    if forget != "read":
        torch.cuda.current_stream().synchronize()
    return result.item() / STEPS


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--forget", choices=("wait", "record", "synchronize", "read"), default="")
    print(f"mean loss {train(parser.parse_args().forget):.4f}")
