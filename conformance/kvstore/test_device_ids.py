"""Ids on the store's device: modules read and step rows there, with the host's bits and without a wait.

The device is the pretend one, and the store's operators those that a GPU would run, executed here.
"""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import assert_equal, raises, requirement
from conformance.harness.places import on_pretend
from conformance.kvstore.cases import assert_bits, ids_of, store_of
from twinproof.errors import ShapeError

NEEDS = ("operators",)


def _stores(kvstore: Any, optimizer: str = "adagrad") -> tuple[Any, Any]:
    """One on the device, one on the host."""
    from conformance.kvstore.simt.places import PretendStore

    layouts = {"t": kvstore.RowLayout(6, optimizer=optimizer)}
    stores = PretendStore(layouts, optimizer_in_row=True, seed=7, clock=lambda: 1000), store_of(kvstore, layouts)
    stores[0].reserve("t", 2000)
    return stores


@requirement(
    "KV-169",
    "KVEmbeddingBag and KVEmbedding over a store on a device MUST take ids there, give results there and step rows to "
    "the host's bits, sums in the order of positions; the host MUST wait for nothing, but for the check of offsets.",
    needs=NEEDS,
)
def test_modules(kvstore: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    for number, mode in enumerate(("sum", "mean", None)):
        with on_pretend() as device:
            stores = _stores(kvstore, ("adagrad", "adam", "lamb")[number])
            make: Any = kvstore.KVEmbedding if mode is None else kvstore.KVEmbeddingBag
            options: dict[str, Any] = {"lr": 0.1} | ({} if mode is None else {"mode": mode})
            mine, theirs = (make(store, **options) for store in stores)
            for step in range(4):
                ids = torch.randint(-15, 15, (6, 7), generator=generator)
                grad = torch.randn((6, 7, 6) if mode is None else (6, 6), generator=generator)
                cuts = [()] if mode is None else [(), (ids_of([0, 0, 3, 20, 41, 42]),)]
                for offsets in cuts:
                    given = (ids.reshape(-1) if offsets else ids, *offsets)
                    there, grad_there = [part.to(device.device) for part in given], grad.to(device.device)
                    begin = device.mark
                    found = mine(*there)
                    found.backward(grad_there)
                    counts = device.counts(begin)
                    expected = theirs(*given)
                    expected.backward(grad)
                    where = f"{mode} step {step} offsets {len(offsets)}"
                    assert_equal(found.device, device.device, where=f"{where}: place")
                    assert_bits(found.detach().cpu(), expected.detach(), where=where)
                    assert_equal(counts.host_waits, len(offsets), where=f"{where}: waits")
                    assert_equal(counts.to_device.count, 0, where=f"{where}: copies to the device")
            assert_bits(stores[0].ids("t"), stores[1].ids("t"), where=f"{mode} ids")
            rows, expected = (store.get_rows("t", stores[1].ids("t")) for store in stores)
            assert_bits(rows, expected, where=f"{mode} rows")


@requirement(
    "KV-170",
    "Ids and offsets that lie apart, offsets on a device that do not cut, and ids on a device that the store is not on "
    "MUST be refused by name, with nothing stepped.",
    needs=NEEDS,
)
def test_refused(kvstore: Any) -> None:
    with on_pretend() as device:
        stores = _stores(kvstore)
        bags = [kvstore.KVEmbeddingBag(store, mode="sum") for store in stores]
        ids, offsets = ids_of([1, 2, 3]), ids_of([0, 1])
        there = ids.to(device.device)
        for wrong in ([0, 2, 1], [1, 2], [0, 4], [0, -1]):
            with raises(ShapeError, where=f"offsets {wrong}"):
                bags[0](there, ids_of(wrong).to(device.device))
        for bag, given in ((bags[0], (there, offsets)), (bags[0], (ids, offsets.to(device.device)))):
            with raises(ShapeError, where="ids and offsets apart"):
                bag(*given)
        with raises(ShapeError, where="a store on the host"):
            bags[1](there, offsets.to(device.device))
        for store in stores:
            assert_equal(store.size("t"), 0, where="rows")
        # Ids of the host are taken, as every verb of the store takes them.
        bags[0](ids, offsets).sum().backward()
        assert_equal(stores[0].size("t"), 3, where="rows of ids on the host")
