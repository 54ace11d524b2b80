"""fla.ops.cp.comm: the exchange between ranks for the short convolution."""

import torch
import torch.distributed as dist
from torch import Tensor


def conv_cp_send_recv_fwd(tails: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The ``tails`` of the rank before, or zeros on the first rank. All ranks of the group have to call this."""
    return _of_rank(dist.get_rank(group) - 1, tails, group)


def conv_cp_send_recv_bwd(d_initial_state: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The gradient from the rank after for the tails that it got, or zeros on the last rank."""
    return _of_rank(dist.get_rank(group) + 1, d_initial_state, group)


def _of_rank(rank: int, x: Tensor, group: dist.ProcessGroup) -> Tensor:
    everyones = x.new_empty(dist.get_world_size(group), *x.shape)
    dist.all_gather(list(everyones), x.contiguous(), group=group)
    return everyones[rank].clone() if 0 <= rank < len(everyones) else torch.zeros_like(x)
