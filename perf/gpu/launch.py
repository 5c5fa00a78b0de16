"""One launch: the library loads, finds torch's current stream, and a kernel of it moves bytes that were checked.

python -m perf.gpu.launch --device cuda
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

import fastimpl
from fastimpl import ops

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """0 when the bytes are right."""
    parser = argparse.ArgumentParser(prog="perf.gpu.launch", description="One launch of the library.")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args(argv)
    info = fastimpl.build_info()
    print(f"architectures {', '.join(info.get('cuda_architectures', ())) or 'none'}; torch {info['torch']}")
    if given.device == "cuda" and not info["cuda_stream_symbol"]:
        print("torch's current CUDA stream was not found: no CUDA operator can run")
        return 1
    source = torch.arange(12.0, device=given.device).reshape(3, 4)
    dense = torch.zeros(48, dtype=torch.uint8, device=given.device)
    ops.strided_gather(source.t(), 0, dense)
    got, expected = dense.cpu().view(torch.float32).tolist(), source.t().reshape(-1).tolist()
    if got != expected:
        print(f"checkpoint_gather: got {got}, expected {expected}")
        return 1
    print(f"one launch on {torch.cuda.get_device_name() if given.device == 'cuda' else given.device} is right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
