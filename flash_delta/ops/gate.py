"""Raw gate activations to log decays, for callers that keep the gate outside the delta rule ops. How far GDN-2's erase
gate stretches a state, and a guard against it."""

import torch
from torch import Tensor

from flash_delta.ops._elementwise import compute
from flash_delta.ops._operators.elementwise import GATE, Gated
from flash_delta.reference.activation import naive_gdn_gate, naive_kda_gate, naive_kda_lowerbound_gate

__all__ = [
    "erase_norm",
    "fused_gdn_gate",
    "fused_kda_gate",
    "guard_erase",
    "naive_gdn_gate",
    "naive_kda_gate",
    "naive_kda_lowerbound_gate",
]


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


def erase_norm(k: Tensor, b: Tensor) -> Tensor:
    r"""The most by which a token's erase can stretch a state of GDN-2, before its decay: the largest singular value of

    .. math::
        I - k_t (b_t \odot k_t)^\top

    A sequence whose tokens decay by less than this may have states that grow without limit. :func:`guard_erase` changes
    b so that no token does this. Kimi Delta Attention's erase, with one beta from 0 to 2 for all channels and a unit
    key, never stretches: there it is 1.

    Args:
        k: keys ``[B, T, H, K]``, any float dtype, as the rule uses them: after their norm, if the op normalises them.
        b: erase gate ``[B, T, HV, K]``, not its logit; HV a multiple of H.

    Returns:
        ``[B, T, HV]`` in float32, or in float64 if k or b is. At least 1, if K is above 1.

    Raises:
        ValueError: if k and b do not have these shapes.

    Example:
        >>> import torch
        >>> from flash_delta import erase_norm
        >>> k = torch.nn.functional.normalize(torch.randn(1, 100, 2, 32), dim=-1)
        >>> b = torch.rand(1, 100, 4, 32)
        >>> bool((erase_norm(k, b) <= (4 / 3) ** 0.5 + 1e-6).all())  # for b from 0 to 1
        True

    Source: `docs/mathematics.md`, tag N4.
    """
    _, kept, spread = _erased(*_keys_and_gates("erase_norm", k, b))
    total = 1 + kept + spread
    return ((total + (total.square() - 4 * kept).clamp(min=0).sqrt()) / 2).sqrt()


def guard_erase(k: Tensor, b: Tensor, g: Tensor) -> Tensor:
    r"""An erase gate for GDN-2 that lets no state grow: b, moved to its mean where a token would stretch more than it
    decays.

    .. math::
        m = \frac{\langle k, b \odot k \rangle}{|k|^2}, \qquad b' = m + c \, (b - m), \qquad
        \left| (I - k (b' \odot k)^\top) \, \mathrm{diag}(e^{g}) \right|_2 \le 1

    c is the largest number from 0 to 1 for which this follows from the least decay of the token's channels. It is 1
    where b satisfies it already. It is 0 for a token with a channel that does not decay: all channels then erase with
    m, as in Kimi Delta Attention. The bound holds if ``m |k|^2`` is from 0 to 2 and g is at most 0. Where no c
    satisfies it, c is 0. Give b' to the op in the dtype that you get, since b' may break the bound once it is rounded.

    It is made of PyTorch's operations and has gradients for k, b and g. It changes the model: train with the guard that
    you will use.

    Args:
        k: keys ``[B, T, H, K]``, any float dtype, as the rule uses them: after their norm, if the op normalises them.
        b: erase gate ``[B, T, HV, K]``, not its logit; HV a multiple of H.
        g: log decay in nats ``[B, T, HV, K]``, not the raw activation.

    Returns:
        ``[B, T, HV, K]`` in float32, or in float64 if k, b or g is.

    Raises:
        ValueError: if k, b and g do not have these shapes.

    Example:
        >>> import torch
        >>> from flash_delta import chunk_gdn2, erase_norm, guard_erase
        >>> q, v = torch.randn(1, 100, 2, 32), torch.randn(1, 100, 4, 32)
        >>> k = torch.nn.functional.normalize(torch.randn(1, 100, 2, 32), dim=-1)
        >>> g, b, w = -0.02 * torch.rand(1, 100, 4, 32), torch.rand(1, 100, 4, 32), torch.rand(1, 100, 4, 32)
        >>> b = guard_erase(k, b, g)
        >>> bool((erase_norm(k, b) * g.amax(-1).exp() <= 1 + 1e-6).all())
        True
        >>> o, _ = chunk_gdn2(q, k, v, g, b, w)

    Source: `docs/mathematics.md`, tag N5. cuDNN's kernels for GDN-2 have a guard of this kind, without its gradient.
    """
    k, b = _keys_and_gates("guard_erase", k, b, g)
    mean, kept, spread = _erased(k, b)
    decay = -2 * g.to(b.dtype).amax(-1).clamp(-20, 0)  # e^40 is more than any erase needs, and has finite gradients
    room = (torch.expm1(decay) * (1 - kept * torch.exp(-decay))).clamp(min=0)
    # The root is of 1 where b stays and where nothing is left of its spread: gradients of other numbers are infinite.
    shrinks, some = spread > room, room > 0
    part = torch.where(shrinks & some, room / torch.where(shrinks, spread, 1), 1).sqrt()
    return torch.lerp(mean.expand_as(b), b, torch.where(shrinks & ~some, 0, part)[..., None])


def _keys_and_gates(op: str, k: Tensor, b: Tensor, g: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """k for every value head and b, in one dtype that is at least float32."""
    fits = k.dim() == b.dim() == 4 and (k.shape[:2], k.shape[3]) == (b.shape[:2], b.shape[3])
    if not fits or b.shape[2] % max(k.shape[2], 1) or (g is not None and g.shape != b.shape):
        names, got = ("b and g", f"{list(b.shape)} and {list(g.shape)}") if g is not None else ("b", list(b.shape))
        raise ValueError(
            f"{op}: expected k [B, T, H, K] and {names} [B, T, HV, K], with HV a multiple of H, "
            f"got {list(k.shape)} and {got}"
        )
    dtype = torch.float32
    for t in (k, b) if g is None else (k, b, g):
        dtype = torch.promote_types(dtype, t.dtype)
    return k.to(dtype).repeat_interleave(b.shape[2] // k.shape[2], 2), b.to(dtype)


def _erased(k: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean of b by the squares of k ``[B, T, HV, 1]``. And of the two squared singular values of I - k (b . k)^T
    that are not 1, ``[B, T, HV]``: their product, and by how much their sum is larger than 1 plus this product. This is
    0 if b is its mean, and else it is as the square of the distance."""
    squares = k.square()
    length = squares.sum(-1, keepdim=True)
    mean = (squares * b).sum(-1, keepdim=True) / torch.where(length > 0, length, 1)
    inner, spread = length * mean, length * (squares * (b - mean).square()).sum(-1, keepdim=True)
    return mean, (1 - inner[..., 0]).square(), spread[..., 0]
