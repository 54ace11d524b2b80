"""Gates, write strength and norm. They turn the raw activations of a layer into the numbers of the recurrence.

The three ``naive_*`` functions are the definitions. They are easy to read, and autograd differentiates them.
``log_decay`` and the functions after it are the same mathematics with an explicit backward pass (`docs/mathematics.md`
section 5, [G1]-[G4]). They take tiles with any leading axes, where the head axis comes before the token axis.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_delta.problem import Gate

NORM_EPS = 1e-6  # inside the root, as in fla and transformers


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def naive_gdn_gate(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, output_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Log decay of Gated DeltaNet: ``-exp(A_log) * softplus(g + dt_bias)``.

    Args:
        g: raw activation ``[..., HV]``, any float dtype; computed in float32 (float64 stays float64).
        A_log: ``[HV]``.
        dt_bias: ``[HV]`` or None.
        output_dtype: dtype of the result, default float32.

    Example:
        >>> import torch
        >>> from flash_delta import naive_gdn_gate
        >>> naive_gdn_gate(torch.zeros(1), A_log=torch.zeros(1))  # -log 2
        tensor([-0.6931])

    Source: Yang et al., Gated Delta Networks, arXiv:2412.06464 (the gate of Mamba2, arXiv:2405.21060).
    """
    x = _wide(g) if dt_bias is None else _wide(g) + _wide(dt_bias)
    return (-_wide(A_log).exp() * F.softplus(x)).to(output_dtype)


def naive_kda_gate(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, output_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Log decay of Kimi Delta Attention, per channel: ``-exp(A_log) * softplus(g + dt_bias)``.

    Args:
        g: raw activation ``[..., HV, K]``, any float dtype; computed in float32 (float64 stays float64).
        A_log: ``HV`` elements, any shape.
        dt_bias: ``HV * K`` elements, any shape, or None.
        output_dtype: dtype of the result, default float32.

    Example:
        >>> import torch
        >>> from flash_delta import naive_kda_gate
        >>> naive_kda_gate(torch.zeros(1, 2), A_log=torch.zeros(1))  # -log 2 in both channels
        tensor([[-0.6931, -0.6931]])

    Source: Kimi Team, Kimi Linear, arXiv:2510.26692.
    """
    x = _wide(g) if dt_bias is None else _wide(g) + _wide(dt_bias).reshape(g.shape[-2:])
    return (-_wide(A_log).reshape(-1, 1).exp() * F.softplus(x)).to(output_dtype)


def naive_kda_lowerbound_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float = -5.0,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Bounded log decay, per channel: ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``, in ``(lower_bound, 0)``.

    Args:
        g: raw activation ``[..., HV, K]``, any float dtype; computed in float32 (float64 stays float64).
        A_log: ``HV`` elements, any shape; None drops the factor.
        dt_bias: ``HV * K`` elements, any shape, or None.
        lower_bound: the least log decay per token, in nats.
        output_dtype: dtype of the result, default float32.

    Example:
        >>> import torch
        >>> from flash_delta import naive_kda_lowerbound_gate
        >>> naive_kda_lowerbound_gate(torch.zeros(1, 2), lower_bound=-5.0)
        tensor([[-2.5000, -2.5000]])

    Source: the safe gate of Kimi Delta Attention as fla's ``naive_kda_lowerbound_gate`` defines it.
    """
    x = _wide(g) if dt_bias is None else _wide(g) + _wide(dt_bias).reshape(g.shape[-2:])
    x = x if A_log is None else _wide(A_log).reshape(-1, 1).exp() * x
    return (lower_bound * torch.sigmoid(x)).to(output_dtype)


def log_decay(gate: Gate, a: Tensor, rate: Tensor | None, bias: Tensor | None) -> Tensor:
    """The log decay of what the caller gives. From a raw gate ``-rate * softplus(a + bias)``, or with a bound
    ``bound * sigmoid(rate * (a + bias))``; rate = exp(A_log), None: 1. Else ``a``, or ``max(a, bound)``."""
    if not gate.raw:
        return a if gate.bound is None else a.clamp(min=gate.bound)
    x = a if bias is None else a + bias
    rate = 1.0 if rate is None else rate
    return -rate * F.softplus(x) if gate.bound is None else gate.bound * torch.sigmoid(rate * x)


def log_decay_backward(
    gate: Gate, dg: Tensor, a: Tensor, rate: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``(da, dA)`` of a raw gate, per element: the gradient of ``a``, which is also that of ``bias`` before its sum,
    and of ``A_log``."""
    x = a if bias is None else a + bias
    rate = 1.0 if rate is None else rate
    if gate.bound is None:
        return -dg * rate * torch.sigmoid(x), -dg * rate * F.softplus(x)
    s = torch.sigmoid(rate * x)
    da = dg * (gate.bound * rate) * s * (1 - s)
    return da, da * x


def strength(z: Tensor, top: float) -> Tensor:
    """``beta = top * sigmoid(z)``."""
    return top * torch.sigmoid(z)


def strength_backward(db: Tensor, b: Tensor, top: float) -> Tensor:
    return db * b * (1 - b / top)


def l2norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """``y = x r`` and ``r = (sum x^2 + eps)^{-1/2}`` over the last axis."""
    r = torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
    return x * r, r


def l2norm_backward(dy: Tensor, y: Tensor, r: Tensor) -> Tensor:
    return r * (dy - y * (y * dy).sum(-1, keepdim=True))
