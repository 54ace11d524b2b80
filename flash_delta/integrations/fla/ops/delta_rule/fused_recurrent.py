"""fla.ops.delta_rule.fused_recurrent."""

from torch import Tensor

from flash_delta.ops import fused_recurrent_gated_delta_rule

__all__ = ["fused_recurrent_delta_rule"]


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Delta rule token by token: :func:`flash_delta.fused_recurrent_gated_delta_rule` without a decay."""
    return fused_recurrent_gated_delta_rule(
        q,
        k,
        v,
        v.new_zeros(v.shape[:3]),  # the decoding kernel needs a decay; a log decay of 0 is exact
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )
