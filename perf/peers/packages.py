"""Packages of others that a bench measures beside: none is required, and a gate against an absent one is undecided."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

__all__ = ["PACKAGES", "Package", "missing_packages"]


@dataclass(frozen=True)
class Package:
    """What contenders of one name need: modules to import, and what to give to pip."""

    modules: tuple[str, ...]
    install: str


# By the first word of a contender's name.
PACKAGES = {
    "deepspeed": Package(("deepspeed",), "pip install deepspeed"),
    "fastsafetensors": Package(("fastsafetensors",), "pip install --no-deps fastsafetensors"),
    "fbgemm": Package(("fbgemm_gpu",), "pip install --no-deps fbgemm-gpu-cpu"),
    "lmdb": Package(("lmdb",), "pip install lmdb"),
    "rocksdb": Package(("rocksdict",), "pip install rocksdict"),
    "runai": Package(("runai_model_streamer", "humanize"), "pip install --no-deps runai-model-streamer humanize"),
    "torchao": Package(("torchao",), "pip install torchao"),
    "torchrec": Package(("torchrec", "fbgemm_gpu", "tensordict"), "bash ci/peers"),
}


def missing_packages(contender: str) -> tuple[str, ...]:
    """The modules that a contender needs and that are not installed."""
    package = PACKAGES.get(contender.split("-")[0])
    needed = () if package is None else package.modules
    return tuple(name for name in needed if importlib.util.find_spec(name) is None)
