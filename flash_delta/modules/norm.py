"""Root-mean-square norms, computed in fp32 (fp64 for fp64 inputs) and returned in the input's dtype."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn

from flash_delta.modules._shards import shared
from flash_delta.ops._check.options import ACTIVATIONS, as_bool, as_eps, as_size
from flash_delta.ops._elementwise import compute
from flash_delta.ops._operators.elementwise import NORM, Normalized


def rms_norm(x: Tensor, weight: Tensor, eps: float, backend: str | None = None) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight; x [..., D], weight [D] -> y, in x's dtype.

    Args:
        x: float16, bfloat16, float32 or float64.
        weight: [D], any of these dtypes.
        eps: added to the mean square; at least 0.
        backend: "triton", "torch" or "hopper", which runs Triton's norm. It runs the call or refuses it. Default None:
            the one that ``FLASH_DELTA_BACKEND`` names, or else the first that can run the call.

    Raises:
        ValueError: naming the argument, what was expected and what came; or if the backend cannot run this.

    Example:
        >>> import torch
        >>> from flash_delta.modules import rms_norm
        >>> rms_norm(torch.full((1, 4), 3.0), weight=torch.ones(4), eps=0.0)
        tensor([[1., 1., 1., 1.]])

    Source: Zhang, Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.
    """
    return compute(NORM, Normalized(x, weight), ("rms_norm", None, eps), backend)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str, backend: str | None = None
) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight * act(gate); x, gate [..., D], weight [D] -> y, in x's dtype.

    Args:
        x: as in :func:`rms_norm`; so are weight, eps and backend.
        gate: of x's shape, any float dtype.
        activation: "silu" ("swish" is the same) or "sigmoid".

    Raises:
        ValueError: as :func:`rms_norm`.

    Example:
        >>> import torch
        >>> from flash_delta.modules import gated_rms_norm
        >>> x, gate = torch.full((1, 4), 3.0), torch.zeros(1, 4)
        >>> gated_rms_norm(x, gate, weight=torch.ones(4), eps=0.0, activation="sigmoid")
        tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
    """
    if activation not in ACTIVATIONS:
        _refuse_activation("gated_rms_norm", activation)
    return compute(NORM, Normalized(x, weight, gate), ("gated_rms_norm", ACTIVATIONS[activation], eps), backend)


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last axis (arXiv:1910.07467).

    Under autocast y has autocast's dtype, as the result of `nn.Linear` has: a projection after it would round y anyway.

    Args:
        hidden_size: width of the last axis.
        eps: added to the mean square. Default 1e-5.
        backend: as in :func:`rms_norm`. Default None.
        elementwise_affine: whether the weight is trained and saved. Otherwise it is ones. Default True.

    Raises:
        ValueError: if hidden_size is below 1 or eps below 0, or if they are not numbers.

    Example:
        >>> import torch
        >>> from flash_delta.modules import RMSNorm
        >>> norm = RMSNorm(64)
        >>> norm(torch.randn(2, 100, 64)).shape
        torch.Size([2, 100, 64])
    """

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, backend: str | None = None, elementwise_affine: bool = True
    ) -> None:
        super().__init__()
        op = type(self).__name__
        self.eps, self.backend = as_eps(op, "eps", eps), backend
        self.elementwise_affine = as_bool(op, "elementwise_affine", elementwise_affine)
        weight = torch.empty(as_size(op, "hidden_size", hidden_size))
        if self.elementwise_affine:
            self.weight = nn.Parameter(weight)
        else:
            self.register_buffer("weight", weight, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to ones."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden_size] -> the same shape, in x's dtype or autocast's."""
        fields = "rms_norm", None, self.eps, autocast_dtype(x)
        return compute(NORM, Normalized(x, shared(self.weight)), fields, self.backend)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class GatedRMSNorm(RMSNorm):
    """y = RMSNorm(x) * act(gate): the output norm of Gated DeltaNet (silu) and Kimi Delta Attention (sigmoid).

    Args:
        hidden_size: width of the last axis.
        eps: added to the mean square. Default 1e-5.
        activation: "silu" ("swish" is the same) or "sigmoid". Default "silu".
        backend: as in :func:`rms_norm`. Default None.
        elementwise_affine: as in :class:`RMSNorm`. Default True.

    Raises:
        ValueError: if the activation is none of these; and as :class:`RMSNorm`.

    Example:
        >>> import torch
        >>> from flash_delta.modules import GatedRMSNorm
        >>> norm, x = GatedRMSNorm(64, activation="sigmoid"), torch.randn(2, 100, 64)
        >>> norm(x, gate=torch.randn_like(x)).shape
        torch.Size([2, 100, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        activation: str = "silu",
        backend: str | None = None,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__(hidden_size, eps, backend, elementwise_affine)
        if activation not in ACTIVATIONS:
            _refuse_activation(type(self).__name__, activation)
        self.activation = activation

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate [..., hidden_size] -> the same shape, in x's dtype or autocast's."""
        fields = "gated_rms_norm", ACTIVATIONS[self.activation], self.eps, autocast_dtype(x)
        return compute(NORM, Normalized(x, shared(self.weight), gate), fields, self.backend)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype in which autocast wants the result of a norm of ``x``; None if it wants none."""
    kind = x.device.type
    if kind == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None  # torch raises an error for "meta", and casts no float64
    return torch.get_autocast_dtype(kind)


def _refuse_activation(name: str, activation: str) -> NoReturn:
    raise ValueError(f"{name}: activation: expected one of {sorted(ACTIVATIONS)}, got {activation!r}")
