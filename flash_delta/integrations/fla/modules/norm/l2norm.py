"""fla.modules.norm.l2norm, in plain PyTorch: the ops normalise by themselves, with ``use_qk_l2norm_in_kernel``."""

import torch
from torch import Tensor, nn

__all__ = ["L2Norm", "l2_norm", "l2norm"]


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last axis, computed in at least float32. Default dtype: x's."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)
    return y.to(x.dtype if output_dtype is None else output_dtype)


l2_norm = l2norm


class L2Norm(nn.Module):
    """:func:`l2norm` as a module."""

    def __init__(self, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps, self.output_dtype = eps, output_dtype

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> the same shape."""
        return l2norm(x, self.eps, self.output_dtype)
