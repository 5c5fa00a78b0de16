"""One batch of sharded tables on its way, and what autograd sees of it: every exchange and its backward."""

from __future__ import annotations

from typing import Any

import torch

from twinproof.pipeline.jagged import Bags

__all__ = ["Exchange", "Replicated", "SentWeights", "ShardedContext"]


class ShardedContext:
    """One batch on its way through ``input_dist``, ``compute`` and ``output_dist``.

    Attributes:
        bags: this rank's own, of all features.
        strides: samples of each rank.
        way_home: of gradients of the batch's weights, where any rank's require one; otherwise None.
        passing: what every rank's backward has to visit: parameters of the feature processors, or ``SentWeights``.
        prefetched: what a pipeline read ahead, held for the batch's own lookup.
    """

    bags: Bags
    strides: list[int]
    way_home: Any = None
    passing: tuple[torch.Tensor, ...] = ()
    prefetched: Any = None

    def record_stream(self, stream: Any) -> None:
        """Keep the memory of the batch until ``stream`` has passed this point."""
        for value in (self.bags.indices, self.bags.offsets, self.bags.weights):
            if value is not None and value.device.type != "cpu":
                value.record_stream(stream)


class Exchange(torch.autograd.Function):
    """Pooled columns of all ranks' shards for this rank's samples; the backward sends gradients to the shards.

    What ``passing`` holds passes through without a gradient of its own, so that every rank's backward visits it: it
    exchanges gradients too, and a rank that looks nothing up would be missed by the others.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, module: Any, context: ShardedContext, count: int, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.module, ctx.context, ctx.passing = module, context, tensors[count:]
        result: torch.Tensor = module._exchange(context, tensors[:count])
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        module = ctx.module
        module.fused_optimizer.count_step()
        parts = module._exchange_back(ctx.context, grads[0].contiguous())
        return None, None, None, None, *parts, *(torch.zeros_like(each) for each in ctx.passing)


class Replicated(torch.autograd.Function):
    """Parameters that every rank holds; their gradient is the sum over ranks, each divided by ``divisor`` first."""

    @staticmethod
    def forward(ctx: Any, module: Any, divisor: int, *params: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.module, ctx.divisor = module, divisor
        return tuple(param.view_as(param) for param in params)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        flat = torch.cat([grad.reshape(-1).to(torch.float32) for grad in grads]) / ctx.divisor
        parts = ctx.module._sum_over_ranks(flat).split([grad.numel() for grad in grads])
        return None, None, *(part.reshape(g.shape).to(g.dtype) for part, g in zip(parts, grads, strict=True))


class SentWeights(torch.autograd.Function):
    """The received weights of each lookup, as the weights of all ranks' batches; the backward sends gradients home.

    Gradients were divided by W where they were sent to the shards. A weight is one rank's own: what comes home is
    multiplied by W again, the gradient of that rank's loss, as that of every parameter before an average over ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, module: Any, context: ShardedContext, own: Any, *received: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.module, ctx.context = module, context
        return anchor.new_zeros(0), *(weights.view_as(weights) for weights in received)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        module = ctx.module
        own = module._exchange_weight_gradients(ctx.context, torch.cat(grads)) * module.world_size
        return None, None, None, own if ctx.needs_input_grad[3] else None, *(None for _ in grads[1:])
