"""Tensors that a file can state and torch cannot hold: six bits an element, and four of which one is left over."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import torch

from conformance.checkpoint.cases import CHECKSUMS_KEY, INDEX, load_with
from conformance.checkpoint.hostile import FILE, entry, pack
from conformance.checkpoint.hostile_reading import consolidate_into
from conformance.harness import assert_equal, raises, requirement, succeeds
from twinproof.checkpoint.catalog import payload_bytes, read_catalog, verify
from twinproof.errors import UnsupportedError

_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_UNPAIRED: list[list[int]] = [[8, 1], [2, 3], [1, 2, 5], [0, 3]]
_SIXES: list[list[int]] = [[4], [2, 6], [0, 4]]
_FOREIGN = [("F4", shape) for shape in _UNPAIRED] + [(kind, shape) for kind in list(_BITS)[1:] for shape in _SIXES]
_HELD = [("F4", [2, 4]), ("F4", [2]), ("F4", [3, 0]), ("F4", [1, 1, 6])]


def _write(folder: Path, kind: str, shape: list[int]) -> int:
    """A folder of three tensors, the second of this dtype; the bytes of it."""
    size = math.prod(shape) * _BITS[kind] // 8
    data = bytes(range(1, 9 + size))
    spans = {"before": (0, 5), "it": (5, 5 + size), "behind": (5 + size, len(data))}
    stated = {"before": ("U8", [5]), "it": (kind, shape), "behind": ("U8", [3])}
    entries = [entry(name, f'"{each}"', f"{sizes}", f"{list(spans[name])}") for name, (each, sizes) in stated.items()]
    folder.mkdir()
    (folder / FILE).write_bytes(pack("{" + ",".join(entries) + "}", data))
    sums = {name: f"{zlib.crc32(data[begin:end]):08x}" for name, (begin, end) in spans.items()}
    index = {"metadata": {"total_size": len(data), CHECKSUMS_KEY: sums}, "weight_map": dict.fromkeys(spans, FILE)}
    (folder / INDEX).write_text(json.dumps(index))
    return size


def _targets(shape: list[int]) -> list[torch.Tensor]:
    # What a caller may think that such a tensor is.
    halved = [*shape[:-1], shape[-1] // 2]
    fours = torch.full(halved, 7, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    return [torch.full(shape, 7, dtype=torch.uint8), torch.full(shape, 7.0), fours]


def _assert_listed(checkpoint: Any, folder: Path, size: int, shape: list[int], where: str) -> None:
    for reader in (checkpoint.HuggingFaceStorageReader, checkpoint.QuantizedHuggingFaceStorageReader):
        metadata = reader(folder).read_metadata()
        found = {name: list(item.size) for name, item in metadata.state_dict_metadata.items()}
        assert_equal(found, {"before": [5], "it": shape, "behind": [3]}, where=f"{where}: shapes of {reader.__name__}")
        lengths = {index.fqn: stored.length for index, stored in metadata.storage_data.items()}
        assert_equal(lengths, {"before": 5, "it": size, "behind": 3}, where=f"{where}: lengths")
    sizes = {name: payload_bytes(record) for name, record in read_catalog(folder).tensors.items()}
    assert_equal(sizes, {"before": 5, "it": size, "behind": 3}, where=f"{where}: bytes")
    assert_equal(verify(folder).checked, ("before", "behind", "it"), where=f"{where}: what was verified")


def _assert_refused(checkpoint: Any, folder: Path, shape: list[int], where: str) -> None:
    options: list[dict[str, Any]] = [{"cast": True}, {"verify_checksums": True}]
    for given in options:
        # Torch asks for nothing of a tensor without values.
        for target in _targets(shape) if 0 not in shape else ():
            before = target.clone() if target.dtype is not torch.float4_e2m1fn_x2 else target.view(torch.uint8).clone()
            reader = checkpoint.HuggingFaceStorageReader(folder, **given)
            # A target of another shape is refused for its shape, which torch looks at first.
            errors = UnsupportedError if list(target.shape) == shape else (UnsupportedError, ValueError)
            with raises(errors, mentions=("it",), where=f"{where}, {target.dtype}, {given}"):
                load_with(reader, {"it": target})
            found = target.view(torch.uint8) if target.dtype is torch.float4_e2m1fn_x2 else target
            assert_equal(torch.equal(found, before), True, where=f"{where}: the target is left as it was")
    with raises(UnsupportedError, mentions=("'it'",), where=f"{where}: load_file"):
        checkpoint.load_file(folder / FILE)
    out = folder.with_name(f"{folder.name}-out")
    with consolidate_into(out), raises(UnsupportedError, mentions=("'it'",), where=f"{where}: a merge"):
        checkpoint.consolidate_safetensors_files(folder, out)
    with succeeds("loading what stands beside it", where=where):
        targets = {"before": torch.zeros(5, dtype=torch.uint8), "behind": torch.zeros(3, dtype=torch.uint8)}
        load_with(checkpoint.HuggingFaceStorageReader(folder, verify_checksums=True), targets)
    assert_equal(targets["before"].tolist(), [1, 2, 3, 4, 5], where=where)


@requirement(
    "CKPT-743",
    "A tensor of six bits an element, or of four and odd width, MUST be listed with the file's shape and its bytes, "
    "counted and verified, and refused by its name by every load of its values and every merge, with the targets as "
    "they were; one of four bits and even width MUST be read.",
)
def test_foreign_dtypes(checkpoint: Any, tmp_path: Path) -> None:
    for number, (kind, shape) in enumerate(_FOREIGN):
        where, folder = f"{kind} {shape}", tmp_path / f"{number}"
        size = _write(folder, kind, shape)
        with succeeds("listing", where=where):
            _assert_listed(checkpoint, folder, size, shape, where)
        _assert_refused(checkpoint, folder, shape, where)
    for number, (kind, shape) in enumerate(_HELD):
        where, folder = f"{kind} {shape}", tmp_path / f"held-{number}"
        size = _write(folder, kind, shape)
        with succeeds("listing and loading", where=where):
            _assert_listed(checkpoint, folder, size, [*shape[:-1], shape[-1] // 2], where)
            found = checkpoint.load_file(folder / FILE)["it"]
        assert_equal(found.view(torch.uint8).flatten().tolist(), list(range(6, 6 + size)), where=where)
