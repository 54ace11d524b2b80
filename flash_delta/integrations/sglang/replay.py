"""Drafts leave records in SGLang's pool, with ``--enable-linear-replayssm-spec``.

With this option SGLang's pool has no state for each token of a draft, but rings. For Kimi Delta Attention they hold the
inputs of a draft's tokens, which SGLang runs again up to the last accepted one. For Gated DeltaNet they hold what the
tokens of the last drafts did to the state, in parts of 16 bits. So a state there lacks its last tokens.

Our records are k, u and the decay in float32 (`flash_delta.ops.serving.Ring`). So `adopt` gives the rings' memory to
our records when a backend is made: the pool gets views of it in our shapes. Half as many tokens fit in rings of 16
bits. From then on our ops verify drafts, and `fold` applies the records of accepted tokens to the states of all layers,
after every draft. So no state lacks a token, and nothing reads SGLang's cursors.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from inspect import signature
from math import prod
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from flash_delta.integrations._refusal import refusal
from flash_delta.integrations.sglang.calls import LONGEST_DRAFT, target_verify
from flash_delta.integrations.sglang.tracked import BACKENDS
from flash_delta.ops.serving import Ring, commit

KERNELS = "sglang.kernels.ops.attention.linear"
STATE = "sglang.srt.mem_cache.memory_pool:MambaPool.SpeculativeState"
VERIFY = f"{BACKENDS}.gdn_backend:GDNAttnBackend._replayssm_target_verify"  # it does not ask a dispatcher
CIRCULAR = f"{KERNELS}.gdn_replayssm_spec_decode:commit_gdn_replayssm_circular"
EXACT = f"{KERNELS}.kda_replayssm_spec_decode:commit_kda_replayssm_spec_all_layers"
PARAMETERS = {
    VERIFY: "self layer query key value a b mamba_pool layer_cache cache_indices replay_indices query_start_loc "
    "draft_token_num",
    CIRCULAR: "checkpoint_state d_cache k_cache g_cache d_residual_cache k_residual_cache state_batch_indices "
    "replay_indices write_pos cache_base is_flush accept_lens mamba_track_indices mamba_steps_to_track null_block_id",
    EXACT: "checkpoint_state rawv_cache rawk_cache gk_cache beta_cache ssm_state_indices accept_lens max_cache_len "
    "num_k_heads mamba_track_indices mamba_steps_to_track use_qk_l2norm_in_kernel null_block_id",
}
FOLDED = {  # what these two call k, u, the decay, the slots of states and the pages of records
    CIRCULAR: ("k_cache", "d_cache", "g_cache", "state_batch_indices", "replay_indices"),
    EXACT: ("rawk_cache", "rawv_cache", "gk_cache", "ssm_state_indices", "ssm_state_indices"),
}
RINGS = {  # the rings of the pool whose memory k, u and the decay get, and those that are no longer needed
    "gated_delta_rule": (
        ("replayssm_k", "replayssm_d", "replayssm_g"),
        ("replayssm_rawk", "replayssm_rawv"),
    ),
    "kda": (("replayssm_rawk", "replayssm_rawv", "replayssm_g"), ("replayssm_beta",)),
}
NO_BUFFER = dict.fromkeys(("intermediate_states_buffer", "intermediate_state_indices", "retrieve_parent_token"))


def adopt(backend: Any, rule: str, kernel: str) -> str | None:
    """Gives the rings of a backend's pool to our records, if it has rings for drafts. Returns why not, or None.
    ``kernel``: the one of SGLang's that our ops replace."""
    pool, dispatcher = backend.req_to_token_pool.mamba_pool, backend.kernel_dispatcher
    drafts = pool.enable_linear_replayssm_spec and hasattr(pool.mamba_cache, "intermediate_conv_window")
    if not drafts or is_ours(pool.mamba_cache.replayssm_g):
        return None
    chosen = getattr(dispatcher, "verify_backend", None)  # for Kimi Delta Attention it may be more than a kernel
    if type(dispatcher.verify_kernel).__name__ != kernel or not (chosen is None or chosen.is_triton()):
        return "SGLang was told to run another kernel"
    state = _with_records(pool.mamba_cache, *RINGS[rule])
    reason = _reason(rule, state)
    if reason is None:
        state.replayssm_g._flash_delta_records = True
        pool.mamba_cache = state
    return reason


def is_ours(decay: Tensor) -> bool:
    """Whether a pool's rings hold our records. ``decay``: that of all layers."""
    return hasattr(decay, "_flash_delta_records")


def verify(theirs: Callable, self: Any, **given: Any) -> Tensor:
    """Drafts of Gated DeltaNet. Each request has a page of records."""
    if not is_ours(given["mamba_pool"].mamba_cache.replayssm_g):
        return theirs(self, **given)
    layer, state, rule = given["layer"], given["layer_cache"], "gated_delta_rule"
    call = target_verify(
        rule, layer.A_log, layer.dt_bias, given["query"], given["key"], given["value"], given["a"], given["b"],
        ring=_ring(rule, state)._replace(write=given["replay_indices"]), ssm_states=state.temporal,
        cache_indices=given["cache_indices"], query_start_loc=given["query_start_loc"],
        cache_steps=given["draft_token_num"], **NO_BUFFER,
    )  # fmt: skip
    return call.op(**call.arguments)


def with_ring(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``target_verify`` for Kimi Delta Attention, if they have our records: with a ring of ours. Each
    slot has a page of records."""
    if not given.get("cache_ring") or given["replayssm_beta"] is not None:
        return given
    rest = {name: value for name, value in given.items() if name != "cache_ring" and not name.startswith("replayssm_")}
    ring = Ring(*(given[name] for name in RINGS["kda"][0]), write=given["cache_indices"])
    return rest | {"ring": ring}


def fold(names: tuple[str, ...], theirs: Callable, **given: Any) -> Any:
    """Applies the records of accepted tokens to the states of all layers. SGLang also tells after which of a draft's
    tokens the radix cache keeps a state: steps count from 0, and -1 keeps none."""
    k, u, decay, slots, pages = (given[name] for name in names)
    if not is_ours(decay):
        return theirs(**given)
    to, steps = given.get("mamba_track_indices"), given.get("mamba_steps_to_track")
    kept = () if to is None or steps is None else (to, torch.where(steps < 0, steps, steps + 1))
    ring = Ring(k, u, decay, read=pages, counts=given["accept_lens"])
    return commit(given["checkpoint_state"], ring, slots, *kept, state_v_first=True)


def hooks() -> Iterator[tuple[str, Callable]]:
    """SGLang's functions and our hooks for them."""
    yield VERIFY.replace(":", "."), verify
    for path, names in FOLDED.items():
        yield path.replace(":", "."), partial(fold, names)


def unlike() -> str | None:
    """Why these hooks do not fit SGLang, or None."""
    for path, known in PARAMETERS.items():
        found = " ".join(signature(resolve_name(path)).parameters)
        if found != known:
            return f"{path.rpartition(':')[2]} takes {found.replace(' ', ', ')}"
    missing = {name for both in RINGS.values() for names in both for name in names}
    missing -= {field.name for field in fields(resolve_name(STATE))}
    return f"{STATE.rpartition(':')[2]} has no {', '.join(sorted(missing))}" if missing else None


def _with_records(state: Any, rings: tuple[str, ...], unused: tuple[str, ...]) -> Any:
    """SGLang's state with room for records ``[layers, pages, S, heads, width]`` in the memory of its rings
    ``[layers, pages, heads, tokens, width]``."""
    k, u, decay = (getattr(state, name) for name in rings)
    *lead, HV, length, V = u.shape
    S = length * u.element_size() // 4
    shapes = (S, k.shape[2], k.shape[4]), (S, HV, V), (S, HV, *decay.shape[4:])
    ours = {
        name: t.view(-1).view(torch.float32)[: prod(lead) * prod(shape)].view(*lead, *shape)
        for name, t, shape in zip(rings, (k, u, decay), shapes, strict=True)
    }
    return replace(state, **ours, **dict.fromkeys(unused))


def _ring(rule: str, state: Any) -> Ring:
    return Ring(*(getattr(state, name) for name in RINGS[rule][0]))


def _reason(rule: str, state: Any) -> str | None:
    """Why our ops do not take the pool's drafts, or None."""
    ring = Ring(*(t[0] for t in _ring(rule, state)[:3]))
    T, (_, S, H, K), (HV, V) = state.intermediate_conv_window[0].shape[2], ring.k.shape, ring.u.shape[2:]
    if T > LONGEST_DRAFT:
        return f"drafts: expected at most {LONGEST_DRAFT} tokens, got {T}"
    if T > S:
        return f"--linear-replayssm-cache-len: expected room for {T} records in float32, got room for {S}"

    def x(*shape: int, dtype: torch.dtype = state.conv[0].dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=state.temporal.device)

    gates, row = ring.decay[0, 0].numel(), x(1, dtype=torch.int32)
    call = target_verify(
        rule, x(HV, dtype=torch.float32), x(gates), x(1, T, H, K), x(1, T, H, K), x(1, T, HV, V), x(T, gates), x(T, HV),
        ring=ring._replace(write=row), ssm_states=state.temporal[0], cache_indices=row,
        query_start_loc=x(2, dtype=torch.int32), cache_steps=T, **NO_BUFFER,
    )  # fmt: skip
    return refusal(call.op, call.arguments)
