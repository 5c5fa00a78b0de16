"""Functions and attributes of tensors that ask for places, move between them, or let the host look at values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from conformance.provers.race.points import site_here
from conformance.provers.race.watcher import DEVICE, Watcher, is_device
from conformance.provers.virtual_device.clocks import HOST
from conformance.provers.virtual_device.device import tensors_in
from twinproof.errors import UnsupportedError

__all__ = ["FunctionsMode"]

_READS = ("tolist", "__repr__", "__str__", "__format__")
_ARRAYS = ("numpy", "__array__")
_FROM_DATA = ("tensor", "as_tensor", "asarray", "scalar_tensor", "sparse_coo_tensor", "from_numpy", "frombuffer")


class FunctionsMode(TorchFunctionMode):
    """Sees calls before torch does; the operators below them are the ops mode's."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self.watcher = watcher
        self._handlers: dict[str, Callable[..., Any]] = {
            "to": self._to,
            "cuda": self._cuda,
            "cpu": self._cpu,
            "type": self._type,
            "type_as": self._type_as,
            **dict.fromkeys(("new", "new_tensor"), self._new_from_data),
            "pin_memory": self._pin_memory,
            "is_pinned": self._is_pinned,
            "get_device": self._get_device,
            "data_ptr": self._data_ptr,
            "__dlpack__": self._data_ptr,
            "share_memory_": self._data_ptr,
            "one_hot": self._one_hot,
            "_pad_packed_sequence": self._pad_packed,
            **dict.fromkeys(_READS, self._read),
            **dict.fromkeys(_ARRAYS, self._array),
            **dict.fromkeys(_FROM_DATA, self._from_data),
        }
        self._attributes: dict[str, Callable[[torch.Tensor], Any]] = {
            "device": lambda tensor: torch.device(DEVICE, 0),
            "is_cuda": lambda tensor: True,
            "is_cpu": lambda tensor: False,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        result = self._called(func, name, args, kwargs or {})
        # An assignment to an index returns nothing; what it writes is its first argument.
        written = args[0] if name == "__setitem__" else result
        self.watcher.engine.backward.note_nodes(written, lambda: site_here("").point)
        return result

    def _called(self, func: Any, name: str, args: Any, options: dict[str, Any]) -> Any:
        if name == "__get__":
            answer = self._attributes.get(getattr(func.__self__, "__name__", ""))
            if answer is not None and self.watcher.on_device(args[0]):
                return answer(args[0])
            return func(*args, **options)
        if name == "__set__":
            # Where a gradient or ``data`` is replaced, the former memory may go away.
            func(*args, **options)
            self.watcher.memories.note_gone()
            return None
        handler = self._handlers.get(name)
        if handler is not None and (name in _FROM_DATA or (args and isinstance(args[0], torch.Tensor))):
            return handler(func, *args, **options)
        return self._plain(func, *args, **options)

    def _plain(self, func: Any, *args: Any, **options: Any) -> Any:
        """Any other call: where its new tensors lie is said by its operands, or by ``device``."""
        place = options.get("device")
        if isinstance(place, int):
            options["device"] = torch.device(DEVICE, place)  # A number alone is refused where there is no device.
        explicit = None if place is None else is_device(place)
        for one in tensors_in((args, options)):
            # What the program made where nobody looked is the host's; what a call makes inside may be the device's.
            self.watcher.note_known(one)
        ambient = self._any_on_device((args, options))
        with self.watcher.calling(ambient, explicit):
            return func(*args, **options)

    def _any_on_device(self, values: Iterable[Any]) -> bool:
        return any(self.watcher.on_device(one) for one in tensors_in(values))

    def _to(self, func: Any, tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        copy = bool(options.pop("copy", False))
        if args and isinstance(args[0], int):
            args = (torch.device(DEVICE, args[0]), *args[1:])
        if (args and isinstance(args[0], torch.Tensor)) or isinstance(options.get("other"), torch.Tensor):
            other = options.pop("other", None) if "other" in options else args[0]
            rest = args[1:] if args and args[0] is other else args
            non_blocking = bool(options.get("non_blocking", rest[0] if rest else False))
            wants, dtype, memory_format = self.watcher.on_device(other), other.dtype, options.get("memory_format")
        else:
            if len(args) > 3 or (len(args) == 3 and isinstance(args[0], torch.dtype)):
                args, copy = args[:-1], bool(args[-1])
            place, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **options)
            if place is not None and place.type not in ("cpu", DEVICE):
                # The meta device: no value goes there.
                return tensor.to(place, dtype or tensor.dtype)
            wants = self.watcher.on_device(tensor) if place is None else is_device(place)
        return self._moved(
            tensor, wants, non_blocking=non_blocking, dtype=dtype, memory_format=memory_format, copy=copy
        )

    def _cuda(
        self, func: Any, tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **options: Any
    ) -> torch.Tensor:
        is_device(DEVICE if device is None else device)
        return self._moved(tensor, True, non_blocking=non_blocking, **options)

    def _cpu(self, func: Any, tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        return self._moved(tensor, False, **options)

    def _type_as(self, func: Any, tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self._moved(tensor, self.watcher.on_device(other), dtype=other.dtype)

    def _type(
        self, func: Any, tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **options: Any
    ) -> Any:
        name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", "")
        if dtype is None:
            found: str = func(tensor)
            return found.replace("torch.", f"torch.{DEVICE}.", 1) if self.watcher.on_device(tensor) else found
        if isinstance(dtype, torch.dtype):
            return self._plain(func, tensor, dtype, non_blocking, **options)
        # A type says the place, too: "torch.cuda.FloatTensor".
        wants = f"{DEVICE}." in (name if isinstance(dtype, str) else f"{dtype.__module__}.{name}")
        plain = getattr(torch, name.rpartition(".")[2])
        return self._moved(tensor, wants, non_blocking=non_blocking, dtype=plain.dtype)

    def _new_from_data(self, func: Any, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        given = options.get("data", args[0] if args else None)
        if func.__name__ == "new" and (isinstance(given, torch.Tensor) or tensor.layout is not torch.strided):
            # What it is made of says where it lies.
            return self._plain(func, tensor, *args, **options)
        place, requires_grad = options.pop("device", None), options.pop("requires_grad", False)
        wants = self.watcher.on_device(tensor) if place is None else is_device(place)
        if isinstance(given, torch.Tensor):
            made = self._moved(given.detach(), wants, dtype=options.get("dtype"), copy=True)
            return made.requires_grad_(requires_grad)
        with self.watcher.calling(False, False):
            made = func(tensor, *args, **options)
        if wants:
            # The copy of values that Python has is waited for.
            made = self._moved(made, True)
        elif self.watcher.memories.knows(made) is None:
            self.watcher.adopt(made, to_device=False, op=func.__name__)
        return made.requires_grad_(requires_grad)

    def _moved(
        self,
        tensor: torch.Tensor,
        to_device: bool,
        *,
        non_blocking: bool = False,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format | None = None,
        copy: bool = False,
    ) -> torch.Tensor:
        if self.watcher.on_device(tensor) == to_device:
            kept: dict[str, Any] = {"memory_format": memory_format} if memory_format is not None else {}
            with self.watcher.calling(to_device, None):
                return torch.Tensor.to(tensor, dtype=dtype or tensor.dtype, copy=copy, **kept)
        if torch.is_grad_enabled() and tensor.requires_grad:
            moved: torch.Tensor = _Transfer.apply(  # type: ignore[no-untyped-call]
                tensor, self, to_device, non_blocking, dtype, memory_format
            )
            return moved
        return self.transfer(tensor, to_device, non_blocking=non_blocking, dtype=dtype, memory_format=memory_format)

    def transfer(
        self,
        tensor: torch.Tensor,
        to_device: bool,
        *,
        non_blocking: bool,
        dtype: torch.dtype | None,
        memory_format: torch.memory_format | None = None,
    ) -> torch.Tensor:
        """A copy to the other place, as torch's ``_to_copy`` makes it."""
        watcher, source = self.watcher, tensor.detach()
        if torch._C._functorch.is_functorch_wrapped_tensor(source):
            self._refuse_transfer("within a transform of torch.func")
        if source.layout is not torch.strided or source.is_nested:
            parts = [self.transfer(one, to_device, non_blocking=non_blocking, dtype=None) for one in tensors_in(source)]
            if source.layout is torch.sparse_coo:
                return torch.sparse_coo_tensor(parts[0], parts[1], source.shape)
            self._refuse_transfer("of a nested tensor" if source.is_nested else f"of layout {source.layout}")
        if dtype is not None and dtype != source.dtype and not (non_blocking and to_device):
            # Converted where it lies: a copy of another dtype comes from a temporary.
            source = source.to(dtype)
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
            target = torch.empty_like(source, memory_format=memory_format or torch.preserve_format).copy_(source)
        stream = watcher.engine.current()
        memory = watcher.memories.memory_of(target, stream=stream if to_device else HOST, on_host=not to_device)
        memory.made_at = str(watcher.site("to"))
        # Torch gives a copy to the host that nobody waits for pinned memory.
        memory.is_pinned = non_blocking and not to_device
        watcher.copied(target, source, non_blocking=non_blocking, op="to")
        if dtype is not None and dtype != target.dtype:
            with watcher.calling(to_device, None):
                target = target.to(dtype)
        return target

    def _refuse_transfer(self, what: str) -> NoReturn:
        self.watcher.gap("bypass", "to", f"a transfer {what} is not modelled")
        raise UnsupportedError(
            f"a transfer {what}", got="to", expected="dense or sparse_coo tensors", where=str(self.watcher.site("to"))
        )

    def _from_data(self, func: Any, *args: Any, **options: Any) -> Any:
        if options.get("device") is None and func in _device_constructors():
            # The default device is told below this mode, where nobody handles it.
            default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
            if default is not None and not (args and isinstance(args[0], torch.Tensor)):
                options["device"] = default.device
        wants = is_device(options.get("device"))
        if not wants and options.get("device") is None and args and isinstance(args[0], torch.Tensor):
            return self._plain(func, *args, **options)
        if wants:
            options["device"] = "cpu"
            requires_grad = options.pop("requires_grad", False)
            made = args[0] if args and isinstance(args[0], torch.Tensor) else func(*args, **options)
            moved = self._moved(made, True, dtype=options.get("dtype"))
            return moved.requires_grad_() if requires_grad else moved
        pins = options.pop("pin_memory", False)
        with self.watcher.calling(False, False):
            made = func(*args, **options)
        for one in tensors_in(made):
            if self.watcher.memories.knows(one) is None:
                self.watcher.adopt(one, to_device=False, op=func.__name__)
                self.watcher.memories.memory_of(one, stream=HOST).is_pinned = pins
        return made

    def _pin_memory(self, func: Any, tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if self.watcher.on_device(tensor):
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
        if self._is_pinned(None, tensor):
            return tensor
        made = tensor.clone()
        memory = self.watcher.memories.memory_of(made, stream=HOST)
        memory.is_pinned, memory.made_at = True, str(self.watcher.site("pin_memory"))
        return made

    def _is_pinned(self, func: Any, tensor: torch.Tensor, *args: Any, **options: Any) -> bool:
        memory = self.watcher.memories.knows(tensor) if tensor.layout is torch.strided else None
        return memory is not None and memory.is_pinned

    def _get_device(self, func: Any, tensor: torch.Tensor) -> int:
        return 0 if self.watcher.on_device(tensor) else -1

    def _data_ptr(self, func: Any, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if self.watcher.on_device(tensor) or self._is_pinned(None, tensor):
            self.watcher.gap("address", func.__name__, "whoever uses this address is not seen")
        return func(tensor, *args, **options)

    def _pad_packed(self, func: Any, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        padded, lengths = self._plain(func, tensor, *args, **options)
        with torch.utils._python_dispatch._disable_current_modes():
            lengths = lengths.clone()
        # The host has made them, from sizes that lie there.
        self.watcher.adopt(lengths, to_device=False, op="_pad_packed_sequence")
        return padded, lengths

    def _one_hot(self, func: Any, tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
        if num_classes <= 0 or not self.watcher.on_device(tensor):
            plain: torch.Tensor = self._plain(func, tensor, num_classes)
            return plain
        # With a number of classes CUDA's looks at no value, as the host's does (aten/src/ATen/native/Onehot.cpp).
        with self.watcher.calling(True, None):
            zeros = torch.zeros((*tensor.shape, num_classes), dtype=tensor.dtype)
            return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)

    def _read(self, func: Any, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        self.watcher.host_reads(tensor, func.__name__)
        with torch.utils._python_dispatch._disable_current_modes():
            return func(tensor, *args, **options)

    def _array(self, func: Any, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if options.get("force"):
            tensor = self._moved(tensor.detach(), False)
        if self.watcher.on_device(tensor):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        self.watcher.host_reads(tensor, func.__name__)
        if self._is_pinned(None, tensor):
            self.watcher.gap("address", func.__name__, "what numpy does with pinned memory is not seen")
        with torch.utils._python_dispatch._disable_current_modes():
            return func(tensor, *args, **options)


class _Transfer(torch.autograd.Function):
    """A transfer whose gradient goes back to where the values came from."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        mode: FunctionsMode,
        to_device: bool,
        non_blocking: bool,
        dtype: torch.dtype | None,
        memory_format: torch.memory_format | None,
    ) -> torch.Tensor:
        ctx.mode, ctx.to_device, ctx.dtype = mode, to_device, tensor.dtype
        return mode.transfer(tensor, to_device, non_blocking=non_blocking, dtype=dtype, memory_format=memory_format)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        moved = ctx.mode.transfer(grads[0], not ctx.to_device, non_blocking=False, dtype=ctx.dtype)
        return moved, None, None, None, None, None
