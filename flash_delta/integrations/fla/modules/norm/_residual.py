"""The residual of fla's norms. It is added before the norm, and the sum goes to the next block."""

import torch
from torch import Tensor

from flash_delta import modules
from flash_delta.ops._check.options import refuse


def refuse_bias(op: str, bias: Tensor | None) -> None:
    """Refuse a bias, since no norm here has one."""
    if bias is not None:
        refuse(op, "bias", "None", "a tensor")


def weight_of(x: Tensor, weight: Tensor | None) -> Tensor:
    """The weight, or ones for a norm without a weight."""
    return x.new_ones(x.shape[-1]) if weight is None else weight


def place(norm: modules.RMSNorm, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
    norm.hidden_size = norm.weight.shape[0]
    norm.register_parameter("bias", None)  # code for fla checks whether there is a bias
    norm.to(device=device, dtype=dtype)


def add(x: Tensor, residual: Tensor | None, in_fp32: bool) -> tuple[Tensor, Tensor]:
    """The sum in at least float32, for the norm; and for the next block: the sum in the residual's dtype, or x
    itself."""
    if residual is None:
        return x, x.float() if in_fp32 else x
    total = x.to(torch.promote_types(x.dtype, torch.float32)) + residual
    return total, total.to(residual.dtype)
