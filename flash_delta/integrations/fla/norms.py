"""fla.modules.norm: norms after the addition of a residual, if there is one. The residual is added before the norm, and
the sum goes to the next block.

The L2 norm is computed by the RMS norm. With ``use_qk_l2norm_in_kernel`` the ops normalise by themselves.
"""

import torch
from torch import Tensor, nn

from flash_delta import modules
from flash_delta.ops._check.options import refuse
from flash_delta.ops._elementwise import compute_backward
from flash_delta.ops._operators.elementwise import NORM, Normalized


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``norm(x + residual)`` in x's dtype; with ``prenorm`` also the sum. ``bias`` has to be None."""
    _refuse_bias("rms_norm", bias)
    total, kept = _add(x, residual, residual_in_fp32)
    y = modules.rms_norm(total, _weight_of(x, weight), eps).to(x.dtype)
    return (y, kept) if prenorm else y


class RMSNorm(modules.RMSNorm):
    """:class:`flash_delta.modules.RMSNorm` with the arguments of fla's."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if bias:
            refuse("RMSNorm", "bias", "False (add it to the result)", bias)
        super().__init__(hidden_size, eps, elementwise_affine=elementwise_affine)
        _place(self, device, dtype)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``norm(x + residual)`` in x's dtype; with ``prenorm`` also the sum, for the next block."""
        return rms_norm(x, self.weight, None, residual, self.eps, prenorm, residual_in_fp32)


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:
    """``norm(x + residual) * act(g)`` in x's dtype; with ``prenorm`` also the sum. ``bias`` has to be None."""
    _refuse_bias("rms_norm_gated", bias)
    total, kept = _add(x, residual, residual_in_fp32)
    y = modules.gated_rms_norm(total, g, _weight_of(x, weight), eps, activation).to(x.dtype)
    return (y, kept) if prenorm else y


class FusedRMSNormGated(modules.GatedRMSNorm):
    """:class:`flash_delta.modules.GatedRMSNorm` with the arguments of fla's."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, activation, elementwise_affine=elementwise_affine)
        _place(self, device, dtype)

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``norm(x + residual) * act(g)`` in x's dtype; with ``prenorm`` also the sum, for the next block."""
        return rms_norm_gated(x, g, self.weight, None, self.activation, residual, prenorm, residual_in_fp32, self.eps)


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last axis, computed in at least float32. Default dtype: x's."""
    wide = x if output_dtype is None else x.to(torch.promote_types(x.dtype, output_dtype))
    y = modules.rms_norm(wide, _root_weight(wide), eps / x.shape[-1])
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
    fields = "l2norm_bwd", None, eps / x.shape[-1]
    return compute_backward(NORM, Normalized(x, _root_weight(x)), fields, dy.to(y.dtype)).x


def _root_weight(x: Tensor) -> Tensor:
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


def _refuse_bias(op: str, bias: Tensor | None) -> None:
    """Refuse a bias, since no norm here has one."""
    if bias is not None:
        refuse(op, "bias", "None", "a tensor")


def _weight_of(x: Tensor, weight: Tensor | None) -> Tensor:
    """The weight, or ones for a norm without a weight."""
    return x.new_ones(x.shape[-1]) if weight is None else weight


def _place(norm: modules.RMSNorm, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
    norm.hidden_size = norm.weight.shape[0]
    norm.register_parameter("bias", None)  # code for fla checks whether there is a bias
    norm.to(device=device, dtype=dtype)


def _add(x: Tensor, residual: Tensor | None, in_fp32: bool) -> tuple[Tensor, Tensor]:
    """The sum in at least float32, for the norm; and for the next block: the sum in the residual's dtype, or x
    itself."""
    if residual is None:
        return x, x.float() if in_fp32 else x
    total = x.to(torch.promote_types(x.dtype, torch.float32)) + residual
    return total, total.to(residual.dtype)
