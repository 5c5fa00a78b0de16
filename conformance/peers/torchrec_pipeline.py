"""torchrec and FBGEMM on the CPU behind our names: ``--twinproof-impl conformance.peers.torchrec_pipeline``.

Adds what the contract has and upstream spells otherwise (dtypes, plans, one object for the optimizer), and nothing that
upstream cannot do: what it gets wrong stays wrong. The component itself is in ``torchrec_component``, which is imported
where it is used, so that a place without torchrec can ask what is missing.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

__all__ = ["CAPABILITIES", "NEEDS"]

# No streams that stand in for a device's, no kernels of ours, and collectives are upstream's own affair.
CAPABILITIES: frozenset[str] = frozenset()
NEEDS = ("fbgemm_gpu", "torchrec")


def __getattr__(name: str) -> Any:
    if name != "pipeline":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with warnings.catch_warnings():
        # The build for the CPU warns of each kernel that is for devices only.
        warnings.simplefilter("ignore")
        return importlib.import_module("conformance.peers.torchrec_component").pipeline
