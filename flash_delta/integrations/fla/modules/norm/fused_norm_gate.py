"""fla.modules.norm.fused_norm_gate: the gated RMS norm, after the addition of a residual, if there is one."""

import torch
from torch import Tensor

from flash_delta import modules
from flash_delta.integrations.fla.modules.norm._residual import add, place, refuse_bias, weight_of

__all__ = ["FusedRMSNormGated", "rms_norm_gated"]


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
    refuse_bias("rms_norm_gated", bias)
    total, kept = add(x, residual, residual_in_fp32)
    y = modules.gated_rms_norm(total, g, weight_of(x, weight), eps, activation).to(x.dtype)
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
        place(self, device, dtype)

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
