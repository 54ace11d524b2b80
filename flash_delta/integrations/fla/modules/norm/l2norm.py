"""fla.modules.norm.l2norm, in plain PyTorch: the ops normalise by themselves, with ``use_qk_l2norm_in_kernel``."""

import torch
from torch import Tensor, nn

__all__ = ["L2Norm", "l2_norm", "l2norm", "l2norm_bwd", "l2norm_fwd"]


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last axis, computed in at least float32. Default dtype: x's."""
    return _l2norm(x, eps, output_dtype)[0]


l2_norm = l2norm


@torch.no_grad()
def l2norm_fwd(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """:func:`l2norm` without autograd, and ``1 / sqrt(sum(x^2) + eps)`` of every row [...] in at least float32."""
    return _l2norm(x, eps, output_dtype)


@torch.no_grad()
def l2norm_bwd(y: Tensor, rstd: Tensor, dy: Tensor, eps: float = 1e-6) -> Tensor:
    """The gradient of x, in y's dtype, from what :func:`l2norm_fwd` returned. ``eps`` is in ``rstd``."""
    wide, dwide = y.to(rstd.dtype), dy.to(rstd.dtype)
    dx = (dwide - (dwide * wide).sum(-1, keepdim=True) * wide) * rstd.unsqueeze(-1)
    return dx.to(y.dtype)


def _l2norm(x: Tensor, eps: float, output_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rstd = torch.rsqrt(wide.square().sum(-1) + eps)
    return (wide * rstd.unsqueeze(-1)).to(x.dtype if output_dtype is None else output_dtype), rstd


class L2Norm(nn.Module):
    """:func:`l2norm` as a module."""

    def __init__(self, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps, self.output_dtype = eps, output_dtype

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> the same shape."""
        return l2norm(x, self.eps, self.output_dtype)
