"""Index, file names, and state that is not just plain tensors."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given
from hypothesis import strategies as st

from conformance.checkpoint.cases import (
    FILE,
    INDEX,
    assert_folder,
    assert_loads,
    assert_same_json,
    load,
    random_bits,
    save,
)
from conformance.harness import (
    assert_equal,
    assert_same_bytes,
    assert_same_tensors,
    examples,
    raises,
    requirement,
    succeeds,
)
from twinproof.checkpoint.plan import assign_files
from twinproof.errors import CheckpointExistsError, ConfigError, CorruptionError, PlanError, UnsupportedError


@requirement("CKPT-037", "total_size MUST be the exact payload in bytes, headers not counted, float4 as bytes.")
def test_total_size(checkpoint: Any, tmp_path: Path) -> None:
    dtypes = [torch.float4_e2m1fn_x2, torch.int64, torch.bool, torch.complex64]
    state = {str(d): random_bits(d, (3, 5), 1) for d in dtypes} | {"s": torch.tensor(1.0), "e": torch.empty(0, 4)}
    save(checkpoint, state, tmp_path / "ck")
    index = json.loads((tmp_path / "ck" / INDEX).read_text())
    assert_equal(index["metadata"]["total_size"], 15 * (1 + 8 + 1 + 8) + 4, where="total_size")


@requirement("CKPT-038", "The weight_map MUST name every stored tensor, in the file that holds it, and nothing else.")
def test_weight_map(checkpoint: Any, tmp_path: Path) -> None:
    state = {f"w{i}": random_bits(torch.float32, (i, 3), i) for i in range(6)}
    mapping = {name: 1 + i % 3 for i, name in enumerate(state)}
    save(checkpoint, state, tmp_path / "ck", fqn_to_index_mapping=mapping)
    files = {f"model-{k:05d}-of-00003.safetensors": [n for n, i in mapping.items() if i == k] for k in (1, 2, 3)}
    assert_folder(tmp_path / "ck", files, state)


@requirement(
    "CKPT-039",
    "Files MUST be named model-%05d-of-%05d.safetensors with the count of files; more than 99,999 MUST be refused.",
)
def test_file_names(checkpoint: Any, tmp_path: Path) -> None:
    state = {f"w{i}": torch.full((2,), float(i)) for i in range(12)}
    save(checkpoint, state, tmp_path / "ck", max_shard_size=8)
    names = sorted(p.name for p in (tmp_path / "ck").glob("*.safetensors"))
    assert_equal(names, [f"model-{i:05d}-of-00012.safetensors" for i in range(1, 13)], where="names")
    for count in (99_999, 100_000, 100_001):
        many = {f"{i}": i for i in range(1, count + 1)}
        sizes = dict.fromkeys(many, 1)
        if count == 99_999:
            with succeeds("a plan of files", where=f"{count} files"):
                checkpoint.HuggingFaceStorageWriter(tmp_path / "no", fqn_to_index_mapping=many)
                names = list(assign_files(sizes, None, 1))
            assert_equal(names[-1], "model-99999-of-99999.safetensors", where="the last name")
            continue
        with raises(ConfigError, mentions=(f"{count}", "99999", "fqn_to_index_mapping")):
            checkpoint.HuggingFaceStorageWriter(tmp_path / "no", fqn_to_index_mapping=many)
        with raises(ConfigError, mentions=(f"{count}", "99999", "max_shard_size")):
            assign_files(sizes, None, 1)


@requirement(
    "CKPT-040",
    "fqn_to_index_mapping MUST be followed exactly; index 0, bools, floats and gaps MUST be refused at construction.",
)
def test_mapping(checkpoint: Any, tmp_path: Path) -> None:
    state = {"a": torch.ones(1), "b": torch.ones(2), "c": torch.ones(3)}
    save(checkpoint, state, tmp_path / "ck", fqn_to_index_mapping={"a": 2, "b": 1, "c": 2})
    assert_folder(
        tmp_path / "ck",
        {"model-00001-of-00002.safetensors": ["b"], "model-00002-of-00002.safetensors": ["a", "c"]},
        state,
    )
    for wrong in ({"a": 0}, {"a": -1}, {"a": True}, {"a": 1.0}, {"a": "1"}, {"a": 1, "b": 3}):
        with raises(ConfigError, mentions=("fqn_to_index_mapping",), where=str(wrong)):
            checkpoint.HuggingFaceStorageWriter(tmp_path / "no", fqn_to_index_mapping=wrong)


@requirement("CKPT-041", "Names that the mapping lacks MUST be one error that lists them all, before any file is made.")
def test_mapping_lacks_names(checkpoint: Any, tmp_path: Path) -> None:
    state = {"a": torch.ones(1), "left.out": torch.ones(1), "also.left": torch.ones(1)}
    with raises(PlanError, mentions=("left.out", "also.left")):
        save(checkpoint, state, tmp_path / "ck", fqn_to_index_mapping={"a": 1})
    assert_equal(list(tmp_path.iterdir()), [], where="folder")


@requirement(
    "CKPT-042",
    "Names that only the mapping has, such as a tied head, MUST be ignored with one warning and never stored.",
)
def test_mapping_has_extra_names(checkpoint: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"emb": torch.ones(2, 2)}
    with caplog.at_level(logging.WARNING):
        save(checkpoint, state, tmp_path / "ck", fqn_to_index_mapping={"emb": 1, "lm_head": 1, "ghost": 2})
    warned = [r for r in caplog.records if "lm_head" in r.getMessage() and "ghost" in r.getMessage()]
    said = "fqn_to_index_mapping names 2 tensors that are not saved: ghost, lm_head"
    assert_equal([record.getMessage() for record in warned], [said], where="warnings")
    assert_folder(tmp_path / "ck", {FILE: ["emb"]}, state)
    assert_loads(checkpoint, tmp_path / "ck", state)
    caplog.clear()
    many = [f"x{i:02}" for i in range(25)]
    with caplog.at_level(logging.WARNING):
        save(checkpoint, state, tmp_path / "ck", fqn_to_index_mapping=dict.fromkeys(["emb", *many], 1))
    said = f"fqn_to_index_mapping names 25 tensors that are not saved: {', '.join(many[:20])}"
    assert_equal([r.getMessage() for r in caplog.records if "x00" in r.getMessage()], [said], where="of many, 20")


@requirement("CKPT-043", "max_shard_size MUST split as huggingface_hub does for the same tensors in the same order.")
@examples(40)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(20, 120))
def test_max_shard_size(checkpoint: Any, tmp_path_factory: Any, sizes: list[int], limit: int) -> None:
    folder = tmp_path_factory.mktemp("split")
    state = {f"w{i}": random_bits(torch.uint8, (size,), i) for i, size in enumerate(sizes)}
    save(checkpoint, state, folder / "ck", max_shard_size=limit)
    hub = split_torch_state_dict_into_shards(state, max_shard_size=limit)
    files = sorted(
        hub.filename_to_tensors.values(), key=lambda names: list(hub.filename_to_tensors.values()).index(names)
    )
    weight_map = json.loads((folder / "ck" / INDEX).read_text())["weight_map"]
    groups: dict[str, list[str]] = {}
    for name in state:
        groups.setdefault(weight_map[name], []).append(name)
    assert_same_json([groups[file] for file in sorted(groups)], files)


@requirement(
    "CKPT-097",
    "KB, MB, GB and TB MUST mean powers of 1000, in any case; what is no size MUST be refused by its value.",
)
def test_size_units(checkpoint: Any, tmp_path: Path) -> None:
    texts = {"1KB": 1000, " 1 kb ": 1000, "1.5Kb": 1500, "0.001MB": 1000, "0.000001GB": 1000, "1e-9tb": 1000}
    for number, (text, limit) in enumerate(texts.items()):
        for size, files in ((limit, 1), (limit + 1, 2)):
            # Two tensors that fill a file exactly, and two with one byte more.
            state = {"a": torch.zeros(600, dtype=torch.uint8), "b": torch.zeros(size - 600, dtype=torch.uint8)}
            path = tmp_path / f"{number}-{files}"
            save(checkpoint, state, path, max_shard_size=text)
            assert_equal(len(list(path.glob("*.safetensors"))), files, where=f"files of {size} bytes by {text!r}")
    for wrong in ("1KiB", "1 MiB", "1000", "KB", "-1KB", "0.0001KB", "nanKB", "infGB", "1XB", 0, -5, 1.5, True):
        with raises(ConfigError, mentions=("max_shard_size", str(wrong))):
            checkpoint.HuggingFaceStorageWriter(tmp_path / "no", max_shard_size=wrong)
    with raises(ConfigError, mentions=("max_shard_size",)):
        checkpoint.HuggingFaceStorageWriter(tmp_path / "no", max_shard_size="")


@requirement(
    "CKPT-044", "The index MUST be UTF-8 JSON with sorted names, an indentation of two and one newline at its end."
)
def test_index_text(checkpoint: Any, tmp_path: Path) -> None:
    save(checkpoint, {"b": torch.ones(1), "é": torch.ones(1), "a": torch.ones(1)}, tmp_path / "ck")
    names = "".join(f'    "{name}": "{FILE}"{"," if name != "é" else ""}\n' for name in ("a", "b", "é"))
    expected = f'{{\n  "metadata": {{\n    "total_size": 12\n  }},\n  "weight_map": {{\n{names}  }}\n}}\n'
    assert_same_bytes((tmp_path / "ck" / INDEX).read_bytes(), expected.encode(), where="index")


@requirement(
    "CKPT-045",
    "A reader MUST follow the index: unlisted files do not count, a listed one that is missing is a named error.",
)
def test_reader_follows_index(checkpoint: Any, tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "b": torch.ones(3)}
    save(checkpoint, state, tmp_path / "ck", fqn_to_index_mapping={"a": 1, "b": 2})
    checkpoint.save_file({"a": torch.zeros(2), "z": torch.ones(1)}, tmp_path / "ck" / "consolidated.safetensors")
    assert_loads(checkpoint, tmp_path / "ck", state)
    assert_equal(sorted(_names(checkpoint, tmp_path / "ck")), ["a", "b"], where="names")
    (tmp_path / "ck" / "model-00002-of-00002.safetensors").unlink()
    with raises(CorruptionError, mentions=("model-00002-of-00002.safetensors",)):
        _names(checkpoint, tmp_path / "ck")


def _names(checkpoint: Any, path: Path) -> list[str]:
    return list(checkpoint.HuggingFaceStorageReader(path).read_metadata().state_dict_metadata)


@requirement("CKPT-046", "single_file MUST give model.safetensors and no index, and refuse a rule for several files.")
def test_single_file(checkpoint: Any, tmp_path: Path) -> None:
    state = {"a": torch.randn(3), "b": torch.arange(4)}
    save(checkpoint, state, tmp_path / "ck", single_file=True)
    assert_equal([p.name for p in (tmp_path / "ck").iterdir()], ["model.safetensors"], where="folder")
    assert_loads(checkpoint, tmp_path / "ck", state)
    assert_loads(checkpoint, tmp_path / "ck" / "model.safetensors", state)
    with raises(ConfigError, mentions=("single_file",)):
        checkpoint.HuggingFaceStorageWriter(tmp_path / "no", single_file=True, max_shard_size=5)


@requirement("CKPT-047", "Tied tensors MUST each be stored as their values, never as an empty or dangling entry.")
def test_tied(checkpoint: Any, tmp_path: Path) -> None:
    weight = torch.randn(4, 3)
    state = {"emb": weight, "head": weight, "view": weight.t()}
    save(checkpoint, state, tmp_path / "ck")
    expected = {"emb": weight, "head": weight.clone(), "view": weight.t().contiguous()}
    assert_loads(checkpoint, tmp_path / "ck", expected)


@requirement("CKPT-048", "Tensors that overlap in memory MUST be stored as separate values.")
def test_overlapping(checkpoint: Any, tmp_path: Path) -> None:
    memory = torch.arange(10.0)
    state = {"low": memory[:7], "high": memory[4:], "even": memory[::2]}
    save(checkpoint, state, tmp_path / "ck")
    assert_loads(checkpoint, tmp_path / "ck", {name: value.clone() for name, value in state.items()})


@requirement("CKPT-049", "Leaves that are not tensors MUST be refused before any file is made, all of them listed.")
def test_leaves(checkpoint: Any, tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "step": 3, "sched": {"lr": 0.1}}
    with raises(UnsupportedError, mentions=("step", "sched.lr")):
        save(checkpoint, state, tmp_path / "ck")
    assert_equal(list(tmp_path.iterdir()), [], where="folder")


@requirement("CKPT-050", "An empty state dict MUST give one file without tensors and an index without names.")
def test_empty_state(checkpoint: Any, tmp_path: Path) -> None:
    save(checkpoint, {}, tmp_path / "ck")
    assert_folder(tmp_path / "ck", {FILE: []}, {})
    assert_equal(_names(checkpoint, tmp_path / "ck"), [], where="names")


@requirement("CKPT-051", "Nested dicts MUST be stored under dotted names and load back into the nested target.")
def test_nested(checkpoint: Any, tmp_path: Path) -> None:
    state: dict[str, Any] = {"model": {"layer": {"w": torch.randn(2, 2)}, "b": torch.randn(2)}}
    save(checkpoint, state, tmp_path / "ck")
    assert_equal(sorted(_names(checkpoint, tmp_path / "ck")), ["model.b", "model.layer.w"], where="names")
    target: dict[str, Any] = {"model": {"layer": {"w": torch.zeros(2, 2)}, "b": torch.zeros(2)}}
    load(checkpoint, target, tmp_path / "ck")
    assert_same_tensors(
        {"w": target["model"]["layer"]["w"], "b": target["model"]["b"]},
        {"w": state["model"]["layer"]["w"], "b": state["model"]["b"]},
    )


@requirement(
    "CKPT-555",
    "A checkpoint whose index gives its files names of another kind MUST be replaced whole, its files too, and MUST "
    "NOT be replaced without overwrite; other files stay.",
)
def test_files_of_other_names(checkpoint: Any, tmp_path: Path) -> None:
    folder, new = tmp_path / "ck", {"c": torch.ones(3)}
    folder.mkdir()
    weight_map = {"a": "consolidated.00.safetensors", "b": "layers.safetensors"}
    for name, file in weight_map.items():
        checkpoint.save_file({name: torch.zeros(2)}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text("{}")
    with raises(CheckpointExistsError, mentions=("consolidated.00.safetensors",)):
        save(checkpoint, new, folder, overwrite=False)
    save(checkpoint, new, folder)
    assert_equal(sorted(path.name for path in folder.iterdir()), ["config.json", FILE, INDEX], where="folder")
    assert_loads(checkpoint, folder, new)


@requirement(
    "CKPT-612",
    "Links among files of others, to files, to folders and to nothing, MUST stay the links that they are over a save, "
    "and folders MUST keep their modes.",
)
def test_links_of_others(checkpoint: Any, tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    save(checkpoint, {"w": torch.ones(2)}, folder)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/inner").write_text("1")
    (folder / "private").mkdir()
    (folder / "private").chmod(0o750)
    links = {"folder": tmp_path / "outside", "file": tmp_path / "outside/inner", "nothing": tmp_path / "absent"}
    for name, target in links.items():
        (folder / name).symlink_to(target)
        (folder / "private" / name).symlink_to(target)
    save(checkpoint, {"w": torch.ones(3)}, folder)
    for place in (folder, folder / "private"):
        found = {name: (place / name).readlink() if (place / name).is_symlink() else None for name in links}
        assert_equal(found, links, where=f"links in {place.name}")
    assert_equal((folder / "private").stat().st_mode & 0o777, 0o750, where="the folder's mode")
    assert_loads(checkpoint, folder, {"w": torch.ones(3)})
