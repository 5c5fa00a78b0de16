"""Attaching to an optimizer that has run already, and attachment that fails."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from conformance.harness import assert_equal, assert_le, assert_same_tensor, raises, requirement
from conformance.offload.cases import Twins, proven_on, values
from conformance.offload.foreign import Shared
from twinproof.engine import InlineEngine
from twinproof.errors import UnsupportedError


@requirement(
    "OPT-087",
    "An offloader MUST take over the state of an optimizer that has run already, and a prefetch that follows at once "
    "MUST bring those values.",
)
def test_attached_late(offload: Any, device: str) -> None:
    for late in (False, True):
        with proven_on(device, late=late) as place:
            twins = Twins(offload, place)
            twins.offloader.close()
            for _ in range(2):
                twins.step()
            twins.offloader = offload.OptimizerStateOffloader(twins.optimizer, engine=place.engine, chunk_bytes=1024)
            assert_equal(twins.offloader.residency().device_bytes, 0, where="residency after attachment")
            twins.offloader.prefetch()
            twins.step()
            twins.check()
            twins.offloader.close()


class _OutOfMemory(RuntimeError):
    """What pinning raises when the host has no more."""


@requirement("OPT-035", "Attachment that fails for lack of host memory MUST leave a plain optimizer that goes on.")
def test_no_host_memory(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        twins = Twins(offload, place)
        twins.offloader.close()
        twins.step()
        real = place.engine.host_empty

        def refuse(size_bytes: int) -> torch.Tensor:
            raise _OutOfMemory(f"{size_bytes} bytes")

        place.engine.host_empty = refuse  # type: ignore[method-assign]
        with raises(_OutOfMemory):
            offload.OptimizerStateOffloader(twins.optimizer, engine=place.engine)
        place.engine.host_empty = real  # type: ignore[method-assign]
        assert_equal("step" in vars(twins.optimizer), False, where="step taken over")
        twins.step()
        with offload.OptimizerStateOffloader(twins.optimizer, engine=place.engine) as twins.offloader:
            twins.step()
            twins.check()


class _Quantized(torch.Tensor):
    """Eight bits and a scale that look like float32: the form of torchao's and bitsandbytes' states."""

    bits: torch.Tensor
    scale: float

    @staticmethod
    def __new__(cls, bits: torch.Tensor, scale: float) -> _Quantized:
        made: _Quantized = torch.Tensor._make_wrapper_subclass(cls, bits.shape, dtype=torch.float32)
        made.bits, made.scale = bits, scale
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        plain = [arg.bits.float() * arg.scale if isinstance(arg, cls) else arg for arg in args]
        return func(*plain, **(kwargs or {}))


@requirement(
    "OPT-244",
    "A parameter or a state whose values are not its memory, such as a quantized one, MUST be refused by name, at "
    "attachment and at a load, with everything as it was.",
)
def test_quantized(offload: Any, device: str) -> None:
    def quantized() -> _Quantized:
        with _disable_current_modes():
            return _Quantized(torch.ones(8, 16, dtype=torch.int8), 0.5)

    with proven_on(device) as place:
        twins = Twins(offload, place)
        twins.step()
        for load in (twins.offloader.load_state_dict, twins.optimizer.load_state_dict):
            state = twins.offloader.snapshot()
            state["state"][0]["exp_avg"] = quantized()
            with raises(UnsupportedError, mentions=("_Quantized", "exp_avg")):
                load(state)
            twins.check()
        twins.offloader.close()
        plain = twins.optimizer.state[twins.params[0]]["exp_avg"]
        twins.optimizer.state[twins.params[0]]["exp_avg"] = quantized()
        with raises(UnsupportedError, mentions=("_Quantized", "exp_avg")):
            offload.OptimizerStateOffloader(twins.optimizer, engine=place.engine)
        assert_equal("step" in vars(twins.optimizer), False, where="step taken over")
        twins.optimizer.state[twins.params[0]]["exp_avg"] = plain
        twins.step()
        with offload.OptimizerStateOffloader(twins.optimizer, engine=place.engine) as twins.offloader:
            twins.step()
            twins.check()
        with _disable_current_modes():
            params = [quantized().requires_grad_()]
        with raises(UnsupportedError, mentions=("_Quantized", "parameter")):
            offload.OptimizerStateOffloader(torch.optim.SGD(params, lr=0.1), engine=place.engine)


@requirement(
    "OPT-245",
    "Host memory MUST be at most 1.02 of the states of parameters of 64 KiB and more, whatever their number is rounded "
    "to elsewhere, and stats() say what was taken.",
)
def test_host_memory(offload: Any, device: str) -> None:
    shapes = [(129, 131), (1, 20000), (16385,), (70, 300)]
    with proven_on(device) as place:
        real, taken = place.engine.host_empty, []

        def counting(size_bytes: int) -> torch.Tensor:
            taken.append(size_bytes)
            return real(size_bytes)

        place.engine.host_empty = counting  # type: ignore[method-assign]
        twins = Twins(offload, place, params=[values(shape, i) for i, shape in enumerate(shapes)])
        for _ in range(2):
            twins.step()
        stats = twins.offloader.stats()
        assert_equal(stats.host_bytes, sum(taken), where="host bytes")
        assert_le(sum(taken), 1.02 * stats.payload_bytes, where="host bytes")
        assert_le(stats.payload_bytes, sum(taken), where="payload")
        twins.offloader.close()


@requirement(
    "OPT-433",
    "A state that the user replaced by one of another dtype, which has no place, MUST leave its neighbours in theirs: "
    "steps stay those of the plain optimizer.",
)
@pytest.mark.parametrize("at", [0, 1, 5])
def test_states_without_a_place(offload: Any, at: int) -> None:
    made = []
    for offloaded in (False, True):
        params = [torch.nn.Parameter(values((64,), number)) for number in range(6)]
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        if offloaded:
            # Two parameters a chunk.
            offload.OptimizerStateOffloader(optimizer, engine=InlineEngine(), chunk_bytes=512)
        for step in range(4):
            if step == 2:
                state = optimizer.state[params[at]]
                state["momentum_buffer"] = state["momentum_buffer"].double()
            for number, param in enumerate(params):
                param.grad = values((64,), 10 * step + number)
            optimizer.step()
        made.append([param.detach() for param in params])
    for number, (mine, plain) in enumerate(zip(made[1], made[0], strict=True)):
        assert_same_tensor(mine, plain, where=f"parameter {number} where the state of {at} has no place")


class _NoCopies(InlineEngine):
    """A device that has failed."""

    fails = True

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Raises until it works again."""
        if self.fails:
            raise _OutOfMemory("a copy")
        super().copy(target, source)

    def copy_many(self, targets: Any, sources: Any) -> None:
        """See ``copy``."""
        for target, source in zip(targets, sources, strict=True):
            self.copy(target, source)

    @property
    def stands_for_device(self) -> bool:  # type: ignore[override]
        """Copies mean something."""
        return True

    def holds(self, tensor: torch.Tensor) -> bool:
        """None is packed: each is a copy by itself."""
        return False


_HOOKS = ("step_pre", "step_post", "state_dict_pre", "load_state_dict_pre", "load_state_dict_post")


def _attached(optimizer: Any) -> list[Any]:
    """What an offloader leaves on an optimizer while it is attached."""
    own = [name for name in vars(optimizer) if name in ("step", "__getstate__", "_twinproof_offloader")]
    return [*own, *(len(getattr(optimizer, f"_optimizer_{name}_hooks")) for name in _HOOKS)]


@requirement(
    "OPT-443",
    "Attachment that fails while states leave, by a copy that fails or states that turn out to share memory, MUST "
    "leave the optimizer, its hooks and its masters as they were; it goes on, and can be offloaded later.",
)
def test_no_move(offload: Any) -> None:
    params: list[torch.Tensor] = [torch.nn.Parameter(values((4, 3), i, torch.bfloat16)) for i in range(2)]
    others: list[torch.Tensor] = [torch.nn.Parameter(values((4, 3), i, torch.bfloat16)) for i in range(2)]
    (masters, optimizer), (_, plain) = (_with_masters(offload, each) for each in (params, others))
    engine = _NoCopies("cpu")
    before = _attached(optimizer)
    with raises(_OutOfMemory):
        offload.OptimizerStateOffloader(optimizer, engine=engine, master_weights=masters)
    assert_equal(_attached(optimizer), before, where="what is on the optimizer")
    for _ in range(2):
        for each in (*params, *others):
            each.grad = torch.ones_like(each)
        optimizer.step()
        plain.step()
        engine.fails = False
        for number, (got, expected) in enumerate(zip(params, others, strict=True)):
            assert_same_tensor(got.detach(), expected.detach(), where=f"parameter {number}")
        offload.OptimizerStateOffloader(optimizer, engine=engine, master_weights=masters).close()
    shared = Shared([torch.nn.Parameter(values((4, 3), 1))])
    shared.param_groups[0]["params"][0].grad = values((4, 3), 2)
    shared.step()
    before = _attached(shared)
    with raises(UnsupportedError, mentions=("share memory",)):
        offload.OptimizerStateOffloader(shared, engine=engine)
    assert_equal(_attached(shared), before, where="what is on the optimizer whose states share memory")
    shared.step()


class _CopiesEnd(_NoCopies):
    """A device that fails in the middle, and ever after."""

    fails = False
    copies_left = 3

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """One copy less."""
        self.copies_left -= 1
        if self.copies_left < 0:
            raise _OutOfMemory(f"{-self.copies_left} too many")
        super().copy(target, source)


@requirement(
    "OPT-453",
    "Attachment that fails while states leave MUST raise what failed first, also where bringing them back fails, too.",
)
def test_no_way_back(offload: Any) -> None:
    params = [torch.nn.Parameter(values((4, 3), number)) for number in range(4)]
    optimizer = torch.optim.AdamW(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    engine = _CopiesEnd("cpu")
    with raises(_OutOfMemory, mentions=("1 too many",)):
        offload.OptimizerStateOffloader(optimizer, engine=engine, chunk_bytes=256)
    assert_equal(engine.copies_left < -1, True, where="the way back was tried")


def _with_masters(offload: Any, params: list[torch.Tensor]) -> tuple[Any, Any]:
    masters = offload.MasterWeights(params)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=0.1)
    masters.attach(optimizer)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return masters, optimizer


@requirement(
    "OPT-445",
    "A copy or a pickle of an offloader, which would be attached to nothing, MUST be refused by name; one of the "
    "optimizer beside it is a plain one.",
)
def test_copied_offloaders(offload: Any) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(values((4, 3), 1))])
    with offload.OptimizerStateOffloader(optimizer, engine=InlineEngine("cpu")) as offloader:
        copies: dict[str, Any] = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps}
        for name, make in copies.items():
            with raises(UnsupportedError, mentions=("one optimizer", "a copy of the optimizer"), where=name):
                make(offloader)
        assert_equal("step" in vars(copy.deepcopy(optimizer)), False, where="step of a copy of the optimizer")
        optimizer.step()
        assert_equal(offloader.stats().step_count, 1, where="steps")
