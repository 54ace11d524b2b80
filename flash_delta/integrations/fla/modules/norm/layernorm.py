"""fla.modules.norm.layernorm: the RMS norm, after the addition of a residual, if there is one."""

import torch
from torch import Tensor

from flash_delta import modules
from flash_delta.integrations.fla.modules.norm._residual import add, place, refuse_bias, weight_of
from flash_delta.ops._check.options import refuse

__all__ = ["RMSNorm", "rms_norm"]


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
    refuse_bias("rms_norm", bias)
    total, kept = add(x, residual, residual_in_fp32)
    y = modules.rms_norm(total, weight_of(x, weight), eps).to(x.dtype)
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
        place(self, device, dtype)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``norm(x + residual)`` in x's dtype; with ``prenorm`` also the sum, for the next block."""
        return rms_norm(x, self.weight, None, residual, self.eps, prenorm, residual_in_fp32)
