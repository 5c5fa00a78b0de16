"""Train a transformer under FSDP2, save it as Hugging Face files while training goes on, and resume on any ranks.

    torchrun --nproc-per-node 2 examples/fsdp2_checkpoint.py out/fsdp2             # trains, and saves on the way
    torchrun --nproc-per-node 2 examples/fsdp2_checkpoint.py out/fsdp2 --resume 4  # the same losses, bit for bit
    torchrun --nproc-per-node 3 examples/fsdp2_checkpoint.py out/fsdp2 --resume 4  # the same tensors, in other shards

Prints losses, and what it compared with them; exits with 1 where something differs. It needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from fastimpl.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

STEPS, SAVED_EVERY, BATCH, LENGTH, WORDS, WIDTH = 8, 4, 24, 8, 64, 64
# One name for each tensor, such as "state.layers.0.weight.exp_avg": a Hugging Face file holds no nested dicts.
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Model(torch.nn.Module):
    """A transformer that tells the last word of a sentence from those before it."""

    def __init__(self) -> None:
        super().__init__()
        layers = (torch.nn.TransformerEncoderLayer(WIDTH, 4, dropout=0.0, batch_first=True) for _ in range(2))
        self.layers = torch.nn.Sequential(torch.nn.Embedding(WORDS, WIDTH), *layers, torch.nn.Linear(WIDTH, WORDS))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return torch.nn.functional.cross_entropy(self.layers(words[:, :-1])[:, -1], words[:, -1])


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """One step on this rank's part of the batch of that step; returns the mean loss of all ranks."""
    first = torch.randint(WORDS, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    words = (first + 7 * torch.arange(LENGTH + 1)) % WORDS  # something that can be learned
    loss = model(words[dist.get_rank() :: dist.get_world_size()])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return float(mean)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters and optimizer states by name, as torch gives them. A new optimizer gets its states here."""
    weights, states = get_state_dict(model, optimizer, options=FLAT)
    return {"model": weights, "optimizer": states}


def tensors_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What the files hold: the learning rate and the like are no tensors, and the program sets them anyway."""
    pairs = ((f"{part}.{name}", value) for part, values in state.items() for name, value in values.items())
    return {name: value for name, value in pairs if isinstance(value, torch.Tensor)}


def resume(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load what any ranks have saved; compare it with what the safetensors library reads. Returns how many tensors."""
    state = state_of(model, optimizer)
    # The tensors are this rank's shards, filled where they lie: no rank holds the whole model.
    dcp.load(tensors_of(state), storage_reader=HuggingFaceStorageReader(folder, thread_count=2))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=FLAT)
    loaded = tensors_of(state_of(model, optimizer))
    saved = {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
    for name, value in loaded.items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        if not torch.equal(whole, saved.pop(name)):
            sys.exit(f"{name} differs from the file")
    return len(loaded)


def main() -> None:
    """Train from the beginning, or from a checkpoint."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", type=int, default=0, metavar="STEP")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")  # with GPUs "cpu:gloo,cuda:nccl": saves talk over gloo
    ranks, say = dist.get_world_size(), print if dist.get_rank() == 0 else lambda *_: None
    torch.manual_seed(0)
    model = Model()
    for layer in list(model.layers)[1:-1]:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if arguments.resume:
        count = resume(arguments.folder / f"step-{arguments.resume}", model, optimizer)
        say(f"resumed at step {arguments.resume} on {ranks} ranks: {count} tensors are those of the files")

    # Saves run beside the training, so they get a group of their own.
    group = dist.new_group(backend="gloo")
    saving: Any = None
    losses = []
    for step in range(arguments.resume, STEPS):
        losses.append(train_step(model, optimizer, step))
        if (step + 1) % SAVED_EVERY == 0 and not arguments.resume:
            if saving is not None:
                saving.result()  # one at a time, and its error comes out here
            writer = HuggingFaceStorageWriter(
                arguments.folder / f"step-{step + 1}", max_shard_size="1MB", process_group=group
            )
            saving = dcp.async_save(tensors_of(state_of(model, optimizer)), storage_writer=writer, process_group=group)
    say("losses", *losses)
    if saving is not None:
        saving.result()

    # What others take: the model alone, in bfloat16. All ranks write, each byte once.
    with HuggingFaceStorageWriter(arguments.folder / "model", export_dtype="bfloat16") as writer:
        dcp.save(model.state_dict(), storage_writer=writer)
    say(f"exported {sum(path.stat().st_size for path in (arguments.folder / 'model').iterdir())} bytes")

    record = arguments.folder / "losses.json"
    if not arguments.resume and dist.get_rank() == 0:
        record.write_text(json.dumps({"ranks": ranks, "losses": losses}))
    # Another number of ranks adds gradients in another order, so that its losses have other last bits.
    if arguments.resume and (whole := json.loads(record.read_text()))["ranks"] == ranks:
        if whole["losses"][arguments.resume :] != losses:
            sys.exit("the losses differ from those of the run that went through")
        say("the losses are those of the run that went through, bit for bit")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
