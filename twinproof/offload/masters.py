"""Half-precision parameters with float32 masters: the optimizer steps the masters, the model gets them rounded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from twinproof.errors import ConfigError, PlanError, StaleMasterError
from twinproof.offload.states import local_of

__all__ = ["MasterWeights"]


def check_params(params: Any) -> list[torch.Tensor]:
    """Demand tensors. Raises ConfigError."""
    expected = "the parameters themselves: model.parameters()"
    if isinstance(params, (str, torch.Tensor, torch.nn.Module)) or not isinstance(params, Iterable):
        raise ConfigError("not parameters", got=type(params).__name__, expected=expected, where="params")
    found = list(params)
    wrong = sorted({type(each).__name__ for each in found if not isinstance(each, torch.Tensor)})
    if wrong:
        raise ConfigError("not parameters", got=wrong, expected=expected, where="params")
    return found


class MasterWeights:
    """Float32 copies of half-precision parameters, to be given to an optimizer in their place.

    ::

        masters = MasterWeights(model.parameters())
        optimizer = torch.optim.AdamW(masters.parameters())
        masters.attach(optimizer)            # or OptimizerStateOffloader(optimizer, master_weights=masters)

    At each step the gradients of the model's parameters are taken (and cleared), the masters are stepped in float32,
    and the model gets them rounded to nearest even. Float32 parameters are their own masters.

    Args:
        params: floating-point parameters; DTensors keep their placement.

    Raises:
        ConfigError: a parameter that is not floating-point, or one that is there twice.
    """

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        self.pairs: dict[torch.Tensor, torch.Tensor] = {}
        self._versions: dict[torch.Tensor, int] = {}
        seen: set[torch.Tensor] = set()
        params = check_params(params)
        for param in params:
            if not param.is_floating_point() or param.dtype.itemsize > 4 or param in seen:
                raise ConfigError(
                    "masters need distinct floating-point parameters of at most 32 bits",
                    got=param.dtype,
                    where="params",
                )
            seen.add(param)
            master = param if param.dtype is torch.float32 else torch.nn.Parameter(param.detach().float())
            self.pairs[master] = param
            self._note(master)

    def parameters(self) -> Iterator[torch.Tensor]:
        """The masters, in the order of the parameters."""
        return iter(self.pairs)

    def attach(self, optimizer: Optimizer) -> None:
        """Run before and after every step of a plain optimizer. Not with an offloader, which does it chunk by chunk."""
        optimizer.register_step_pre_hook(lambda *_: self.start(self.pairs))
        optimizer.register_step_post_hook(lambda *_: self.end(self.pairs))

    def check_stepped_by(self, optimizer: Optimizer) -> None:
        """Raise ConfigError when the optimizer does not step these masters, and nothing else."""
        stepped = {param for group in optimizer.param_groups for param in group["params"]}
        if stepped != set(self.pairs):
            raise ConfigError(
                "the optimizer has to step the masters, and nothing else",
                got=f"{len(stepped - set(self.pairs))} others, {len(set(self.pairs) - stepped)} masters missing",
                expected="optimizer(master_weights.parameters())",
                where="master_weights",
            )

    def start(self, masters: Iterable[torch.Tensor]) -> None:
        """``check``, then ``begin``."""
        self.check(masters)
        self.begin(masters)

    def check(self, masters: Iterable[torch.Tensor]) -> None:
        """Before anything of a step happens.

        Raises:
            StaleMasterError: a parameter was written in place since its last rounding, by a loaded model for instance.
                Writes through ``.data`` are not seen.
        """
        for master in masters:
            param = self.pairs[master]
            if param is not master and local_of(param)._version != self._versions[master]:
                raise StaleMasterError(
                    "a parameter changed behind its master's back: call refresh_masters()",
                    got=f"version {local_of(param)._version}",
                    expected=f"version {self._versions[master]}",
                    where=f"parameter of shape {tuple(param.shape)}",
                )

    def begin(self, masters: Iterable[torch.Tensor]) -> None:
        """Give these masters the gradients of their parameters, in float32."""
        for master in masters:
            param = self.pairs[master]
            if param is not master:
                master.grad = None if param.grad is None else param.grad.to(torch.float32)

    @torch.no_grad()
    def end(self, masters: Iterable[torch.Tensor]) -> None:
        """Round these masters into their parameters and clear both gradients."""
        for master in masters:
            param = self.pairs[master]
            if param is not master and master.grad is not None:
                param.copy_(master)
                self.took(master)

    def took(self, master: torch.Tensor) -> None:
        """A stepped master was rounded into its parameter: both gradients are done with."""
        master.grad = self.pairs[master].grad = None
        self._note(master)

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the masters follow the parameters, which lose nothing: bf16 and fp16 are float32 values."""
        for master, param in self.pairs.items():
            if param is not master:
                master.copy_(param)
                self._note(master)

    @torch.no_grad()
    def load(self, values: Iterable[torch.Tensor]) -> None:
        """Take saved masters, in the order of ``parameters()``, and round them into the parameters.

        Raises:
            PlanError: other shapes, or another number; nothing has changed then.
        """
        given = list(values)
        got, expected = [tuple(v.shape) for v in given], [tuple(m.shape) for m in self.pairs]
        if got != expected:
            raise PlanError("these are other masters", got=got, expected=expected, where="values")
        for (master, param), value in zip(self.pairs.items(), given, strict=True):
            master.copy_(value)
            if param is not master:
                param.copy_(value)
            self._note(master)

    def _note(self, master: torch.Tensor) -> None:
        self._versions[master] = local_of(self.pairs[master])._version
