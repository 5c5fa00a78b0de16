"""Fine-tune a published model in bfloat16 with its optimizer state and float32 masters offloaded; save, and resume.

Shows: `MasterWeights` and `OptimizerStateOffloader` around a plain `torch.optim.AdamW`, a checkpoint of parameters,
masters and moments, and a second run that continues from it. The text is the standard library's docstrings, tokenised
with the model's own vocabulary: each summary has to find its own docstring in the batch. Losses and every tensor of the
resumed, offloaded run must equal, bit for bit, those of the plain one. There is no GPU: a virtual device stands in, and
proves every stream program on the way.

Run it with the extra "test" installed; MODEL is a folder that `transformers` reads:

    python examples/offload_fine_tuning.py --model FOLDER --work FOLDER [--impl PACKAGE] [--report FILE.json]

Prints the verdict, "yes" or "NO" and why, and then parameters, losses, and bytes moved. Exits with 1 if it is NO.
The checkpoint stays in FOLDER.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from conformance.harness import Mismatch, assert_equal, assert_same_tensor
from conformance.harness.implementation import component
from conformance.provers.virtual_device import VirtualDevice

STEPS, SAVED_AFTER, BATCH, TOKENS = 6, 3, 8, 32


def _texts(count: int) -> list[tuple[str, str]]:
    """(summary, rest) of docstrings of the standard library, in the order of its files."""
    found: list[tuple[str, str]] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                summary, _, rest = (ast.get_docstring(node) or "").partition("\n")
                if len(summary) > 20 and len(rest) > 40:
                    found.append((summary, " ".join(rest.split())))
        if len(found) >= count:
            return found[:count]
    raise Mismatch("the standard library has too few docstrings", got=len(found), expected=count)


class Run:
    """One training run, from the published weights or from a checkpoint."""

    def __init__(self, model: Path, implementation: str, device: VirtualDevice | None) -> None:
        from transformers import AutoModel, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        how: dict[str, Any] = {"padding": "max_length", "truncation": True, "max_length": TOKENS}
        self.batches = [
            [tokenizer([pair[side] for pair in pairs], return_tensors="pt", **how) for side in (0, 1)]
            for pairs in _in_batches(_texts(STEPS * BATCH))
        ]
        self.model = AutoModel.from_pretrained(model).to(torch.bfloat16).eval()
        self.names = [name for name, param in self.model.named_parameters() if param.requires_grad]
        offload = component(implementation, "offload")
        self.masters = offload.MasterWeights([p for p in self.model.parameters() if p.requires_grad])
        self.optimizer = torch.optim.AdamW(self.masters.parameters(), lr=1e-4, foreach=False)
        self.device = device
        self.offloader: Any = None
        if device is None:
            self.masters.attach(self.optimizer)
        else:
            with device:
                self.offloader = offload.OptimizerStateOffloader(
                    self.optimizer, engine=device.engine, master_weights=self.masters, chunk_bytes=8 << 20
                )

    def _embed(self, tokens: Any) -> torch.Tensor:
        hidden = self.model(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        pooled = (hidden * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(pooled.float(), dim=-1)

    def train(self, first: int, last: int) -> list[float]:
        """Steps ``first`` to ``last``: each summary has to find its own docstring in the batch."""
        losses = []
        for summaries, rests in self.batches[first:last]:
            scores = self._embed(summaries) @ self._embed(rests).T * 20
            loss = torch.nn.functional.cross_entropy(scores, torch.arange(BATCH))
            torch.autograd.backward(loss)
            with self._watched():
                self.optimizer.step()
            losses.append(loss.item())
        return losses

    def _watched(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.device is None else self.device

    def state(self) -> dict[str, torch.Tensor]:
        """Everything a resumed run needs, by name: parameters, masters and moments where they lie, step counts."""
        if self.offloader is not None:
            with self._watched():
                self.offloader.settle()
        found = {f"model.{name}": value.detach() for name, value in self.model.state_dict().items()}
        for name, master in zip(self.names, self.masters.parameters(), strict=True):
            found[f"master.{name}"] = master.detach()
            found.update({f"optimizer.{name}.{key}": value for key, value in self.optimizer.state[master].items()})
        return found

    def resume(self, saved: dict[str, torch.Tensor]) -> None:
        """Continue from what a checkpoint holds."""
        groups = self.optimizer.state_dict()["param_groups"]
        state = {}
        for number, name in enumerate(self.names):
            # A parameter that never had a gradient, the unused pooler's, has no state.
            if f"optimizer.{name}.step" in saved:
                state[number] = {key: saved[f"optimizer.{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}
        counts = {number: float(found["step"]) for number, found in state.items()}
        with self._watched():
            # Counters are scalars of the host, which the device has to know: what was read from a file it has not seen.
            for number, count in counts.items():
                state[number]["step"] = torch.tensor(count)
            self.offloader.load_state_dict({"state": state, "param_groups": groups})
            self.offloader.load_masters([saved[f"master.{name}"] for name in self.names])


def _in_batches(texts: list[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    for first in range(0, len(texts), BATCH):
        yield texts[first : first + BATCH]


def _save(checkpoint: Any, state: dict[str, torch.Tensor], folder: Path) -> None:
    with warnings.catch_warnings(), checkpoint.HuggingFaceStorageWriter(folder, save_distributed=False) as writer:
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(dict(state), storage_writer=writer, no_dist=True)


def _load(checkpoint: Any, like: dict[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    targets = {name: torch.empty_like(value, memory_format=torch.contiguous_format) for name, value in like.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(dict(targets), storage_reader=checkpoint.HuggingFaceStorageReader(folder), no_dist=True)
    return targets


def prove(model: Path, work: Path, implementation: str) -> dict[str, Any]:
    """Run all three; raises Mismatch. Returns facts for the report."""
    checkpoint = component(implementation, "checkpoint")
    plain = Run(model, implementation, None)
    losses = plain.train(0, STEPS)
    device = VirtualDevice(late=True)
    first = Run(model, implementation, device)
    again = first.train(0, SAVED_AFTER)
    _save(checkpoint, first.state(), work / "checkpoint")
    saved = _load(checkpoint, first.state(), work / "checkpoint")
    device.check()
    resumed_on = VirtualDevice(late=True)
    second = Run(model, implementation, resumed_on)
    second.resume(saved)
    again += second.train(SAVED_AFTER, STEPS)
    assert_equal(again, losses, where="losses")
    expected, got = plain.state(), second.state()
    assert_equal(sorted(got), sorted(expected), where="names")
    for name, value in expected.items():
        assert_same_tensor(got[name], value, where=name)
    resumed_on.check()
    stats = second.offloader.stats()
    return {
        "parameters": sum(p.numel() for p in plain.model.parameters()),
        "tensors_compared": len(expected),
        "losses": losses,
        "payload_bytes": stats.payload_bytes,
        "chunks": stats.chunk_count,
        "moved_bytes": resumed_on.engine.moved_bytes,
    }


def main(words: list[str] | None = None) -> int:
    """Run everything; returns 0 if the verdict is yes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of a published model")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--impl", default="fastimpl")
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args(words)
    arguments.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(2)
    begun = time.perf_counter()
    try:
        facts = {"verdict": "yes", **prove(arguments.model, arguments.work, arguments.impl)}
    except Mismatch as error:
        facts = {"verdict": "NO", "reason": str(error)}
    facts["seconds"] = round(time.perf_counter() - begun, 1)
    print("offloaded, saved after 3 steps, resumed: equal to the plain run, bit for bit:", facts["verdict"])
    for name, value in facts.items():
        print(f"  {name:18} {value}")
    if arguments.report is not None:
        arguments.report.write_text(json.dumps(facts, indent=1) + "\n")
    return 0 if facts["verdict"] == "yes" else 1


if __name__ == "__main__":
    sys.exit(main())
