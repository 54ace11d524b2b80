"""fla.ops.delta_rule.naive: plain PyTorch, which here is the torch backend. Tensors are [B, H, T, ...], as in fla."""

from torch import Tensor

from flash_delta.ops import chunk_delta_rule
from flash_delta.ops._check.options import refuse

__all__ = ["delta_rule_chunkwise", "delta_rule_recurrence"]


def delta_rule_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """:func:`flash_delta.chunk_delta_rule` in float32 of q, k [B, H, T, K], v [B, H, T, V], beta [B, H, T]; o in q's
    dtype."""
    if beta.dim() == v.dim():
        refuse("delta_rule_recurrence", "beta", "one number per head and token, [B, H, T]", f"{list(beta.shape)}")
    o, state = _heads_first(q.float(), k.float(), v.float(), beta.float(), 64, initial_state, output_final_state)
    return o.to(q.dtype), state


def delta_rule_chunkwise(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, chunk_size: int = 32) -> tuple[Tensor, Tensor]:
    """:func:`flash_delta.chunk_delta_rule` of tensors [B, H, T, ...]; the final state is always returned."""
    return _heads_first(q, k, v, beta, chunk_size, None, True)


def _heads_first(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, chunk_size: int, initial_state: Tensor | None, final: bool
) -> tuple[Tensor, Tensor | None]:
    q, k, v, beta = (x.transpose(1, 2) for x in (q, k, v, beta))
    o, state = chunk_delta_rule(
        q,
        k,
        v,
        beta,
        initial_state=initial_state,
        output_final_state=final,
        chunk_size=chunk_size,
        backend="torch",
    )
    return o.transpose(1, 2), state
