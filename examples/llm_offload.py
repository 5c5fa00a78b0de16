"""Train a small language model in bfloat16 whose AdamW lives in host memory; save, and resume with the same losses.

    python examples/llm_offload.py out/llm

Gradients of four micro batches are accumulated; masters and moments are float32. On a GPU the optimizer steps there,
and its states are copied in and out behind it; without one it steps on the CPU. Prints losses, bytes, and what it
compared; exits with 1 where the resumed run differs from the one that went through.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from fastimpl.checkpoint import load_file, save_file
from fastimpl.offload import MasterWeights, OptimizerStateOffloader

STEPS, SAVED_AFTER, MICRO, BATCH, LENGTH, WIDTH = 8, 4, 4, 8, 32, 128
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TEXT = Path(__file__).read_bytes()  # the model reads the program that trains it, a byte at a time


class Model(torch.nn.Module):
    """A transformer over bytes."""

    def __init__(self) -> None:
        super().__init__()
        layers = (torch.nn.TransformerEncoderLayer(WIDTH, 4, dropout=0.0, batch_first=True) for _ in range(2))
        self.embedding, self.layers = torch.nn.Embedding(256, WIDTH), torch.nn.ModuleList(layers)
        self.head = torch.nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each byte from those before it."""
        hidden = self.embedding(text[:, :-1])
        mask = torch.nn.Transformer.generate_square_subsequent_mask(LENGTH, device=text.device, dtype=hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return torch.nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), text[:, 1:].flatten())


def micro_batch(step: int, number: int) -> torch.Tensor:
    """Pieces of the text, int64 [BATCH, LENGTH + 1], that follow from the step."""
    generator = torch.Generator().manual_seed(step * MICRO + number)
    begins = torch.randint(len(TEXT) - LENGTH - 1, (BATCH, 1), generator=generator)
    return torch.tensor(list(TEXT))[begins + torch.arange(LENGTH + 1)].to(DEVICE)


class Trainer:
    """Model, optimizer, and where its states live."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model().to(DEVICE, torch.bfloat16)
        # The optimizer is yours, given the masters in place of the parameters. The offloader attaches to it.
        self.masters = MasterWeights(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.masters.parameters(), lr=1e-3)
        where = "device" if DEVICE == "cuda" else "cpu"
        self.offloader = OptimizerStateOffloader(self.optimizer, master_weights=self.masters, step_device=where)

    def train(self, first: int, last: int) -> list[float]:
        """Steps ``first`` to ``last``; their losses."""
        losses = []
        for step in range(first, last):
            total = torch.zeros((), device=DEVICE)
            for number in range(MICRO):
                loss = self.model(micro_batch(step, number)) / MICRO
                loss.backward()
                total += loss.detach()
            self.offloader.prefetch()  # the first states may come in behind the last backward pass
            self.optimizer.step()  # it clears the gradients of masters and parameters
            losses.append(total.item())
        return losses

    def save(self, path: Path) -> None:
        """Save masters and moments by name. Parameters are masters, rounded: the file needs no copy of them."""
        states = self.offloader.snapshot()["state"]  # whole steps alone, whatever is on its way
        tensors = {}
        for number, (name, master) in enumerate(zip(self._names(), self.masters.parameters(), strict=True)):
            tensors[f"master.{name}"] = master.detach()
            tensors |= {f"{key}.{name}": value for key, value in states[number].items()}
        save_file(tensors, path)

    def load(self, path: Path) -> None:
        """Load into a new trainer. The step count comes with the moments, and options are the program's."""
        saved, keys = load_file(path), ("step", "exp_avg", "exp_avg_sq")
        states = {n: {key: saved[f"{key}.{name}"] for key in keys} for n, name in enumerate(self._names())}
        groups = self.optimizer.state_dict()["param_groups"]
        self.offloader.load_state_dict({"state": states, "param_groups": groups})
        self.offloader.load_masters([saved[f"master.{name}"] for name in self._names()])

    def _names(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters()]


def main() -> None:
    """Train, save on the way, resume, compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{SAVED_AFTER}.safetensors"
    whole = Trainer()
    losses = whole.train(0, SAVED_AFTER)
    whole.save(path)
    losses += whole.train(SAVED_AFTER, STEPS)
    print("losses", *losses)
    stats, parameters = whole.offloader.stats(), sum(param.numel() for param in whole.model.parameters())
    print(f"{parameters} parameters: {stats.payload_bytes} bytes of masters and moments in host memory")
    print(f"{stats.h2d_bytes} bytes went to the device, {stats.d2h_bytes} came from it")

    resumed = Trainer()
    resumed.load(path)
    if resumed.train(SAVED_AFTER, STEPS) != losses[SAVED_AFTER:]:
        sys.exit("the losses differ from those of the run that went through")
    for name, value in whole.model.state_dict().items():
        if not torch.equal(value, resumed.model.state_dict()[name]):
            sys.exit(f"{name} differs from the run that went through")
    print(f"resumed at step {SAVED_AFTER}: losses and parameters are those of the run that went through, bit for bit")


if __name__ == "__main__":
    main()
