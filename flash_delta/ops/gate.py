"""Raw gate activations to log decays, for callers that keep the gate outside the delta rule ops."""

import torch
from torch import Tensor

from flash_delta.ops._elementwise import compute
from flash_delta.ops._operators.elementwise import GATE, Gated
from flash_delta.reference.activation import naive_gdn_gate, naive_kda_gate, naive_kda_lowerbound_gate

__all__ = ["fused_gdn_gate", "fused_kda_gate", "naive_gdn_gate", "naive_kda_gate", "naive_kda_lowerbound_gate"]


def fused_gdn_gate(
    g: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
    *,
    backend: str | None = None,
) -> Tensor:
    """Log decay of Gated DeltaNet: ``-exp(A_log) * softplus(g + dt_bias)``, with gradients for all three.

    On a GPU this is one kernel, and the backward pass is one more. The same call gives the same bits again.

    Args:
        g: raw activation ``[..., HV]``, any float dtype; computed in float32 (float64 stays float64).
        A_log: ``[HV]``.
        dt_bias: ``[HV]`` or None. Its gradient and A_log's are summed in float32 before any cast.
        output_dtype: dtype of the result. Default float32.
        backend: "triton", "torch" or "hopper" (which runs Triton's kernel). It runs the call or refuses it. Kernels
            have no second derivative, and float64 runs on "torch" only. Default None: the one that
            ``FLASH_DELTA_BACKEND`` names, or else the first that can run the call.

    Returns:
        log decay in nats ``[..., HV]``, at most 0, for the ops' ``g``.

    Raises:
        ValueError: naming the argument, what was expected and what came; or if the backend cannot run this.

    Example:
        >>> import torch
        >>> from flash_delta import fused_gdn_gate
        >>> g = fused_gdn_gate(torch.randn(2, 100, 4), A_log=torch.zeros(4), dt_bias=torch.zeros(4))
        >>> g.shape, bool((g <= 0).all())
        (torch.Size([2, 100, 4]), True)

    Source: Yang, Kautz, Hatamizadeh, Gated Delta Networks, arXiv:2412.06464.
    """
    return compute(GATE, Gated(g, A_log, dt_bias), ("fused_gdn_gate", ("scalar", True, None), output_dtype), backend)


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
    *,
    backend: str | None = None,
) -> Tensor:
    """Log decay of Kimi Delta Attention per channel, with gradients for g, A_log and dt_bias.

    ``-exp(A_log) * softplus(g + dt_bias)``, or with a bound ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``.
    On a GPU this is one kernel, and the backward pass is one more. The same call gives the same bits again.

    Args:
        g: raw activation ``[..., HV, K]``, any float dtype; computed in float32 (float64 stays float64).
        A_log: ``HV`` elements; None only with ``lower_bound``, and then the factor is 1.
        dt_bias: ``HV * K`` elements or None. Its gradient and A_log's are summed in float32 before any cast.
        lower_bound: the least log decay per token, negative. Default None: unbounded.
        output_dtype: dtype of the result. Default float32.
        backend: "triton", "torch" or "hopper" (which runs Triton's kernel). It runs the call or refuses it. Kernels
            have no second derivative, and float64 runs on "torch" only. Default None: the one that
            ``FLASH_DELTA_BACKEND`` names, or else the first that can run the call.

    Returns:
        log decay in nats ``[..., HV, K]``, at most 0, for the ops' ``g``.

    Raises:
        ValueError: naming the argument, what was expected and what came; or if the backend cannot run this.

    Example:
        >>> import torch
        >>> from flash_delta import fused_kda_gate
        >>> g = fused_kda_gate(torch.randn(2, 100, 4, 32), A_log=torch.zeros(4), lower_bound=-5.0)
        >>> g.shape, bool((g > -5).all())
        (torch.Size([2, 100, 4, 32]), True)

    Source: Kimi Team, Kimi Linear, arXiv:2510.26692.
    """
    fields = "fused_kda_gate", ("channel", True, lower_bound), output_dtype
    return compute(GATE, Gated(g, A_log, dt_bias), fields, backend)
