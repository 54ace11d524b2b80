"""fla.modules.norm.l2norm, by the RMS norm. With ``use_qk_l2norm_in_kernel`` the ops normalise by themselves."""

import torch
from torch import Tensor, nn

from flash_delta.modules import rms_norm
from flash_delta.ops._elementwise import Normalized, normalize_backward

__all__ = ["L2Norm", "l2_norm", "l2norm", "l2norm_bwd", "l2norm_fwd"]


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last axis, computed in at least float32. Default dtype: x's."""
    wide = x if output_dtype is None else x.to(torch.promote_types(x.dtype, output_dtype))
    y = rms_norm(wide, _weight(wide), eps / x.shape[-1])
    return y if output_dtype is None else y.to(output_dtype)


l2_norm = l2norm


@torch.no_grad()
def l2norm_fwd(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """`l2norm` without autograd, and ``1 / sqrt(sum(x^2) + eps)`` of every row [...] in at least float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rstd = torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, dtype=wide).square() + eps)
    return l2norm(x, eps, output_dtype), rstd


@torch.no_grad()
def l2norm_bwd(y: Tensor, rstd: Tensor, dy: Tensor, eps: float = 1e-6) -> Tensor:
    """The gradient of x, in y's dtype, from the results of :func:`l2norm_fwd` with the same ``eps``."""
    x = torch.div(y, rstd.unsqueeze(-1), out=y.new_empty(y.shape))  # written once, in y's dtype
    return normalize_backward(Normalized(x, _weight(x)), "l2norm_bwd", None, eps / x.shape[-1], dy.to(y.dtype)).x


def _weight(x: Tensor) -> Tensor:
    """The weight with which an RMS norm with ``eps / D`` divides by the root of the sum of squares."""
    D = x.shape[-1]
    return x.new_full((D,), D**-0.5, dtype=torch.promote_types(x.dtype, torch.float32))


class L2Norm(nn.Module):
    """`l2norm` as a module."""

    def __init__(self, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps, self.output_dtype = eps, output_dtype

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> the same shape."""
        return l2norm(x, self.eps, self.output_dtype)
