"""The plugin for SGLang with its options for ReplaySSM. Backends and pools are stand-ins. SGLang's own ones are in
tests/engines/test_sglang_drafts.py."""

import sys
from types import SimpleNamespace

import pytest
import torch
from test_sglang_fallbacks import warnings
from test_sglang_plugin import (
    HV,
    RULES,
    SLOTS,
    THEIRS,
    H,
    K,
    State,
    V,
    close,
    engine,  # noqa: F401  a fixture
    gates,
    index,
    layer,
    make,
    make_backend,
    tokens,
    walk,
)

from flash_delta.integrations.sglang import plugin, replay

pytestmark = pytest.mark.usefixtures("engine")
LAYERS, REQUESTS, T = 2, 5, 4


def pool_of(rule, dtype=torch.bfloat16, states=torch.float32, length=16, drafts=T):
    """A pool of SGLang's for drafts. ``dtype``: of its rings, of ``length`` tokens."""
    kda = rule == "kda"
    lead, heads, width = (LAYERS, SLOTS if kda else REQUESTS), HV if kda else H, (K,) if kda else ()
    v, k = (torch.zeros(*lead, *of, dtype=dtype) for of in ((HV, length, V), (heads, length, K)))
    rings = {"replayssm_d": v, "replayssm_k": k, "replayssm_g": torch.zeros(*lead, HV, length, *width)}
    if kda or dtype != torch.float32:
        rings |= {"replayssm_rawv": v.clone(), "replayssm_rawk": k.clone()}
    if kda:
        rings["replayssm_beta"] = torch.zeros(*lead, HV, length)
    temporal = torch.randn(LAYERS, SLOTS, HV, V, K).to(states)
    windows = torch.zeros(LAYERS, REQUESTS, drafts, 8, 3, dtype=dtype)
    state = State(temporal, [windows[:, :, 0]], [windows], **rings)
    return SimpleNamespace(enable_linear_replayssm_spec=True, mamba_cache=state)


def draft(rule, backend, n, x, parameters, rows, requests, **more):
    """SGLang's call for a draft in layer n."""
    pool = backend.req_to_token_pool.mamba_pool
    state, (q, k, v, a, b) = pool.mamba_cache.at_layer_idx(n), x
    bounds = T * torch.arange(len(requests) + 1, dtype=torch.int32)
    if rule != "kda":
        return backend._replayssm_target_verify(
            layer=SimpleNamespace(**parameters), query=q, key=k, value=v, a=a, b=b, mamba_pool=pool, layer_cache=state,
            cache_indices=rows, replay_indices=requests, query_start_loc=bounds, draft_token_num=T,
        )  # fmt: skip
    rings = {name: getattr(state, f"replayssm_{name}") for name in ("rawv", "rawk", "g", "beta")}
    return backend.kernel_dispatcher.target_verify(
        **parameters, q=q, k=k, v=v, a=a, b=b, ssm_states=state.temporal, cache_indices=rows, query_start_loc=bounds,
        intermediate_states_buffer=None, intermediate_state_indices=index(*range(9)), cache_steps=T, cache_ring=True,
        **{"retrieve_parent_token": None, "lower_bound": None} | more,
        **{f"replayssm_{name}": ring for name, ring in rings.items()},
    )  # fmt: skip


def fold(rule, state, rows, requests, counts, to=None, steps=None):
    """SGLang's call that commits a draft in all layers."""
    path = replay.EXACT if rule == "kda" else replay.CIRCULAR
    module, _, name = path.partition(":")
    k, u, decay, slots, pages = replay.FOLDED[path]
    given = dict(zip((k, u, decay), replay._ring(rule, state)[:3], strict=True)) | {pages: requests, slots: rows}
    given |= {"checkpoint_state": state.temporal, "accept_lens": counts}
    given |= {"mamba_track_indices": to, "mamba_steps_to_track": steps}
    rest = set(replay.PARAMETERS[path].split()) - given.keys()
    return getattr(sys.modules[module], name)(**given, **dict.fromkeys(rest))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rule", "bound"), [("gated_delta_rule", None), ("kda", None), ("kda", -5.0)])
def test_accepted_tokens(rule, dtype, bound):
    """Rows have 2, none, all and 3, and the last row is padding. The radix cache keeps states after two and after one.
    Records are in the memory of SGLang's rings."""
    pool = pool_of(rule, dtype)
    memory = [t.data_ptr() for t in replay._ring(rule, pool.mamba_cache)[:3]]
    backend, before = make_backend(rule, pool), pool.mamba_cache.temporal.clone()
    assert [t.data_ptr() for t in replay._ring(rule, pool.mamba_cache)[:3]] == memory
    rows, requests, counts = index(4, 2, 6, 7, -1), torch.tensor([3, 0, 1, 2, 4]), index(2, 0, 4, 3, 1)
    calls = [(tokens(rule, 5 * T), layer(rule)) for _ in range(LAYERS)]
    more = {} if bound is None else {"lower_bound": bound}
    outputs = [draft(rule, backend, n, *call, rows, requests, **more) for n, call in enumerate(calls)]
    assert torch.equal(pool.mamba_cache.temporal, before)
    fold(rule, pool.mamba_cache, rows, requests, counts, torch.tensor([1, 8, 3, 5, 0]), index(1, -1, 0, -1, 0))
    for n, (x, parameters) in enumerate(calls):
        gate, state, single = gates(rule, x, parameters, bound), pool.mamba_cache.temporal[n], before[n].clone()
        assert not outputs[n][0, 4 * T :].any()
        for row, (slot, count) in enumerate(zip(rows[:4].tolist(), counts[:4].tolist(), strict=True)):
            states, o = walk(before[n, slot], x, *gate, row * T, (row + 1) * T)
            close(outputs[n][0, row * T : (row + 1) * T], torch.stack(o))
            close(state[slot], states[count])
            for t in range(row * T, row * T + count):
                q, k, v, a, b = (y[:, t : t + 1] if y.ndim == 4 else y[t : t + 1] for y in x)
                backend.kernel_dispatcher.decode(
                    q, k, v, a, b, **parameters, **more, ssm_states=single, cache_indices=index(slot),
                    query_start_loc=index(0, 1),
                )  # fmt: skip
                if (row, t - row * T) in ((0, 1), (2, 0)):
                    single[1 if row == 0 else 3] = single[slot]
        assert torch.equal(state, single)
    assert not torch.equal(before, pool.mamba_cache.temporal)


def test_a_pool_is_adopted_once():
    pool = pool_of("kda")
    make_backend("kda", pool)
    state = pool.mamba_cache
    make_backend("kda", pool)
    assert pool.mamba_cache is state


def test_rings_without_drafts(caplog):
    """SGLang was told to use rings, but of no drafts."""
    pool = SimpleNamespace(enable_linear_replayssm_spec=True, mamba_cache=SimpleNamespace(replayssm_g=torch.zeros(1)))
    state = pool.mamba_cache
    make_backend("kda", pool)
    assert pool.mamba_cache is state
    assert not warnings(caplog)


class FlashInferGDNKernel:
    pass


@pytest.mark.parametrize(
    ("rule", "more", "why"),
    [
        ("kda", {"length": 4}, "--linear-replayssm-cache-len: expected room for 4 records in float32, got room for 2"),
        ("gated_delta_rule", {"length": 64, "drafts": 17}, "drafts: expected at most 16 tokens, got 17"),
        ("gated_delta_rule", {"states": torch.int64}, "got torch.int64"),
    ],
)
def test_drafts_that_sglangs_own_code_verifies(rule, more, why, caplog):
    pool = pool_of(rule, **more)
    state, backend = pool.mamba_cache, make_backend(rule, pool)
    assert pool.mamba_cache is state
    (warning,) = warnings(caplog)
    assert f"SGLang's own code runs {plugin.REPLAY}: " in warning
    assert warning.endswith(why)
    requests = torch.tensor([3])
    assert draft(rule, backend, 0, tokens(rule, T), layer(rule), index(4), requests) == THEIRS
    assert fold(rule, state, index(4), requests, index(2)) == THEIRS


@pytest.mark.parametrize("rule", RULES)
def test_another_kernel_for_drafts(rule, caplog):
    """For Kimi Delta Attention SGLang has one that it runs without its dispatcher."""
    pool = pool_of(rule)
    state = pool.mamba_cache
    if rule == "kda":
        cls = make(rule).__class__
        cls.verify_backend = SimpleNamespace(is_triton=lambda: False)
        make_backend(rule, pool)
    else:
        make_backend(rule, pool, kernel=FlashInferGDNKernel)
    assert pool.mamba_cache is state
    assert warnings(caplog)[-1].endswith("SGLang was told to run another kernel")


def test_what_cannot_be_run_is_an_error():
    """SGLang's own code does not know our records."""
    rule, rows, requests = "kda", index(4), torch.tensor([3])
    backend, x, parameters = make_backend(rule, pool_of(rule)), tokens(rule, T), layer(rule)
    with pytest.raises(ValueError, match="parent_idx"):
        draft(rule, backend, 0, x, parameters, rows, requests, retrieve_parent_token=torch.zeros(1, T).int())
    with pytest.raises(ValueError, match="new: expected None, got a Tensor"):
        draft(rule, backend, 0, x, parameters, rows, requests, new=torch.zeros(1))


def test_a_version_that_commits_otherwise_keeps_its_own_drafts(caplog):
    module, _, name = replay.CIRCULAR.partition(":")
    setattr(sys.modules[module], name, lambda checkpoint_state: THEIRS)
    pool = pool_of("kda")
    state = pool.mamba_cache
    make_backend("kda", pool)
    assert pool.mamba_cache is state
    assert f"{plugin.REPLAY}: commit_gdn_replayssm_circular takes checkpoint_state" in caplog.text


def test_a_version_without_a_ring_keeps_its_own_drafts(caplog, monkeypatch):
    monkeypatch.delitem(State.__dataclass_fields__, "replayssm_beta")
    plugin.register()
    assert plugin.REPLAY not in plugin._active
    assert caplog.text.strip().endswith("MambaPool.SpeculativeState has no replayssm_beta")


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_decoding_with_a_ring(rule, waits, caplog):
    """A token waits in a ring if it has a place there (--enable-linear-replayssm)."""
    q, k, v, a, b = tokens(rule, 1)
    rings = dict.fromkeys(("replayssm_d", "replayssm_k", "replayssm_g", "replayssm_force_flush"), torch.zeros(1))
    found = make(rule).packed_decode(
        torch.cat([t[0].flatten(1) for t in (q, k, v)], -1), a, b, **layer(rule), scale=K**-0.5, num_v_heads=HV,
        head_v_dim=V, ssm_states=torch.randn(SLOTS, HV, V, K), cache_indices=index(3), **rings,
        replayssm_write_pos=index(2) if waits else None,
    )  # fmt: skip
    assert (found is THEIRS) == waits
    assert ("--enable-linear-replayssm: expected a state after every token" in caplog.text) == waits
