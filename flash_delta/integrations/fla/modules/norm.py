"""fla.modules.norm: RMS norms that add a residual first, if there is one."""

import torch
from torch import Tensor

from flash_delta import modules
from flash_delta.ops._check.options import refuse


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
        total, kept = _add(x, residual, residual_in_fp32)
        y = super().forward(total).to(x.dtype)
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
        total, kept = _add(x, residual, residual_in_fp32)
        y = super().forward(total, g).to(x.dtype)
        return (y, kept) if prenorm else y


def _place(norm: modules.RMSNorm, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
    norm.hidden_size = norm.weight.shape[0]
    norm.register_parameter("bias", None)  # code for fla looks whether there is one
    norm.to(device=device, dtype=dtype)


def _add(x: Tensor, residual: Tensor | None, in_fp32: bool) -> tuple[Tensor, Tensor]:
    """The sum in at least float32, to be normalised; and what goes on: it in the residual's dtype, or x itself."""
    if residual is None:
        return x, x.float() if in_fp32 else x
    total = x.to(torch.promote_types(x.dtype, torch.float32)) + residual
    return total, total.to(residual.dtype)
