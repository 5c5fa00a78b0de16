"""Stores on the pretend device: ids, rows and gradients of a call lie there, or the call is a mix of places.

The operators are those of this folder. What a GPU does in them is counted where the pretend device counts: each is a
launch, and the host waits in it as often as the CUDA that is made of the CPU says.
"""

from __future__ import annotations

from typing import Any

import torch

from conformance.kvstore.simt import SimtHandle, host_waits
from conformance.provers.pretend_device import Event, MixedPlacesError, PretendTensor, on_host
from conformance.provers.pretend_device.record import here
from conformance.provers.pretend_device.tensors import backend, is_there
from fastimpl.kvstore.native import table_messages
from fastimpl.kvstore.store import DeviceRows, KVStore, LockedDeviceRows
from twinproof.kvstore.options import StoreOptions
from twinproof.kvstore.rows import RowEngine

__all__ = ["PretendStore", "rows_on_pretend"]

# Arguments that operators take on the host: numbers of an optimizer, a plan.
_ON_HOST = {"kvstore_update": 4, "kvstore_evict": 3}


def _tell(event: Event) -> None:
    for record in backend().watchers:
        record.events.append(event)


def _there(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_there, value))
    return PretendTensor(value) if isinstance(value, torch.Tensor) else value


class _Operators:
    """Each operator on the memory behind its arguments."""

    def __getattr__(self, name: str) -> Any:
        operator = getattr(SimtHandle.operators(), name)

        def call(*arguments: Any) -> Any:
            for place, value in enumerate(arguments):
                if isinstance(value, torch.Tensor) and not is_there(value) and place != _ON_HOST.get(name):
                    _tell(Event("mix", name, here()))
                    got = f"argument {place} of shape {tuple(value.shape)} on the host"
                    raise MixedPlacesError(f"{name} mixes host and device", got=got, expected="one place")
            before = host_waits()
            result = operator(*(on_host(value) if isinstance(value, torch.Tensor) else value for value in arguments))
            _tell(Event("launch", name, here(), wait_count=host_waits() - before))
            return _there(result)

        return call


class _PretendHandle(SimtHandle):
    @classmethod
    def operators(cls) -> Any:
        return _Operators()


def rows_on_pretend(options: StoreOptions) -> RowEngine:
    """The rows of a store on the pretend device, whatever its options say."""
    messages = table_messages(options).to("pretend")
    return LockedDeviceRows(DeviceRows(options, _PretendHandle.create(messages, options.num_shards)))


class PretendStore(KVStore, engine=rows_on_pretend, devices=("pretend",)):
    """A ``KVStore`` on the pretend device, which has to be known to torch: see ``PretendDevice``."""

    def __init__(self, layouts: Any, **options: Any) -> None:
        super().__init__(layouts, **{"device": "pretend"} | options)
