"""Root-mean-square norms, computed in fp32 (fp64 for fp64 inputs) and returned in the input's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ACTIVATIONS = {"silu": F.silu, "swish": F.silu, "sigmoid": torch.sigmoid}


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last axis (arXiv:1910.07467).

    Args:
        hidden_size: width of the last axis.
        eps: added to the mean square. Default 1e-5.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden_size] -> the same shape and dtype."""
        return self._normalize(x).to(x.dtype)

    def _normalize(self, x: Tensor) -> Tensor:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class GatedRMSNorm(RMSNorm):
    """y = RMSNorm(x) * act(gate): the output norm of Gated DeltaNet (silu) and Kimi Delta Attention (sigmoid).

    Args:
        hidden_size: width of the last axis.
        eps: added to the mean square. Default 1e-5.
        activation: "silu" ("swish" is the same) or "sigmoid". Default "silu".

    Raises:
        ValueError: if the activation is none of these.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, activation: str = "silu") -> None:
        super().__init__(hidden_size, eps)
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: expected one of {sorted(ACTIVATIONS)}, got {activation!r}")
        self.activation = activation

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate [..., hidden_size] -> the same shape, in x's dtype."""
        if gate.shape != x.shape:
            raise ValueError(f"gate: expected x's shape {list(x.shape)}, got {list(gate.shape)}")
        y = self._normalize(x)
        return (y * ACTIVATIONS[self.activation](gate.to(y.dtype))).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"
