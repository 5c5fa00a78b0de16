"""A mixture-of-experts model of the shape of DeepSeek-V3, and who holds which part of it: metadata, no data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

__all__ = ["PLACEMENTS", "Placement", "Tensor", "Transformer", "local_plans"]

_DTYPE = torch.bfloat16
_PROPERTIES = TensorProperties(dtype=_DTYPE)


class Tensor(NamedTuple):
    """A parameter. ``split`` is the dimension that tensor parallelism cuts, -1 for none; ``expert`` is -1 for none."""

    name: str
    shape: tuple[int, ...]
    layer: int
    split: int = -1
    expert: int = -1

    @property
    def size_bytes(self) -> int:
        """Bytes in the checkpoint."""
        return math.prod(self.shape) * _DTYPE.itemsize


@dataclass(frozen=True)
class Transformer:
    """Sizes of the model; the defaults are DeepSeek-V3's 671 billion parameters, all in bf16.

    Attributes:
        layer_count, dense_layer_count: layers, and how many of them have no experts.
        hidden, dense_hidden, expert_hidden, vocabulary: widths.
        expert_count: routed experts of a layer; one more is shared.
        head_count, query_rank, latent_rank, plain_width, rotary_width, value_width: of the latent attention.
    """

    layer_count: int = 61
    dense_layer_count: int = 3
    hidden: int = 7168
    dense_hidden: int = 18432
    expert_hidden: int = 2048
    vocabulary: int = 129280
    expert_count: int = 256
    head_count: int = 128
    query_rank: int = 1536
    latent_rank: int = 512
    plain_width: int = 128
    rotary_width: int = 64
    value_width: int = 128

    def tensors(self) -> Iterator[Tensor]:
        """Every parameter, in the order of the state dict."""
        last = self.layer_count - 1
        yield Tensor("model.embed_tokens.weight", (self.vocabulary, self.hidden), 0, 0)
        for layer in range(self.layer_count):
            yield from self._attention(layer)
            if layer < self.dense_layer_count:
                yield from self._mlp(layer, "", self.dense_hidden)
            else:
                yield from self._experts(layer)
        yield Tensor("model.norm.weight", (self.hidden,), last)
        yield Tensor("lm_head.weight", (self.vocabulary, self.hidden), last, 0)

    def _attention(self, layer: int) -> Iterator[Tensor]:
        heads, latent = self.head_count, self.latent_rank
        head_width, values = self.plain_width + self.rotary_width, heads * self.value_width
        pairs = heads * (self.plain_width + self.value_width)
        for name, shape, split in (
            ("input_layernorm", (self.hidden,), -1),
            ("post_attention_layernorm", (self.hidden,), -1),
            ("self_attn.q_a_proj", (self.query_rank, self.hidden), -1),
            ("self_attn.q_a_layernorm", (self.query_rank,), -1),
            ("self_attn.q_b_proj", (heads * head_width, self.query_rank), 0),
            ("self_attn.kv_a_proj_with_mqa", (latent + self.rotary_width, self.hidden), -1),
            ("self_attn.kv_a_layernorm", (latent,), -1),
            ("self_attn.kv_b_proj", (pairs, latent), 0),
            ("self_attn.o_proj", (self.hidden, values), 1),
        ):
            yield Tensor(f"model.layers.{layer}.{name}.weight", shape, layer, split)

    def _mlp(self, layer: int, owner: str, width: int, expert: int = -1) -> Iterator[Tensor]:
        for name, shape, split in (
            ("gate_proj", (width, self.hidden), 0),
            ("up_proj", (width, self.hidden), 0),
            ("down_proj", (self.hidden, width), 1),
        ):
            yield Tensor(f"model.layers.{layer}.mlp.{owner}{name}.weight", shape, layer, split, expert)

    def _experts(self, layer: int) -> Iterator[Tensor]:
        yield Tensor(f"model.layers.{layer}.mlp.gate.weight", (self.expert_count, self.hidden), layer)
        yield Tensor(f"model.layers.{layer}.mlp.gate.e_score_correction_bias", (self.expert_count,), layer)
        yield from self._mlp(layer, "shared_experts.", self.expert_hidden)
        for expert in range(self.expert_count):
            yield from self._mlp(layer, f"experts.{expert}.", self.expert_hidden, expert)


@dataclass(frozen=True)
class Placement:
    """A mesh of pipeline, data, expert and tensor parallel ranks; the last varies fastest.

    A layer lies on one pipeline stage. Within a stage, ``tensor`` ranks divide dimension ``split`` of a tensor, then
    ``data`` ranks divide dimension 0 (FSDP). What belongs to no expert is the same on all ``expert`` ranks. An expert
    belongs to one of the ``expert`` ranks, and ``data`` ranks divide its rows; with ``whole_experts`` it belongs to one
    rank of all in the stage instead.
    """

    model: Transformer
    pipeline: int
    data: int
    expert: int = 1
    tensor: int = 1
    whole_experts: bool = False

    @property
    def stage_ranks(self) -> int:
        """Ranks of a pipeline stage."""
        return self.data * self.expert * self.tensor

    @property
    def rank_count(self) -> int:
        """All ranks."""
        return self.pipeline * self.stage_ranks

    def holders(self, tensor: Tensor) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """(rank, offsets, sizes) of every rank that holds a part of ``tensor``, replicas included."""
        first = tensor.layer * self.pipeline // self.model.layer_count * self.stage_ranks
        whole = (0,) * len(tensor.shape), tensor.shape
        if tensor.expert >= 0 and self.whole_experts:
            yield first + tensor.expert * self.stage_ranks // self.model.expert_count, *whole
            return
        experts, tensors = range(self.expert), range(self.tensor)
        if tensor.expert >= 0:
            home = tensor.expert * self.expert // self.model.expert_count
            experts = range(home, home + 1)
        is_cut = tensor.split >= 0 and tensor.expert < 0
        for data in range(self.data):
            for expert in experts:
                for column in tensors:
                    box = _cut(*whole, tensor.split, self.tensor, column) if is_cut else whole
                    box = _cut(*box, 0, self.data, data)
                    if 0 not in box[1]:
                        yield first + (data * self.expert + expert) * self.tensor + column, *box


def _cut(
    offsets: tuple[int, ...], sizes: tuple[int, ...], dim: int, count: int, number: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Part ``number`` of ``count`` along ``dim``, as ``torch.chunk`` cuts: the last parts may be short or empty."""
    unit = -(-sizes[dim] // count)
    begin, end = min(number * unit, sizes[dim]), min((number + 1) * unit, sizes[dim])
    return (
        (*offsets[:dim], offsets[dim] + begin, *offsets[dim + 1 :]),
        (*sizes[:dim], end - begin, *sizes[dim + 1 :]),
    )


@lru_cache(maxsize=1 << 16)
def _chunk(offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> TensorWriteData:
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    return TensorWriteData(chunk, _PROPERTIES, torch.Size(shape))


def local_plans(placement: Placement) -> list[SavePlan]:
    """The plan of every rank before duplicates are removed, as ``dcp.save`` gathers them."""
    items: list[list[WriteItem]] = [[] for _ in range(placement.rank_count)]
    for tensor in placement.model.tensors():
        for rank, offsets, sizes in placement.holders(tensor):
            data = _chunk(offsets, sizes, tensor.shape)
            index = MetadataIndex(tensor.name, data.chunk.offsets)
            items[rank].append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    return [SavePlan(found) for found in items]


_FULL = Transformer()
_EIGHT_LAYERS = Transformer(layer_count=8, dense_layer_count=1, expert_count=32)

# By the name that contenders carry.
PLACEMENTS = {
    "pp8-ep8-fsdp8": Placement(_FULL, pipeline=8, data=8, expert=8),
    "pp4-fsdp16-tp8": Placement(_FULL, pipeline=4, data=16, tensor=8, whole_experts=True),
    "pp2-ep4-fsdp8": Placement(_EIGHT_LAYERS, pipeline=2, data=8, expert=4),
    "pp2-fsdp8-tp4": Placement(_EIGHT_LAYERS, pipeline=2, data=8, tensor=4, whole_experts=True),
    "fsdp4-tp2": Placement(_EIGHT_LAYERS, pipeline=1, data=4, tensor=2, whole_experts=True),
}
