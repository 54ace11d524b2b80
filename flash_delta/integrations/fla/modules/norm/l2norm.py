"""fla.modules.norm.l2norm in plain PyTorch. With ``use_qk_l2norm_in_kernel`` the ops normalise by themselves."""

import torch
from torch import Tensor, nn

__all__ = ["L2Norm", "l2_norm", "l2norm", "l2norm_bwd", "l2norm_fwd"]


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last axis, computed in at least float32. Default dtype: x's."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)
    return y.to(x.dtype if output_dtype is None else output_dtype)


l2_norm = l2norm


@torch.no_grad()
def l2norm_fwd(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """`l2norm` without autograd, and ``1 / sqrt(sum(x^2) + eps)`` of every row [...] in at least float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rstd = torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, dtype=wide).square() + eps)
    y = x.new_empty(x.shape, dtype=x.dtype if output_dtype is None else output_dtype)
    return torch.mul(x, rstd.unsqueeze(-1), out=y), rstd  # y is written once, in its own dtype


@torch.no_grad()
def l2norm_bwd(y: Tensor, rstd: Tensor, dy: Tensor, eps: float = 1e-6) -> Tensor:
    """The gradient of x, in y's dtype, from the results of :func:`l2norm_fwd`. ``rstd`` already contains ``eps``."""
    wide = dy.to(rstd.dtype)
    along = (wide * y).sum(-1, keepdim=True)
    return torch.mul(torch.addcmul(wide, along, y, value=-1), rstd.unsqueeze(-1), out=y.new_empty(y.shape))


class L2Norm(nn.Module):
    """`l2norm` as a module."""

    def __init__(self, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps, self.output_dtype = eps, output_dtype

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> the same shape."""
        return l2norm(x, self.eps, self.output_dtype)
