"""Root-mean-square norms, computed in fp32 (fp64 for fp64 inputs) and returned in the input's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ACTIVATIONS = {"silu": F.silu, "swish": F.silu, "sigmoid": torch.sigmoid}


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight * act(gate); x, gate [..., D], weight [D] -> y, in x's dtype.

    Raises:
        ValueError: if the gate's shape or the activation is not that of :class:`GatedRMSNorm`.
    """
    _check_activation(activation)
    if gate.shape != x.shape:
        raise ValueError(f"gate: expected x's shape {list(x.shape)}, got {list(gate.shape)}")
    y = _normalize(x, weight, eps)
    return (y * ACTIVATIONS[activation](gate.to(y.dtype))).to(x.dtype)


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
        return _normalize(x, self.weight, self.eps).to(x.dtype)

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
        _check_activation(activation)
        self.activation = activation

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate [..., hidden_size] -> the same shape, in x's dtype."""
        return gated_rms_norm(x, gate, self.weight, self.eps, self.activation)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"


def _normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def _check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {sorted(ACTIVATIONS)}, got {activation!r}")
