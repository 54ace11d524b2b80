"""Gathers the tokens of all ranks on every rank, for the keys and values of softmax attention."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from flash_delta.parallel.part import Part


class AllTokens(torch.autograd.Function):
    """Gathers tokens along an axis, in the order of the row. The backward pass sums the gradients of all ranks and
    takes those of this rank's tokens."""

    @staticmethod
    def forward(ctx, context: Part, dim: int, x: Tensor) -> Tensor:
        ctx.context, ctx.dim = context, dim
        most = max(context.split.tokens(rank) for rank in range(context.size))
        x = x.movedim(dim, 0)
        x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, most - context.tokens))  # an all-gather needs equal parts
        everyones, work = context.gather(x)
        work.wait()
        fragments = [everyones[rank, start:stop] for rank, start, stop in context.split.in_order()]
        return torch.cat(fragments).movedim(0, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx: Tensor):
        dx = dx.contiguous().clone()
        dist.all_reduce(dx, group=ctx.context.group)
        return None, None, ctx.context.shard(dx, ctx.dim)
