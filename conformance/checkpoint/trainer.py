"""A trainer small enough to compare whole runs bit for bit: two layers, Adam with decay, a scheduler, a data loader."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

WIDTH = 6


class Loader:
    """Batches that follow from the number of those already given, which is its state."""

    def __init__(self) -> None:
        self.given_count = 0

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, [8, WIDTH]."""
        generator = torch.Generator().manual_seed(1000 + self.given_count)
        self.given_count += 1
        return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)

    def state_dict(self) -> dict[str, Any]:
        return {"given_count": self.given_count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.given_count = state_dict["given_count"]


class Counter:
    """The step, as trainers keep it."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = int(state_dict["step"])


class Trainer:
    """Model, optimizer, scheduler, loader, counter. ``mesh`` shards the model; ``seed`` makes its weights."""

    def __init__(self, seed: int, mesh: DeviceMesh | None = None) -> None:
        torch.manual_seed(seed)
        self.model: torch.nn.Module = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.GELU(), torch.nn.Linear(2 * WIDTH, WIDTH)
        )
        if mesh is not None:
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.loader, self.counter = Loader(), Counter()

    @property
    def states(self) -> dict[str, Any]:
        """What a manager saves beside model and optimizer."""
        return {"lr_scheduler": self.scheduler, "dataloader": self.loader, "train_state": self.counter}

    def manager(self, checkpoint: Any, folder: Any, **options: Any) -> Any:
        """A manager of everything here; saves at every second step unless told otherwise."""
        given = {"interval": 2, "durable": False, "states": self.states, "optimizers": self.optimizer, **options}
        return checkpoint.CheckpointManager(folder, model=self.model, **given)

    def train(self, manager: Any, until: int) -> list[float]:
        """Losses of the steps up to ``until``, the last one being the run's last."""
        losses = []
        while self.counter.step < until:
            losses.append(self.step())
            with alone():
                manager.save(self.counter.step, last_step=self.counter.step == until)
            # Before the states change again.
            manager.maybe_wait_for_staging()
        return losses

    def step(self) -> float:
        """One step; its loss."""
        inputs, targets = self.loader.next_batch()
        loss = mse_loss(self.model(inputs), targets)
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.counter.step += 1
        return float(loss.detach())

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of the weights, whole."""
        state = self.model.state_dict()
        return {n: v.full_tensor() if hasattr(v, "full_tensor") else v.clone() for n, v in state.items()}


@contextmanager
def alone() -> Iterator[None]:
    """Without torch's warning that one process saves or loads, which is what is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def load(manager: Any, step: int = -1) -> Any:
    """``manager.load``, without that warning."""
    with alone():
        return manager.load(step)


class Said:
    """An object that says what it was told, as any counter or data loader does."""

    def __init__(self, said: Any) -> None:
        self.said = said

    def state_dict(self) -> Any:
        return self.said

    def load_state_dict(self, state_dict: Any) -> None:
        self.said = state_dict


class Renamed:
    """torch's names <-> names of a checkpoint, with a prefix; one weight transposed, as Conv1D stores it."""

    fqn_to_index_mapping = {"h.0.weight": 1, "h.0.bias": 1, "h.2.weight": 2, "h.2.bias": 2}  # noqa: RUF012

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {f"h.{name}": value.t() if name == "2.weight" else value for name, value in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        names = {name.removeprefix("h."): value for name, value in hf_state_dict.items()}
        return {name: value.t() if name == "2.weight" else value for name, value in names.items()}


class Fused:
    """Both layers' biases in one tensor, as QKV and gate-up are fused."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        rest = {name: value for name, value in state_dict.items() if not name.endswith("bias")}
        return {**rest, "biases": torch.cat([state_dict["0.bias"], state_dict["2.bias"]])}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        first, second = hf_state_dict["biases"].split([12, 6])
        rest = {name: value for name, value in hf_state_dict.items() if name != "biases"}
        return {**rest, "0.bias": first, "2.bias": second}


class Split:
    """The first weight cut into two tensors, as QKV is split."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        rest = {name: value for name, value in state_dict.items() if name != "0.weight"}
        up, gate = state_dict["0.weight"].chunk(2)
        return {**rest, "up": up, "gate": gate}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        rest = {name: value for name, value in hf_state_dict.items() if name not in ("up", "gate")}
        return {**rest, "0.weight": torch.cat([hf_state_dict["up"], hf_state_dict["gate"]])}
