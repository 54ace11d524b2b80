"""Turns SGLang's calls of its kernels into calls of the serving ops.

Each function has the arguments of a method of SGLang's dispatchers. q, k and v are results of the convolution.
``decode`` and ``target_verify`` get raw gates.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

import flash_delta
from flash_delta.integrations.sglang.tracked import CHUNK, Tracked, mark
from flash_delta.ops.serving import Ring

LONGEST_DRAFT = 16
# Arguments that only SGLang's own kernels need: copies of lengths on the host, plans, another kernel's output, rings
# for tokens, which are not used if a call has no place in them.
IGNORED = {
    "chunk_indices", "chunk_offsets", "extend_prefix_lens", "extend_seq_lens_cpu", "is_spec_decode", "layer_id",
    "num_state_checkpoints", "output", "replayssm_d", "replayssm_force_flush", "replayssm_g", "replayssm_k",
    "stable_rows", "state_checkpoint_cu_starts", "state_checkpoint_every_n_tokens", "state_checkpoint_indices",
    "track_ssm_h_batch_src", "track_ssm_h_src",
}  # fmt: skip


class Refused(ValueError):
    """A call that these ops do not take."""


class Call(NamedTuple):
    op: Callable[..., Tensor]
    arguments: dict[str, Any]
    result: Callable[[Tensor], Any]  # makes the results for SGLang from the output


def packed_decode(
    rule: str, mixed_qkv: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor, scale: float,
    ssm_states: Tensor, cache_indices: Tensor, num_v_heads: int, head_v_dim: int, lower_bound: float | None = None,
    replayssm_write_pos: Tensor | None = None, **more: Any,
) -> Call:  # fmt: skip
    """One token for each row, q, k and v side by side. With ``replayssm_write_pos`` the token waits in a ring."""
    if replayssm_write_pos is not None:
        raise Refused("--enable-linear-replayssm: expected a state after every token, got a ring of tokens that wait")
    K, values = ssm_states.shape[-1], num_v_heads * head_v_dim
    keys = (mixed_qkv.shape[-1] - values) // 2
    q, k, v = mixed_qkv[None].split([keys, keys, values], -1)
    q, k, v = (x.unflatten(-1, (-1, width)) for x, width in ((q, K), (k, K), (v, head_v_dim)))
    return decode(
        rule, q, k, v, a, b, A_log=A_log, dt_bias=dt_bias, ssm_states=ssm_states, cache_indices=cache_indices,
        lower_bound=lower_bound, scale=scale, **more,
    )  # fmt: skip


def decode(
    rule: str, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor,
    ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor | None = None, lower_bound: float | None = None,
    scale: float | None = None, **more: Any,
) -> Call:  # fmt: skip
    """One token for each row: q [1, rows, H, K]."""
    _check_more(more)
    rows = (q.shape[1], 1)
    arguments = _raw_gates(rule, rows, v, k, a, b, A_log, dt_bias, lower_bound) | {
        "q": q.transpose(0, 1), "k": k.transpose(0, 1), "v": v.transpose(0, 1), "scale": scale,
        "state_pool": ssm_states, "read_indices": cache_indices, "write_indices": cache_indices,
    }  # fmt: skip
    return Call(getattr(flash_delta, f"decode_{rule}"), arguments, lambda o: o.transpose(0, 1))


def target_verify(
    rule: str, A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *,
    ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor, intermediate_states_buffer: Tensor | None,
    intermediate_state_indices: Tensor | None, cache_steps: int, retrieve_parent_token: Tensor | None,
    lower_bound: float | None = None, ring: Ring | None = None, **more: Any,
) -> Call:  # fmt: skip
    """Drafts, packed: the pool is read, and the states after each token go to SGLang's buffer [rows, drafts, ...]. With
    a ring their records go there (replay.py)."""
    _check_more(more)
    if cache_steps > LONGEST_DRAFT:
        raise Refused(f"cache_steps: expected at most {LONGEST_DRAFT}, got {cache_steps}")
    count = len(query_start_loc) - 1
    parents = None if retrieve_parent_token is None else retrieve_parent_token[:count]
    arguments = _raw_gates(rule, q.shape[:2], v, k, a, b, A_log, dt_bias, lower_bound) | {
        "q": q, "k": k, "v": v, "state_pool": ssm_states, "read_indices": cache_indices[:count],
        "parent_idx": parents, "cu_seqlens": query_start_loc,
    }  # fmt: skip
    if ring is None:
        arguments["write_pool"] = intermediate_states_buffer
        arguments["write_indices"] = intermediate_state_indices[:count]
    else:
        arguments["ring"] = ring._replace(write=ring.write[:count])
    return Call(getattr(flash_delta, f"decode_{rule}"), arguments, lambda o: o)


def extend(
    rule: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, ssm_states: Tensor, cache_indices: Tensor,
    query_start_loc: Tensor, inplace_update: bool = True, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    lower_bound: float | None = None, beta_is_raw: bool = False, return_intermediate_states: bool = False,
    track_state: Tensor | None = None, track_chunk_idx: Tensor | None = None, tracked: Tracked | None = None,
    **more: Any,
) -> Call:  # fmt: skip
    """Prompts or pieces of them, packed. SGLang keeps the state of sequence n after ``track_chunk_idx[n]`` chunks, if
    that is not negative. Its kernels write it to ``track_state``, our ops write it to its slot (``tracked``)."""
    _check_more(more)
    if track_state is not None and tracked is None:
        raise Refused("track_state: expected slots of this batch for it, got none")
    arguments: dict[str, Any] = {
        "q": q, "k": k, "v": v, "g": g, "beta": beta, "state_pool": ssm_states, "read_indices": cache_indices,
        "write_indices": cache_indices if inplace_update else None, "cu_seqlens": query_start_loc,
        "state_v_first": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": beta_is_raw,
        "allow_neg_eigval": False,
    }  # fmt: skip
    if A_log is not None:
        arguments |= _gate(A_log, dt_bias, lower_bound)
    if tracked is not None:
        arguments |= {"checkpoint_indices": tracked.slots, "checkpoint_offsets": tracked.offsets}

    def result(o: Tensor) -> Any:
        if tracked is not None:
            mark(track_state)
        if rule == "gated_delta_rule":
            return o, None, None  # neither final states nor those of chunks, which are already in their places
        return (o, None) if return_intermediate_states else o

    return Call(getattr(flash_delta, f"prefill_{rule}"), arguments, result)


def fill_tracked(states: Tensor, query_start_loc: Tensor, track_state: Tensor, track_chunk_idx: Tensor) -> None:
    """Fills ``track_state`` from the states before every chunk [1, chunks, ...], which SGLang's own kernel returns."""
    chunks = (query_start_loc.diff() + CHUNK - 1) // CHUNK
    rows = chunks.cumsum(0) - chunks + track_chunk_idx
    track_state.copy_(states.squeeze(0)[rows.clamp(min=0).long()])


def _raw_gates(
    rule: str, lead: tuple[int, ...], v: Tensor, k: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    lower_bound: float | None,
) -> dict[str, Any]:  # fmt: skip
    heads = v.shape[2:3] if rule == "gated_delta_rule" else (v.shape[2], k.shape[3])
    return _gate(A_log, dt_bias, lower_bound) | {
        "g": a.reshape(*lead, *heads), "beta": b.reshape(*lead, v.shape[2]), "state_v_first": True,
        "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
    }  # fmt: skip


def _gate(A_log: Tensor, dt_bias: Tensor | None, lower_bound: float | None) -> dict[str, Any]:
    gate = {
        "use_gate_in_kernel": True,
        "A_log": A_log.flatten(),
        "dt_bias": None if dt_bias is None else dt_bias.flatten(),
    }
    return gate if lower_bound is None else gate | {"lower_bound": lower_bound}


def _check_more(more: dict[str, Any]) -> None:
    """Checks that no other argument of SGLang changes the result."""
    for name, value in more.items():
        if value is not None and value is not False and name not in IGNORED:
            raise Refused(f"{name}: expected None, got a {type(value).__name__}")
