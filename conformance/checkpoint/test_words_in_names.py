"""Models and states whose names have the words in them of which a checkpoint makes its own names."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.checkpoint.trainer import alone
from conformance.harness import assert_equal, assert_same_tensors, requirement, succeeds

_WORDS = ("optimizer", "state", "param_groups", "exp_avg", "model", "train_state", "step", "lr")


class _Model(torch.nn.Module):
    """A parameter at the end of each path of modules."""

    def __init__(self, paths: Sequence[tuple[str, ...]]) -> None:
        super().__init__()
        for number, (*outer, last) in enumerate(paths):
            module: torch.nn.Module = self
            for name in outer:
                if name not in dict(module.named_children()):
                    module.add_module(name, torch.nn.Module())
                module = getattr(module, name)
            module.register_parameter(last, torch.nn.Parameter(torch.arange(2.0) + number))


class _Run:
    """A model with an optimizer, which has stepped all parameters but those at ``left_out``."""

    def __init__(self, paths: Sequence[tuple[str, ...]], kind: Any, left_out: Sequence[int] | None = None) -> None:
        self.model = _Model(paths)
        self.optimizer = kind(self.model.parameters(), lr=0.1)
        if left_out is not None:
            for number, param in enumerate(self.model.parameters()):
                param.grad = None if number in left_out else torch.full_like(param, number + 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def values(self) -> dict[str, torch.Tensor]:
        """Copies of all parameters and their states."""
        found: dict[str, torch.Tensor] = {}
        for name, param in self.model.named_parameters():
            states = self.optimizer.state.get(param, {})
            found[name] = param.detach().clone()
            found |= {f"{name}: {key}": torch.as_tensor(value).clone() for key, value in states.items()}
        return found


def _moved(checkpoint: Any, folder: Path, saved: _Run, fresh: _Run, how: str) -> None:
    """Save one run and load the other."""
    with alone(), succeeds("saving and loading", where=how):
        if how == "training":
            checkpoint.save_training(folder, saved.model, saved.optimizer, 1, durable=False)
            checkpoint.load_training(folder, fresh.model, fresh.optimizer)
            return
        make = checkpoint.CheckpointManager
        options = {"interval": 1, "durable": False}
        with make(folder, model=saved.model, optimizers=saved.optimizer, **options) as manager:
            manager.save(1)
        with make(folder, model=fresh.model, optimizers=fresh.optimizer, **options) as manager:
            assert_equal(manager.load(), True, where="something was loaded")


@requirement(
    "CKPT-740",
    "Weights, and states of optimizers, MUST be saved and loaded whatever words stand in the names of parameters and "
    "modules, in any place and again and again: optimizer, state, param_groups, the names of states.",
)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_words_in_names(checkpoint: Any, tmp_path: Path, depth: int) -> None:
    # Names of one part may not be those of the checkpoint's own states, which is refused.
    words = [word for word in _WORDS if word not in ("optimizer", "train_state")] if depth == 1 else _WORDS[:4]
    paths = list(product(words, repeat=depth))
    for how in ("training", "manager"):
        saved, fresh = (_Run(paths, torch.optim.Adam, left_out) for left_out in (range(0, len(paths), 3), None))
        _moved(checkpoint, tmp_path / how, saved, fresh, how)
        assert_same_tensors(fresh.values(), saved.values(), where=f"{how}, {depth} words")


@requirement(
    "CKPT-745",
    "Names of parameters that look like those of an optimizer's states MUST NOT pass for them: a "
    "parameter without states stays so, and an optimizer that has none is not refused.",
)
def test_names_like_those_of_states(checkpoint: Any, tmp_path: Path) -> None:
    paths = [("w",), ("optimizer", "state", "w", "exp_avg_of_it"), ("z",), ("optimizer", "param_groups", "w")]
    for kind in (torch.optim.Adam, torch.optim.SGD):
        for how in ("training", "manager"):
            where = f"{kind.__name__}, {how}"
            saved, fresh = _Run(paths, kind, left_out=[0, 2]), _Run(paths, kind)
            _moved(checkpoint, tmp_path / where, saved, fresh, how)
            assert_same_tensors(fresh.values(), saved.values(), where=where)
