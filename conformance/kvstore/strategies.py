"""Hypothesis strategies for ids and layouts: few distinct ids, so that they meet; extremes, so that they hurt."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from conformance.kvstore.cases import EXTREMES, OPTIMIZERS, WEIGHTS

ids = st.one_of(st.integers(-8, 8), st.sampled_from(EXTREMES), st.integers(-(2**63), 2**63 - 1))
close_ids = st.one_of(st.integers(-6, 6), st.sampled_from(EXTREMES))
batches = st.lists(ids, max_size=20)
close_batches = st.lists(close_ids, max_size=12)


@st.composite
def layouts(draw: Any) -> tuple[int, torch.dtype, str, dict[str, torch.dtype]]:
    """Arguments of a RowLayout."""
    optimizer = draw(st.sampled_from(OPTIMIZERS))
    names = {"adagrad": ["momentum1"], "adam": ["momentum1", "momentum2"]}.get(optimizer, [])
    names = ["momentum1", "momentum2"] if optimizer == "partial_rowwise_adam" else names
    states = {name: draw(st.sampled_from(WEIGHTS)) for name in names}
    return draw(st.integers(1, 40)), draw(st.sampled_from(WEIGHTS)), optimizer, states
