"""Raw gate activations to log decays, for callers that keep the gate outside the delta rule ops."""

import torch
from torch import Tensor

from flash_delta.ops._check.options import as_float, refuse
from flash_delta.ops._check.rule import check_kind, check_shape
from flash_delta.reference.activation import naive_gdn_gate, naive_kda_gate, naive_kda_lowerbound_gate

__all__ = ["fused_gdn_gate", "fused_kda_gate", "naive_gdn_gate", "naive_kda_gate", "naive_kda_lowerbound_gate"]


def fused_gdn_gate(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, output_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Log decay of Gated DeltaNet: ``-exp(A_log) * softplus(g + dt_bias)``, with gradients for all three.

    Args:
        g: raw activation ``[..., HV]``, any float dtype; computed in float32 (float64 stays float64).
        A_log: ``[HV]``.
        dt_bias: ``[HV]`` or None. Its gradient and that of A_log are summed in float32 before any cast.
        output_dtype: dtype of the result. Default float32.

    Returns:
        log decay in nats ``[..., HV]``, at most 0, for the ops' ``g``.

    Raises:
        ValueError: naming the argument, what was expected and what came.

    Example:
        >>> import torch
        >>> from flash_delta import fused_gdn_gate
        >>> g = fused_gdn_gate(torch.randn(2, 100, 4), A_log=torch.zeros(4), dt_bias=torch.zeros(4))
        >>> g.shape, bool((g <= 0).all())
        (torch.Size([2, 100, 4]), True)

    Source: Yang, Kautz, Hatamizadeh, Gated Delta Networks, arXiv:2412.06464.
    """
    op = "fused_gdn_gate"
    HV = check_shape(op, "g", g, *_leading(g, 1), "HV")[-1]
    if A_log is None:
        refuse(op, "A_log", f"a tensor of {HV} elements", "None")
    _check_tensors(op, g, HV, HV, A_log, dt_bias)
    return naive_gdn_gate(g, A_log, dt_bias, output_dtype)


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Log decay of Kimi Delta Attention per channel, with gradients for g, A_log and dt_bias.

    ``-exp(A_log) * softplus(g + dt_bias)``, or with a bound ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``.

    Args:
        g: raw activation ``[..., HV, K]``, any float dtype; computed in float32 (float64 stays float64).
        A_log: ``HV`` elements; None only with ``lower_bound``, and then the factor is 1.
        dt_bias: ``HV * K`` elements or None. Its gradient and that of A_log are summed in float32 before any cast.
        lower_bound: the least log decay per token, negative. Default None: unbounded.
        output_dtype: dtype of the result. Default float32.

    Returns:
        log decay in nats ``[..., HV, K]``, at most 0, for the ops' ``g``.

    Raises:
        ValueError: naming the argument, what was expected and what came.

    Example:
        >>> import torch
        >>> from flash_delta import fused_kda_gate
        >>> g = fused_kda_gate(torch.randn(2, 100, 4, 32), A_log=torch.zeros(4), lower_bound=-5.0)
        >>> g.shape, bool((g > -5).all())
        (torch.Size([2, 100, 4, 32]), True)

    Source: Kimi Team, Kimi Linear, arXiv:2510.26692.
    """
    op = "fused_kda_gate"
    HV, K = check_shape(op, "g", g, *_leading(g, 2), "HV", "K")[-2:]
    _check_tensors(op, g, HV, HV * K, A_log, dt_bias)
    if lower_bound is not None:
        bound = as_float(op, "lower_bound", lower_bound, "a negative number")
        if bound >= 0:
            refuse(op, "lower_bound", "a negative number", repr(lower_bound))
        return naive_kda_lowerbound_gate(g, A_log, dt_bias, bound, output_dtype)
    if A_log is None:
        refuse(op, "A_log", f"a tensor of {HV} elements without lower_bound", "None")
    return naive_kda_gate(g, A_log, dt_bias, output_dtype)


def _leading(g: Tensor, named: int) -> list[str]:
    return ["..."] * (g.dim() - named if isinstance(g, Tensor) else 1)


def _check_tensors(op: str, g: Tensor, heads: int, biases: int, A_log: Tensor | None, dt_bias: Tensor | None) -> None:
    for name, t, count in (("g", g, g.numel()), ("A_log", A_log, heads), ("dt_bias", dt_bias, biases)):
        if t is None:
            continue
        if not isinstance(t, Tensor) or t.numel() != count:
            got = f"shape {list(t.shape)}" if isinstance(t, Tensor) else type(t).__name__
            refuse(op, name, f"a tensor of {count} elements", got)
        check_kind(op, name, t, g.device, like="g")
