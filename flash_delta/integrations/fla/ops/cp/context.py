"""fla.ops.cp.context: the split of a packed row, for code that exchanges the inputs of convolutions by itself."""

import torch
import torch.distributed as dist
from torch import Tensor

from flash_delta.ops._check.options import refuse
from flash_delta.parallel import ContextParallel

__all__ = ["build_cp_context"]


def build_cp_context(
    cu_seqlens: Tensor,
    group: dist.ProcessGroup,
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    use_tf32x3_affine_chain: bool = True,
    layout: str = "contiguous",
) -> "RowContext":
    """Makes a ``cp_context`` for chunk ops and `causal_conv1d`: a row in equal parts, one on each rank.

    :class:`flash_delta.parallel.ContextParallel` describes any split, and also works with whole layers.

    Args:
        cu_seqlens: the bounds [N + 1] of all sequences of the whole row. If they are on a GPU, the host waits for them
            unless there are ``cu_seqlens_cpu``.
        group: the ranks.
        conv1d_kernel_size: kept as an attribute, and not used.
        cu_seqlens_cpu: the same bounds on the host.
        use_tf32x3_affine_chain: has to be True.
        layout: has to be "contiguous".

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    op = "build_cp_context"
    if use_tf32x3_affine_chain is not True:
        refuse(op, "use_tf32x3_affine_chain", "True", use_tf32x3_affine_chain)
    if layout != "contiguous":
        refuse(op, "layout", "'contiguous' (a ContextParallel with head_tail takes others)", repr(layout))
    bounds = (cu_seqlens.cpu() if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist()
    size = dist.get_world_size(group)
    if bounds[-1] % size:
        refuse(op, "cu_seqlens", f"a number of tokens that {size} ranks divide", bounds[-1])
    return RowContext(ContextParallel(group, bounds), bounds, cu_seqlens.device, conv1d_kernel_size)


class RowContext:
    """A rank's part of a row, with the attributes that ops need, and those that trainers read under fla's names.

    Attributes:
        context: the same as a ContextParallel.
        group: the ranks.
        cu_seqlens: the bounds of this rank's parts of sequences, counted from 0, in int32; ``cu_seqlens_cpu`` on the
            host.
        conv1d_kernel_size: as given.
        pre_num_conv_tokens: how many tokens of its first sequence are on earlier ranks.
    """

    def __init__(
        self, context: ContextParallel, bounds: list[int], device: torch.device, conv1d_kernel_size: int | None
    ) -> None:
        start = context.rank * context.tokens
        self.context, self.group, self.conv1d_kernel_size = context, context.group, conv1d_kernel_size
        self.tokens, self.bounds = context.tokens, context.bounds
        self.place, self.delta_rule = context.place, context.delta_rule
        self.pre_num_conv_tokens = start - max(bound for bound in bounds if bound <= start)
        self.cu_seqlens_cpu = torch.tensor(context.bounds, dtype=torch.int32).unique_consecutive()
        self.cu_seqlens = self.cu_seqlens_cpu.to(device, non_blocking=True)
