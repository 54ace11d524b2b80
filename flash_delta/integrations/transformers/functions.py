"""This library's ops under the names and arguments that transformers' modelling code uses.

An argument that a model may pass and that changes the result has a name here. Other arguments concern other layers
(``output_router_logits``, ``max_length_q``, ...). They are ``others`` and are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn

import flash_delta
from flash_delta.integrations._context import convolve
from flash_delta.layers.documents import forget_at_starts
from flash_delta.layers.packing import Packing
from flash_delta.layers.state import Replay
from flash_delta.modules import causal_conv1d, gated_rms_norm
from flash_delta.ops._check.options import CHUNK_SIZES
from flash_delta.ops._elementwise import Convolved, convolve_column
from flash_delta.parallel import ContextParallel

Result = tuple[Tensor, Tensor | None]


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cp_context: ContextParallel | None = None,
    allow_neg_eigval: bool | None = None,
    replay: Replay | None = None,
    **others: Any,
) -> Result:
    """Whole rows, or the sequences packed in a row; ``initial_state`` [B, HV, K, V]."""
    if replay is not None:
        return recurrent_gated_delta_rule(
            query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel,
            allow_neg_eigval=allow_neg_eigval, replay=replay,
        )  # fmt: skip
    g = _separated("chunk_gated_delta_rule", g, cu_seqlens, seq_idx, initial_state)
    return flash_delta.chunk_gated_delta_rule(
        query, key, value, g, beta, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, allow_neg_eigval=allow_neg_eigval, cu_seqlens=cu_seqlens,
        chunk_size=_chunk_of(chunk_size), cp_context=cp_context,
    )  # fmt: skip


def _chunk_of(size: int) -> int:
    """The tokens of a chunk. It changes no result. transformers' own functions take any size, and for those that these
    ops do not have, they use 64."""
    return size if size in CHUNK_SIZES or size < 1 else 64


def recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    allow_neg_eigval: bool | None = None,
    replay: Replay | None = None,
    **others: Any,
) -> Result:
    """Runs one token of every row, in decoding, or some tokens that a crop may take back."""
    if cu_seqlens is not None or seq_idx is not None:
        g = _separated("fused_recurrent_gated_delta_rule", g, cu_seqlens, seq_idx, initial_state)
    op = flash_delta.fused_recurrent_gated_delta_rule
    if replay is not None:
        op = partial(_kept, replay, op)
    return op(
        query, key, value, g, beta=beta, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, allow_neg_eigval=allow_neg_eigval, cu_seqlens=cu_seqlens,
    )  # fmt: skip


def chunk_kda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seq_lens_q: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cp_context: ContextParallel | None = None,
    allow_neg_eigval: bool | None = None,
    replay: Replay | None = None,
    **others: Any,
) -> Result:
    """Runs whole rows, or the sequences packed in a row; ``initial_state`` [B, HV, K, V]. These models pass the bounds
    under the name that attention uses."""
    if replay is not None:
        return recurrent_kda(
            query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel,
            allow_neg_eigval=allow_neg_eigval, replay=replay,
        )  # fmt: skip
    g = _separated("chunk_kda", g, cu_seq_lens_q, seq_idx, initial_state)
    return flash_delta.chunk_kda(
        query, key, value, g, beta, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, allow_neg_eigval=allow_neg_eigval, cu_seqlens=cu_seq_lens_q,
        chunk_size=_chunk_of(chunk_size), cp_context=cp_context,
    )  # fmt: skip


def recurrent_kda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seq_lens_q: Tensor | None = None,
    seq_idx: Tensor | None = None,
    allow_neg_eigval: bool | None = None,
    replay: Replay | None = None,
    **others: Any,
) -> Result:
    """Runs one token of every row, in decoding, or some tokens that a crop may take back."""
    if cu_seq_lens_q is not None or seq_idx is not None:
        g = _separated("fused_recurrent_kda", g, cu_seq_lens_q, seq_idx, initial_state)
    op = flash_delta.fused_recurrent_kda
    if replay is not None:
        op = partial(_kept, replay, op)
    return op(
        query, key, value, g, beta=beta, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, allow_neg_eigval=allow_neg_eigval, cu_seqlens=cu_seq_lens_q,
    )  # fmt: skip


def causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seq_lens_q: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cp_context: ContextParallel | None = None,
    **others: Any,
) -> Tensor:
    """hidden_states [B, D, T], weight [D, W] -> [B, D, T]."""
    W, T = weight.shape[-1], hidden_states.shape[-1]
    if cp_context is not None:
        return convolve(cp_context, hidden_states.transpose(1, 2), weight, bias, activation).transpose(1, 2)
    if cu_seq_lens_q is not None:
        seq_idx = None  # it says the same at a higher cost
        if T == W:
            # With a cache, models pad a row that is shorter than W to W tokens. The bounds would not fit this row.
            raise ValueError(f"causal_conv1d: hidden_states: expected more than {W} packed tokens, got {W}")
    if seq_idx is not None and seq_idx.shape[-1] != T:
        # With a cache, models put inputs of earlier calls, or zeros, before a row.
        raise ValueError(f"causal_conv1d: seq_idx: expected shape [B, {T}], got {list(seq_idx.shape)}")
    x = hidden_states.transpose(1, 2)
    y, _ = causal_conv1d(x, weight, bias, activation, cu_seqlens=cu_seq_lens_q, seq_idx=seq_idx)
    return y.transpose(1, 2)


def causal_conv1d_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **others: Any,
) -> Tensor:
    """hidden_states [B, D, T], conv_state [B, D, L] of earlier tokens -> [B, D, T]. Updates the state in place."""
    T, L = hidden_states.shape[-1], conv_state.shape[-1]
    in_graph = torch.is_grad_enabled() and (hidden_states.requires_grad or conv_state.requires_grad)
    if T == 1 and weight.shape[-1] == L and not in_graph:
        return convolve_column(Convolved(hidden_states, weight, bias, conv_state), activation)
    row = torch.cat([conv_state, hidden_states], dim=-1)  # [B, D, L + T]
    y, _ = causal_conv1d(row.transpose(1, 2), weight, bias, activation)
    conv_state.copy_(row[..., T:])
    return y[:, L:].transpose(1, 2)


def gated_norm(self: nn.Module, hidden_states: Tensor, gate: Tensor) -> Tensor:
    """The forward of every ``...RMSNormGated``. It computes in float32. Some models round in between."""
    return gated_rms_norm(hidden_states, gate, self.weight, self.variance_epsilon, self.activation)


def _separated(
    op: str, g: Tensor, bounds: Tensor | None, seq_idx: Tensor | None, initial_state: Tensor | None
) -> Tensor:
    """Log decays that erase the state where a document starts, if only ``seq_idx`` says where documents start."""
    if bounds is None and seq_idx is None:
        return g
    if initial_state is not None:
        # A model's cache has one convolution window per row, so a packed row cannot continue.
        raise ValueError(f"{op}: initial_state: expected None with packed sequences, got a tensor")
    return g if bounds is not None else forget_at_starts(g, seq_idx)


def _kept(
    replay: Replay, op: Callable[..., Result], *tokens: Tensor, beta: Tensor, cu_seqlens: None, **options: Any
) -> Result:
    """Runs the op and keeps its arguments, for a crop of the cache (rollback.py)."""
    if not replay.parts and options["initial_state"] is not None:
        replay.recurrent = options["initial_state"].clone()  # the cache writes the new state to the same memory
    q, k, v, g = tokens
    q, k, v = q.clone(), k.clone(), v.clone()  # they are parts of all that the convolution computed, with past inputs
    arguments = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    return replay.run(op, arguments, options, Packing())


def _at_most_one(rule: Callable[..., Result]) -> Callable[..., Result]:
    """The rule for modelling code whose beta is a sigmoid."""
    return update_wrapper(partial(rule, allow_neg_eigval=False), rule)  # without a frame of Python in decoding


RULES = {
    "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
    "torch_recurrent_gated_delta_rule": recurrent_gated_delta_rule,
    "chunk_kimi_delta_attention": chunk_kda,
    "recurrent_kimi_delta_attention": recurrent_kda,
}
# Families of models whose beta is a sigmoid. OLMo-hybrid's reaches 2, and nothing is known of other families.
SIGMOID = {
    "bailing_hybrid", "glm5_next", "kimi_linear", "lara_mini", "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp",
}  # fmt: skip
RULES_OF_SIGMOID = {name: _at_most_one(rule) for name, rule in RULES.items()}
CONVOLUTIONS = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "causal_conv1d_update": causal_conv1d_update,
}
