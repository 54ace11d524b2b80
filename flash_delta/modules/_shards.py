"""Parameters that tensor parallelism laid out as DTensors, for modules that compute with plain tensors."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def own_shard(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter that is split over ranks. A plain parameter is returned as it is."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def shared(parameter: Tensor) -> Tensor:
    """A parameter that every rank has and uses for its own heads. Its gradient is the sum of the ranks' gradients."""
    if not isinstance(parameter, DTensor):
        return parameter
    return _Shared.apply(parameter.to_local(), parameter.device_mesh.get_group())


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx: Tensor):
        dx = dx.contiguous().clone()
        dist.all_reduce(dx, group=ctx.group)
        return dx, None
