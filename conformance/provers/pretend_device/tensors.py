"""Tensors that say they are on an accelerator and hold host memory, over torch's Python backend for "PrivateUse1".

Every operator on such a tensor is carried out by the CPU's kernel on the memory behind it, after the question whether a
GPU would: operands in two places, or an operator without a CUDA kernel, are refused by name. Autograd is torch's own.
The backend is the process's, as torch has one at most; ``watchers`` are told what happens, in every thread.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from types import ModuleType
from typing import Any, cast

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from conformance.provers.pretend_device.errors import HostReadError, MixedPlacesError, NoKernelError
from conformance.provers.pretend_device.guard import register_guard
from conformance.provers.pretend_device.record import Event, here
from conformance.provers.pretend_device.sources import Launcher
from twinproof.errors import UnsupportedError

__all__ = ["NAME", "Backend", "PretendStorage", "PretendTensor", "backend", "is_there", "memory_of"]

NAME = "pretend"
# An address of the device: no host has memory there, so that what follows it fails at once.
_DEVICE_ADDRESSES = 1 << 62

# Scalars of the host that kernels take by value; pointwise operators do too.
_TAKE_HOST_SCALARS = {
    "aten::fill_", "aten::where", "aten::masked_fill", "aten::masked_fill_", "aten::index_fill", "aten::index_fill_",
    "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::masked_scatter",
}  # fmt: skip
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
_ALLOCATIONS = {
    "aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided",
    "aten::is_pinned", "aten::resize_", "aten::set_", "aten::_unsafe_view", "aten::lift_fresh",
    "aten::_local_scalar_dense", "aten::record_stream", "aten::_has_compatible_shallow_copy_type",
    "aten::unsafe_split", "aten::unsafe_split_with_sizes",
}  # fmt: skip
_DIVISIONS = {"aten::div", "aten::div_"}
# Of torch's own libraries the kernels of a GPU are known to be there.
_TORCH_LIBRARIES = ("aten", "prim", "prims", "c10d", "_c10d_functional", "c10d_functional")


class PretendStorage:
    """The memory behind a pretend tensor, as far as programs ask: its address, its size, and another size."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage

    @property
    def device(self) -> torch.device:
        """The device."""
        return torch.device(NAME, 0)

    def data_ptr(self) -> int:
        """An address that no host may read."""
        return _address(self._storage.data_ptr())

    def nbytes(self) -> int:
        """Bytes."""
        return self._storage.nbytes()

    size = nbytes

    def __len__(self) -> int:
        return self._storage.nbytes()

    def resize_(self, size_bytes: int) -> PretendStorage:
        """Another size, as of a storage."""
        self._storage.resize_(size_bytes)
        return self


def _address(address: int) -> int:
    return address | _DEVICE_ADDRESSES if address else 0


class PretendTensor(torch.Tensor):
    """A tensor of the device; ``host`` is the memory behind it, for provers and tests.

    A parameter keeps its identity when its ``data`` is set to memory of the host: it ``is_parked`` there then, and
    counts as a tensor of the host until its ``data`` is of the device again.
    """

    # For code that refuses subclasses whose values are not their memory.
    is_plain_memory = True
    host: torch.Tensor
    is_parked: bool

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> PretendTensor:
        # Autograd has no thread for a device that came after its first backward; the caller's own will do.
        if torch._C._is_multithreading_enabled():
            torch._C._set_multithreading_enabled(False)
        if host.layout is not torch.strided:
            raise UnsupportedError(
                "a layout that the pretend device has not", got=host.layout, expected=torch.strided, where=NAME
            )
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(NAME, 0),
        )
        made.host, made.is_parked = host, False
        result: PretendTensor = made
        return result

    def __init__(self, host: torch.Tensor) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PretendTensor({self.host!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        _read(self, "pickle")
        return _unpickled, (self.host, self.requires_grad)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = _FUNCTIONS.get(getattr(func, "__name__", ""))
        if known is not None and args and isinstance(args[0], PretendTensor):
            return known(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
                return _set_data(*args)
            if func == torch.Tensor.device.__get__ and args[0].is_parked:
                return torch.device("cpu")
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if torch.is_inference_mode_enabled():
            # There torch hands over operators that are made of others, a move to another device among them.
            found = func.decompose(*args, **(kwargs or {}))
            if found is not NotImplemented:
                return found
        return carry_out(func, args, kwargs or {})


def _unpickled(host: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    backend()
    return PretendTensor(host).requires_grad_(requires_grad)


def is_there(tensor: Any) -> bool:
    """Whether this is memory of the device."""
    return isinstance(tensor, PretendTensor) and not tensor.is_parked


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory behind a tensor of the device, or the tensor itself."""
    return tensor.host if isinstance(tensor, PretendTensor) else tensor


def _set_data(tensor: PretendTensor, value: torch.Tensor) -> None:
    host = memory_of(value)
    torch.Tensor.data.__set__(tensor, PretendTensor(host))  # type: ignore[attr-defined]
    tensor.host, tensor.is_parked = host, not is_there(value)


def _tell(event: Event) -> None:
    for record in backend().watchers:
        record.events.append(event)


def _read(tensor: PretendTensor, what: str) -> None:
    """The host asks for values: a copy to pageable memory, and the host waits for it."""
    if backend().watchers and not tensor.is_parked:
        _tell(Event("to host", what, here(), tensor.host.nbytes, wait_count=1, is_pageable=True))


def _as_list(tensor: PretendTensor) -> Any:
    _read(tensor, "tolist")
    return tensor.host.tolist()


def _refuse_read(tensor: PretendTensor, *args: Any, **options: Any) -> Any:
    if tensor.is_parked:
        return tensor.host.numpy()
    _tell(Event("refused", "numpy", here()))
    raise HostReadError("memory of the device", got="numpy of it", expected="cpu() first", where=here())


def _refuse_pinning(tensor: PretendTensor, *args: Any, **options: Any) -> Any:
    raise HostReadError("only memory of the host can be pinned", got=tensor.device, expected="cpu", where=here())


def _give_address(tensor: PretendTensor) -> int:
    if tensor.is_parked:
        return tensor.host.data_ptr()
    # No address leaves as one of the host's: whoever reads there by hand gets a fault, not bytes that a GPU has not.
    _tell(Event("address", "data_ptr", here()))
    return _address(tensor.host.data_ptr())


def _storage_of(tensor: PretendTensor) -> Any:
    storage = tensor.host.untyped_storage()
    return storage if tensor.is_parked else PretendStorage(storage)


def _deep_copied(tensor: PretendTensor, memo: dict[int, Any]) -> PretendTensor:
    """As torch's own, which copies a storage that does not lie here: strides are kept where elements leave no gap."""
    if id(tensor) in memo:
        found: PretendTensor = memo[id(tensor)]
        return found
    if not tensor.is_leaf:
        raise RuntimeError("only tensors that no operator made, leaves of a graph, can be deep-copied")
    with torch.no_grad():
        made: Any = tensor.detach().clone(memory_format=torch.preserve_format)
    made.requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = made
    if tensor.grad is not None:
        made.grad = copy.deepcopy(tensor.grad, memo)
    return made  # type: ignore[no-any-return]


_FUNCTIONS: dict[str, Any] = {
    "__deepcopy__": _deep_copied,
    "tolist": _as_list,
    "numpy": _refuse_read,
    "__array__": _refuse_read,
    "__dlpack__": _refuse_read,
    "data_ptr": _give_address,
    "const_data_ptr": _give_address,
    "mutable_data_ptr": _give_address,
    "untyped_storage": _storage_of,
    "__repr__": PretendTensor.__repr__,
    "__reduce_ex__": PretendTensor.__reduce_ex__,
    "pin_memory": _refuse_pinning,
    "is_pinned": lambda tensor, *_: False,
    "record_stream": lambda tensor, stream: None,
}


def carry_out(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """One operator with operands or a result on the device."""
    leaves = list(_tensors((args, kwargs)))
    ours = [leaf for leaf in leaves if is_there(leaf)]
    others = [leaf for leaf in leaves if not is_there(leaf) and not leaf.is_meta]
    name, options = func._schema.name, dict(kwargs)
    place = options.get("device")
    is_ours = bool(ours) if place is None else torch.device(place).type == NAME
    if place is not None and is_ours:
        options["device"] = torch.device("cpu")
    if name in ("aten::copy_", "aten::_to_copy"):
        return _transfer(func, name, args, options, is_ours)
    waits = _judge(func, name, args, options, ours, others)
    memory = options.pop("pin_memory", None)
    if memory and is_ours:
        _refuse_pinning(PretendTensor(torch.empty(0)))
    result = _as_on_a_gpu(func, name, args, options)(*_hosts(args), **_hosts(options))
    is_work = not (name in _ALLOCATIONS or _is_view(func))
    _tell_work(func, name, waits, is_work=is_work)
    return _back(result, leaves, is_ours)


def _as_on_a_gpu(func: Any, name: str, args: Sequence[Any], options: dict[str, Any]) -> Callable[..., Any]:
    """What computes an operator's values: the CPU's kernel, unless CUDA's is known to round in another way.

    CUDA divides by a number, or by a scalar of the host, as it multiplies by the reciprocal, which can lose one bit
    (``BinaryDivTrueKernel.cu``). By what lies on the device it divides.
    """
    if name not in _DIVISIONS or options.get("rounding_mode") is not None:
        return func  # type: ignore[no-any-return]
    is_number = not isinstance(args[1], torch.Tensor) or (args[1].dim() == 0 and not is_there(args[1]))
    kind = torch.result_type(memory_of(args[0]), args[1]) if is_number else torch.complex64
    if kind.is_complex:
        return func  # type: ignore[no-any-return]
    kind = kind if kind.is_floating_point else torch.get_default_dtype()
    return partial(_divided, kind, in_place=name.endswith("_"))


def _divided(kind: torch.dtype, value: torch.Tensor, divisor: Any, *, in_place: bool, **options: Any) -> torch.Tensor:
    """The reciprocal is rounded to the dtype that CUDA computes in, and so is the product, once more to ``kind``."""
    number = divisor.item() if isinstance(divisor, torch.Tensor) else divisor
    one = torch.ones((), dtype=torch.promote_types(kind, torch.float32))
    out = value if in_place else options.get("out")
    return torch.mul(value.to(kind), (one / number).item(), out=out)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        parts = [_mapped(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: _mapped(part, change) for key, part in value.items()}
    return value


def _hosts(value: Any) -> Any:
    return _mapped(value, memory_of)


def _back(result: Any, operands: Sequence[torch.Tensor], is_ours: bool) -> Any:
    known = {id(tensor.host): tensor for tensor in operands if isinstance(tensor, PretendTensor)}

    def wrap(leaf: torch.Tensor) -> torch.Tensor:
        if isinstance(leaf, PretendTensor) or leaf.is_meta:
            return leaf
        if id(leaf) in known:
            return _same_shape(known[id(leaf)])
        return PretendTensor(leaf) if is_ours else leaf

    return _mapped(result, wrap)


def _same_shape(tensor: PretendTensor) -> PretendTensor:
    """The tensor, with the shape that its memory was given in place."""
    if tensor.host.shape != tensor.shape or tensor.host.stride() != tensor.stride():
        with torch._C.DisableTorchFunctionSubclass():
            torch.Tensor.data.__set__(tensor, PretendTensor(tensor.host))  # type: ignore[attr-defined]
    return tensor


def _is_view(func: Any) -> bool:
    infos = [returned.alias_info for returned in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def _tell_work(func: Any, name: str, wait_count: int, *, is_work: bool) -> None:
    if not backend().watchers or not (is_work or wait_count):
        return
    where = here()
    launcher = backend().launchers.get(name)
    for _ in range(launcher.upload_count if launcher is not None else 0):
        _tell(Event("to device", name, where, is_pageable=True, is_hidden=True))
    wait_count += launcher.wait_count if launcher is not None else 0
    _tell(Event("launch" if is_work else "wait", name, where, wait_count=wait_count))


def _transfer(func: Any, name: str, args: Sequence[Any], options: dict[str, Any], is_ours: bool) -> Any:
    """A copy, within the device or between the places."""
    options.pop("pin_memory", None)
    source = args[1] if name == "aten::copy_" else args[0]
    target = args[0] if name == "aten::copy_" else None
    goes_to_device = is_there(target) if target is not None else is_ours
    comes_from_device = is_there(source)
    result = func(*_hosts(args), **_hosts(options))
    is_blocking = not (options.get("non_blocking", False) or (target is not None and len(args) > 2 and args[2]))
    if goes_to_device != comes_from_device:
        host_side = source if goes_to_device else target
        is_pageable = host_side is None or not backend().is_pinned(host_side)
        # A copy to pageable memory is over when the call returns; one from it only when it was asked for so.
        waits = is_blocking or (is_pageable and not goes_to_device)
        kind = "to device" if goes_to_device else "to host"
        if source.numel():
            _tell(Event(kind, name, here(), source.nbytes, wait_count=int(waits), is_pageable=is_pageable))
    elif goes_to_device:
        _tell_work(func, name, 0, is_work=True)
    if target is not None:
        return target
    return PretendTensor(result) if goes_to_device else result


def _judge(
    func: Any, name: str, args: Sequence[Any], options: dict[str, Any], ours: Sequence[Any], others: Sequence[Any]
) -> int:
    """Refuse what a GPU would; how often the host waits, as far as torch's own operators do."""
    _check_kernel(func, name)
    generator = options.get("generator")
    if generator is not None and generator.device.type == "cpu":
        _mixed(name, "a generator on the host")
    if not ours:
        return 0
    if name in _INDEXING:
        return _judge_index(name, args)
    is_like = name.endswith("_like") or name.startswith("aten::new_")
    takes_scalars = torch.Tag.pointwise in func.tags or name in _TAKE_HOST_SCALARS or "_foreach_" in name
    for tensor in others:
        if not is_like and not (takes_scalars and tensor.dim() == 0):
            _mixed(name, f"an operand of shape {tuple(tensor.shape)} on the host")
    return _value_waits(func, name, args, options)


def _value_waits(func: Any, name: str, args: Sequence[Any], options: dict[str, Any]) -> int:
    """The host waits for a value, or for a shape that depends on values."""
    if name == "aten::repeat_interleave" and options.get("output_size") is not None:
        return 0
    if name == "aten::_local_scalar_dense":
        _read(args[0], name)
        return 0
    return int(torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags)


def _judge_index(name: str, args: Sequence[Any]) -> int:
    """Rows by index: an index on the host is copied first, a mask is counted first, and the host waits for both."""
    tensor, indices, waits = args[0], [index for index in args[1] if index is not None], 0
    if not is_there(tensor):
        _mixed(name, f"rows of the host, shape {tuple(tensor.shape)}, by an index on the device")
    if len(args) > 2 and not is_there(args[2]) and args[2].dim() > 0:
        _mixed(name, f"values of shape {tuple(args[2].shape)} on the host")
    for index in indices:
        if not is_there(index) and index.numel():
            is_pageable = not backend().is_pinned(index)
            _tell(Event("to device", name, here(), index.nbytes, 1, is_pageable=is_pageable, is_hidden=True))
        elif index.dtype in (torch.bool, torch.uint8):
            # One value behind one mask is a fill, which counts nothing.
            waits += not (len(args) > 2 and len(indices) == 1 and args[2].numel() == 1)
    return waits


def _mixed(name: str, got: str) -> None:
    _tell(Event("mix", name, here()))
    raise MixedPlacesError(f"{name} mixes host and device", got=got, expected="one place", where=here())


def _check_kernel(func: Any, name: str) -> None:
    if func.namespace in _TORCH_LIBRARIES or _has_kernel(func) or name in backend().launchers:
        return
    _tell(Event("refused", name, here()))
    raise NoKernelError("an operator without a CUDA kernel", got=name, expected="a kernel", where=here())


@cache
def _has_kernel(func: Any) -> bool:
    keys = ("CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in keys)


class _Module:
    """``torch.pretend``. It says that it is not available: only what names the device is to be there.

    Libraries that look for any accelerator, as torch's own checkpoint writer does, go on without one. They would ask
    for streams, which the device has not.
    """

    def is_initialized(self) -> bool:
        """Always."""
        return True

    def is_available(self) -> bool:
        """Not to those who ask."""
        return False

    def current_device(self) -> int:
        """The only one."""
        return 0

    def device_count(self) -> int:
        """One."""
        return 1

    def manual_seed_all(self, seed: int) -> None:
        """Random numbers are the host's."""

    def _is_in_bad_fork(self) -> bool:
        return False


class Backend:
    """The process's backend: its watchers, its pinned memory, and what launchers do on the host.

    Attributes:
        device: the device.
        watchers: records that are told of every event.
        launchers: by operator; those of operators that the loaded library lacks a CUDA kernel of count as kernels.
    """

    def __init__(self) -> None:
        register_guard()
        self._module = _Module()
        _setup_privateuseone_for_python_backend(NAME, backend_module=self._module)
        self.device = torch.device(NAME, 0)
        self.watchers: list[Any] = []
        self.launchers: dict[str, Launcher] = {}
        self._pinned: dict[int, int] = {}
        make: Any = torch.library.Library
        self._libraries = [make("_", "IMPL"), make("aten", "IMPL")]
        self._libraries[0].fallback(lambda func, *args, **kwargs: carry_out(func, args, kwargs), "PrivateUse1")
        # ``torch.tensor`` copies below the key that subclasses are found by.
        copy = torch.ops.aten.copy_.default
        self._libraries[1].impl("copy_", lambda *args, **kwargs: carry_out(copy, args, kwargs), "PrivateUse1")

    def be_importable(self) -> None:
        """Torch imports the module by name; who restores ``sys.modules``, as pytest's own tests do, takes it away."""
        sys.modules.setdefault(f"torch.{NAME}", cast("ModuleType", self._module))

    def pinned_empty(self, size_bytes: int) -> torch.Tensor:
        """Host memory that counts as pinned as long as it lives, uint8."""
        import weakref

        memory = torch.empty(size_bytes, dtype=torch.uint8)
        storage = memory.untyped_storage()
        self._pinned[storage.data_ptr()] = size_bytes
        weakref.finalize(storage, self._pinned.pop, storage.data_ptr(), None)
        return memory

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether host memory is pinned."""
        return not is_there(tensor) and memory_of(tensor).untyped_storage().data_ptr() in self._pinned


@cache
def backend() -> Backend:
    """The backend, registered at first use."""
    return Backend()
