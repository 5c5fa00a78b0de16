"""The modes that turn ordinary torch ops into work on the current virtual stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.harness.compare import Mismatch
from conformance.provers.virtual_device.clocks import HOST
from conformance.provers.virtual_device.engine import Costs, VirtualEngine
from conformance.provers.virtual_device.tracker import Hazard, Memory, Tracker, here

__all__ = ["ALLOCATIONS", "HOST_VALUE_OPS", "VirtualDevice", "is_view", "operands_of", "tensors_in"]

# What reads a tensor's values on the host. The value comes from the device: the host waits for the current stream.
_READS = {"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__complex__"}
# The same below Python: values that the host branches on, and shapes that depend on values.
HOST_VALUE_OPS = {
    "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::masked_select",
    "aten::_unique2",
}  # fmt: skip
# What makes memory; of its operands it looks at the form.
ALLOCATIONS = {
    "aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided",
    "aten::empty_permuted", "aten::empty_quantized",
}  # fmt: skip
# A scalar made without a device, or on "cpu" in so many letters, lies on the host: an optimizer's step count.
_FACTORIES = {"tensor", "scalar_tensor", "as_tensor", "zeros", "ones", "full", "empty"}
# By their schema they write gradients; the kernels do so only to unscale them ("kGradIdx || grad_scale_ptr" in
# aten/src/ATen/native/cuda/fused_adam_utils.cuh).
_FUSED = {"aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_", "aten::_fused_adagrad_"}
# What may have operands in both places.
_TRANSFERS = {"aten::copy_", "aten::_to_copy", "aten::_foreach_copy_"}


class VirtualDevice:
    """Watches a program; use as a context manager around it, with everything that it does to tensors.

    Args:
        late, seed, costs: see ``VirtualEngine``.

    Attributes:
        engine: hand it to the program in place of a real one.
        hazards: what was found.
        not_covered: where the host looked at values of the device; with other values, another program may follow.
    """

    def __init__(self, *, late: bool = False, seed: int | None = None, costs: Costs | None = None) -> None:
        self.tracker = Tracker()
        self.engine = VirtualEngine(self.tracker, late=late, seed=seed, costs=costs or Costs())
        self.not_covered: list[str] = []
        self._makes_host_scalars = False
        self._stack = ExitStack()
        self._forward_streams: dict[tuple[int, int], str] = {}
        self._last_backward: str | None = None
        self._backward_used: set[str] = set()

    @property
    def hazards(self) -> list[Hazard]:
        """Each pair of program points once, in order of discovery."""
        return self.tracker.hazards

    def __enter__(self) -> VirtualDevice:
        self._stack.enter_context(self.in_thread())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self.tracker.sweep()
        self.engine.settle_all()

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """Watch the calling thread as well: torch's modes are a thread's own. Its current stream is the default one.

        Calls to the engine from a thread that is not watched raise UnsupportedError. Forward and backward of a graph
        belong into one thread.
        """
        ident = threading.get_ident()
        self.engine.threads.add(ident)
        try:
            with _Functions(self), _Ops(self):
                yield
        finally:
            self.engine.forget_thread(ident)

    def check(self, *, this_branch_only: bool = False) -> None:
        """Raise Mismatch when there is any hazard, or when host control flow may depend on values of the device.

        Args:
            this_branch_only: the latter is known, and the proof is wanted for the branch that was taken.
        """
        if self.hazards:
            raise Mismatch("the program has hazards", got="\n".join(map(str, self.hazards)), expected="none")
        if self.not_covered and not this_branch_only:
            points = "\n".join(self.not_covered)
            raise Mismatch("not covered: the host looks at values of the device", got=points, expected="nowhere")

    def made_by_factory(self, make: Callable[[], Any]) -> Any:
        """What a factory makes; a scalar lies on the host, wherever the parameters are."""
        before, self._makes_host_scalars = self._makes_host_scalars, True
        try:
            made = make()
        finally:
            self._makes_host_scalars = before
        for tensor in tensors_in(made):
            if tensor.dim() == 0:  # ``torch.tensor`` itself is not an op that a mode sees.
                self.tracker.memory_of(tensor, stream=HOST, on_host=True)
        return made

    def _looks_at_values(self, what: str) -> None:
        if what not in self.not_covered:
            self.not_covered.append(what)

    def backward_ended(self) -> None:
        """``backward`` is over: the caller's stream joins every stream that gradients were computed on."""
        for stream in self._backward_used:
            self.engine.follow(self.engine.current(), stream)
        self._backward_used, self._last_backward = set(), None

    def stream_of_op(self) -> str:
        """Where an op runs: a backward op on the stream of its forward op, as autograd does; else the current one."""
        node: Any = torch._C._current_autograd_node()
        current, thread = self.engine.current(), threading.get_ident()  # Each thread counts its own nodes.
        if node is None:
            if torch.is_grad_enabled():
                self._forward_streams.setdefault((thread, torch.autograd._get_sequence_nr() - 1), current)
            return current
        stream = self._forward_streams.get((thread, node._sequence_nr()), current)
        # Autograd orders a node behind those that fed it; the order of this run is one that it allows.
        before = self._last_backward if self._last_backward is not None else current
        self.engine.follow(stream, before)
        self._last_backward = stream
        self._backward_used.add(stream)
        return stream

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out one op as work on its stream."""
        self.tracker.sweep()
        stream, name = self.stream_of_op(), func._schema.name
        reads, writes = operands_of(func, args, kwargs)
        known = [(tensor, self.tracker.knows(tensor)) for tensor in (*reads, *writes)]
        on_host = bool(known) and all(memory is not None and memory.on_host for _, memory in known)
        self.engine.settle(stream)
        result = func(*args, **kwargs)
        if is_view(func):
            return result
        if name in HOST_VALUE_OPS and not on_host:
            self.engine.synchronize_stream(stream)
            self._looks_at_values(f"{name} at {here()}")
        if not on_host and name not in _TRANSFERS:
            self._check_places(known, name)
        if self._makes_host_scalars and not known and all(made.dim() == 0 for made in tensors_in(result)):
            return result
        where, actor = f"{name} at {here()}", HOST if on_host else stream
        tick = self.tracker.clocks.advance(actor)
        made = [t for t in tensors_in(result) if self.tracker.knows(t) is None]
        if name in ALLOCATIONS:
            reads = []
        for tensors, is_write in ((reads, False), ([*writes, *made], True)):
            for tensor in tensors:
                self._access(tensor, actor, stream, tick, where, is_write=is_write, on_host=on_host)
                if torch._C._current_autograd_node() is not None:
                    # Autograd records what it hands from stream to stream (``InputBuffer``, torch 2.13).
                    self.engine.keep(tensor, stream)
        if not on_host:
            self.engine.spend(stream, self.engine.costs.op_s(name, sum(map(_bytes, (*reads, *writes, *made)))))
        return result

    def _access(
        self, tensor: torch.Tensor, actor: str, stream: str, tick: int, where: str, *, is_write: bool, on_host: bool
    ) -> None:
        memory: Memory = self.tracker.memory_of(tensor, stream=stream, on_host=on_host)
        if memory.on_host and actor != HOST:
            # A device op with a host operand: the host reads or writes it at the time of the call.
            actor, tick = HOST, self.tracker.clocks.advance(HOST)
        self.tracker.access(tensor, memory, stream=actor, tick=tick, writes=is_write, what=where)

    def _check_places(self, known: list[tuple[torch.Tensor, Memory | None]], name: str) -> None:
        """Ops take scalars of the host by value, fused kernels do not; other memory of the host is a wrong pointer."""
        least = 0 if name.startswith("aten::_fused") else 1
        for tensor, memory in known:
            if memory is not None and memory.on_host and tensor.dim() >= least and tensor.numel():
                what = f"an operand of shape {tuple(tensor.shape)} in host memory"
                self.tracker.report("misplaced", f"{name} at {here()}", what)

    def host_access(self, tensor: torch.Tensor, what: str) -> None:
        """The host looks at values: of device memory after waiting for the current stream, of its own at once."""
        memory = self.tracker.knows(tensor)
        if memory is None:
            return
        if not memory.on_host:
            self.engine.synchronize_stream(self.engine.current())
            self._looks_at_values(f"{what} at {here()}")
        tick = self.tracker.clocks.advance(HOST)
        self.tracker.access(tensor, memory, stream=HOST, tick=tick, writes=False, what=f"{what} at {here()}")


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, device: VirtualDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.device.run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    def __init__(self, device: VirtualDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS and args and isinstance(args[0], torch.Tensor):
            self.device.host_access(args[0], name)
        options = kwargs or {}
        if name in _FACTORIES and options.get("device", "cpu") == "cpu":
            return self.device.made_by_factory(lambda: func(*args, **options))
        result = func(*args, **options)
        if name == "backward" or func is torch.autograd.grad:
            self.device.backward_ended()
        return result


_COLLECTIVE_OUTPUTS = ("output", "output_tensor", "output_tensors", "tensors")


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in an argument or a result, lists and dictionaries included."""
    if isinstance(value, torch.Tensor):
        # Sparse and nested tensors are of dense ones; other layouts have no storage that could be watched.
        if value.layout is torch.sparse_coo:
            yield from (value._indices(), value._values())
        elif value.layout is not torch.strided or value.is_nested:
            # Their parts are views, which autograd need not know of.
            yield from _parts_of(value.detach())
        else:
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def _parts_of(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors of a nested or compressed one."""
    if value.is_nested:
        # One of strided layout has no sizes; its values lie in a row.
        return (value.values(),) if value.layout is torch.strided else (value.values(), value.offsets())  # type: ignore[attr-defined]
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return value.crow_indices(), value.col_indices(), value.values()
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        return value.ccol_indices(), value.row_indices(), value.values()
    return ()


def operands_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(read, written) tensors of a call, from the op's schema."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for position, (name, is_written) in enumerate(_arguments(func)):
        value = args[position] if position < len(args) else kwargs.get(name)
        if name == "grads" and func._schema.name in _FUSED:
            is_written = kwargs.get("grad_scale") is not None
        (writes if is_written else reads).extend(tensors_in(value))
    return reads, writes


# A schema is made of new objects each time it is read, and is read at each op.
@cache
def _arguments(func: Any) -> tuple[tuple[str, bool], ...]:
    """Of each argument its name, and whether the op writes it."""
    return tuple((argument.name, _is_written(func, argument)) for argument in func._schema.arguments)


def _is_written(func: Any, argument: Any) -> bool:
    if argument.alias_info is not None and argument.alias_info.is_write:
        return True
    # Schemas of collectives do not say what they write.
    return func.namespace == "c10d" and argument.name in _COLLECTIVE_OUTPUTS


@cache
def is_view(func: Any) -> bool:
    """Whether an op returns memory of its operands without touching it."""
    infos = [returned.alias_info for returned in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
