"""Drafts with ``--enable-linear-replayssm-spec``: SGLang's backends, pool and commit, with the plugin and without."""

import importlib
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

if find_spec("sglang") is None or find_spec("triton") is None:
    pytest.skip("it needs SGLang and Triton", allow_module_level=True)

from test_sglang import RULES, dispatchers, index  # noqa: F401  a fixture

from flash_delta.integrations.sglang import plugin, replay

pytestmark = pytest.mark.filterwarnings("ignore")
HEADS, HV, K, LAYERS, SLOTS, T = {"gated_delta_rule": 2, "kda": 4}, 4, 32, 2, 9, 4
EVERY = 4  # tokens between two states that the radix cache keeps
ACCEPTED = [(2, 1, 4), (1, 4, 3), (3, 2, 1), (4, 4, 2), (1, 1, 1), (2, 3, 4)]  # of each draft, in rounds
OF_REQUEST, KEPT, REQUESTS = index(3, 7, 1, 5, 2), torch.tensor([8, 4, 6]), torch.tensor([0, 2, 1, 4])  # slots


def pool_of(rule, states, drafts):
    """SGLang's pool, with states in all slots. ``drafts``: with rings for drafts."""
    params = importlib.import_module("sglang.srt.configs.mamba_utils")
    dtype = params.Mamba2StateDType(conv=torch.bfloat16, temporal=states)
    if rule == "kda":
        shape = params.KimiLinearStateShape.create(tp_world_size=1, num_heads=HV, head_dim=K)
        cache = params.KimiLinearCacheParams(shape=shape, layers=[0, 1], dtype=dtype)
    else:
        shape = params.Mamba2StateShape.create(
            tp_world_size=1, intermediate_size=HV * K, n_groups=HEADS[rule], num_heads=HV, head_dim=K, state_size=K,
            conv_kernel=4,
        )  # fmt: skip
        cache = params.Mamba2CacheParams(shape=shape, layers=[0, 1], dtype=dtype)
    pool = importlib.import_module("sglang.srt.mem_cache.memory_pool").MambaPool(
        size=SLOTS - 1, spec_state_size=len(OF_REQUEST), cache_params=cache, mamba_layer_ids=[0, 1], device="cpu",
        speculative_num_draft_tokens=T, enable_linear_replayssm_spec=drafts,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    for state in (pool.mamba_cache.temporal, *pool.mamba_cache.conv):
        state.copy_(torch.randn(state.shape, generator=generator) / 2)
    return pool


def backend_of(rule, dispatcher, pool):
    """SGLang's backend, without a model."""
    name = "KDAAttnBackend" if rule == "kda" else "GDNAttnBackend"
    cls = getattr(importlib.import_module(f"{plugin.BACKENDS}.{name[:3].lower()}_backend"), name)
    backend = object.__new__(cls)
    backend.kernel_dispatcher = dispatcher
    backend.verify_intermediate_state_indices = torch.arange(len(OF_REQUEST) + 1, dtype=torch.int32)
    backend.mis_metadata = backend.accept_lens_pool = backend._fused_chain_verify_fn = None
    backend._use_strided_target_verify_qkv = True
    backend.req_to_token_pool = SimpleNamespace(
        mamba_pool=pool, mamba2_layer_cache=pool.mamba2_layer_cache, size=len(OF_REQUEST),
        get_mamba_indices=lambda requests: OF_REQUEST[requests],
        get_speculative_mamba2_params_all_layers=pool.get_speculative_mamba2_params_all_layers,
    )  # fmt: skip
    return backend


def layers_of(rule):
    h, gates = HEADS[rule], HV * (K if rule == "kda" else 1)
    return [
        SimpleNamespace(
            layer_id=n, num_q_heads=h, num_k_heads=h, num_v_heads=HV, head_q_dim=K, head_k_dim=K, head_v_dim=K,
            q_dim=h * K, k_dim=h * K, v_dim=HV * K, bias=None, activation="silu", lower_bound=None,
            conv_weights=torch.randn((2 * h + HV) * K, 4) / 2, A_log=torch.randn(HV), dt_bias=torch.randn(gates) - 2,
        )
        for n in range(LAYERS)
    ]  # fmt: skip


def forward(backend, layer, x, slots, T):
    """A forward pass of SGLang for rows of T tokens: q, k and v, and raw a and b, of each [rows, T, channels]."""
    meta = importlib.import_module("sglang.srt.layers.attention.mamba.mamba2_metadata").ForwardMetadata
    modes = importlib.import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
    bounds = T * torch.arange(len(slots) + 1, dtype=torch.int32)
    backend.forward_metadata = meta(query_start_loc=bounds, mamba_cache_indices=slots)
    batch = SimpleNamespace(
        forward_mode=modes.DECODE if T == 1 else modes.TARGET_VERIFY, req_pool_indices=REQUESTS, mamba_track_mask=None,
        batch_size=len(slots), spec_info=SimpleNamespace(draft_token_num=T, ragged_verify_layout=None),
    )  # fmt: skip
    run = backend.forward_decode if T == 1 else backend.forward_extend
    return run(layer, batch, *(t.flatten(0, 1) for t in x)).unflatten(1, (-1, T))[0]


def copy_windows(to, windows, slots, steps, rows=None):
    """SGLang's copies of windows of the convolution, which it has for GPUs only."""
    assert rows is None
    for n, (slot, step) in enumerate(zip(slots.tolist(), steps.tolist(), strict=True)):
        if step >= 0:
            to[:, slot] = windows[:, n, step]


@pytest.fixture
def commit(monkeypatch):
    """SGLang's own function."""
    utils = importlib.import_module("sglang.srt.speculative.spec_utils")
    scatter = importlib.import_module("sglang.kernels.ops.mamba.mamba_state_scatter_triton")
    monkeypatch.setattr(scatter, "fused_conv_window_scatter_with_mask", copy_windows)
    monkeypatch.setattr(utils, "mambaish_config", lambda config: True)
    monkeypatch.setattr(utils, "mamba_track_grid", lambda page: EVERY)

    def call(backend, accepted, lengths):
        runner = SimpleNamespace(model_config=None, req_to_token_pool=backend.req_to_token_pool)
        batch = SimpleNamespace(
            req_pool_indices=REQUESTS[:3], mamba_track_indices=KEPT, seq_lens=lengths,
            forward_mode=SimpleNamespace(is_idle=lambda: False), tree_cache=SimpleNamespace(page_size=1),
        )  # fmt: skip
        chains = torch.arange(3 * T, dtype=torch.int32).view(3, T)
        utils.commit_mamba_states_after_verify(SimpleNamespace(model_runner=runner), batch, accepted, chains, T)

    return call


def rounds(rule):
    """Layers, and what each gets in every round for four rows. The last row is padding."""
    torch.manual_seed(0)
    wide, gates = (2 * HEADS[rule] + HV) * K, HV * (K if rule == "kda" else 1)
    layers = layers_of(rule)
    return layers, [
        [(torch.randn(4, T, wide).bfloat16(), torch.randn(4, T, gates), torch.randn(4, T, HV)) for _ in layers]
        for _ in ACCEPTED
    ]


def run_drafts(rule, backend, commit):
    """Outputs of all drafts, and the slots that were kept after each round with their states."""
    layers, drafts = rounds(rule)
    slots, lengths, outputs, kept = OF_REQUEST[REQUESTS].clone(), torch.tensor([3, 4, 9]), [], []
    slots[3] = -1
    states = backend.req_to_token_pool.mamba_pool.mamba_cache.temporal
    for draft, counts in zip(drafts, ACCEPTED, strict=True):
        outputs.append([forward(backend, layer, x, slots, T) for layer, x in zip(layers, draft, strict=True)])
        commit(backend, index(*counts), lengths)
        crossed = lengths // EVERY != (lengths + torch.tensor(counts)) // EVERY
        lengths = lengths + torch.tensor(counts)
        kept.append({slot: states[:, slot].clone() for slot in KEPT[crossed].tolist()})
    return outputs, kept


def run_tokens(rule, backend):
    """Runs accepted tokens alone, one by one. Returns what `run_drafts` does."""
    layers, drafts = rounds(rule)
    lengths, outputs, kept = [3, 4, 9], [], []
    states = backend.req_to_token_pool.mamba_pool.mamba_cache.temporal
    for draft, counts in zip(drafts, ACCEPTED, strict=True):
        outputs.append([torch.zeros(4, T, HV, K, dtype=torch.bfloat16) for _ in layers])
        kept.append({})
        for t in range(max(counts)):
            live = torch.tensor([t < count for count in (*counts, 0)])
            slots = torch.where(live, OF_REQUEST[REQUESTS], -1)
            for o, layer, x in zip(outputs[-1], layers, draft, strict=True):
                o[live, t] = forward(backend, layer, [y[:, t : t + 1] for y in x], slots, 1)[live, 0]
            for n in range(3):
                lengths[n] += t < counts[n]
                if t < counts[n] and lengths[n] % EVERY == 0:
                    kept[-1][int(KEPT[n])] = states[:, slots[n]].clone()
    return outputs, kept


def adopt(rule, backend):
    kernel = dict(zip(RULES, ("TritonGDNKernel", "TritonKDAKernel"), strict=True))[rule]
    return replay.adopt(backend, rule, kernel)


@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
def test_bits_of_single_tokens(dispatchers, rule, states, commit):  # noqa: F811
    """In outputs, states, kept states and windows. No other slot changes."""
    pools = [pool_of(rule, states, drafts) for drafts in (True, False)]
    before = pools[0].mamba_cache.temporal.clone()
    ours, single = (backend_of(rule, dispatchers[rule], pool) for pool in pools)
    memory = {
        name: t.data_ptr() for name, t in vars(pools[0].mamba_cache).items() if "replayssm" in name and t is not None
    }
    assert adopt(rule, ours) is None
    records = pools[0].mamba_cache
    assert all(getattr(records, name).data_ptr() == memory[name] for name in replay.RINGS[rule][0])
    got, want = run_drafts(rule, ours, commit), run_tokens(rule, single)
    for o, expected, counts in zip(got[0], want[0], ACCEPTED, strict=True):
        for n, count in enumerate(counts):
            assert all(torch.equal(a[n, :count], b[n, :count]) for a, b in zip(o, expected, strict=True))
        assert not any(a[3].any() for a in o)
    for kept, expected in zip(got[1], want[1], strict=True):
        assert kept.keys() == expected.keys()
        assert all(torch.equal(kept[slot], expected[slot]) for slot in kept)
    used = OF_REQUEST[REQUESTS[:3]].long()
    for a, b in zip(*([cache.temporal, *cache.conv] for cache in (records, pools[1].mamba_cache)), strict=True):
        assert torch.equal(a[:, used], b[:, used])
    others = [0, 5, 2]
    assert torch.equal(records.temporal[:, others], before[:, others])


# SGLang's own verification of Gated DeltaNet reads 16 bits of earlier tokens.
OFF = {"gated_delta_rule": {"rtol": 1e-2, "atol": 2e-3}, "kda": {"rtol": 1e-4, "atol": 1e-4}}


@pytest.mark.parametrize("rule", RULES)
def test_sglang_itself(dispatchers, rule, commit):  # noqa: F811
    """Its states lag behind for Gated DeltaNet, but not those that the radix cache keeps."""
    pools = [pool_of(rule, torch.float32, True) for _ in range(2)]
    ours, theirs = (backend_of(rule, dispatchers[rule], pool) for pool in pools)
    assert adopt(rule, ours) is None
    got, want = run_drafts(rule, ours, commit), run_drafts(rule, theirs, commit)
    assert not replay.is_ours(pools[1].mamba_cache.replayssm_g)
    for o, expected in zip(got[0], want[0], strict=True):
        for a, b in zip(o, expected, strict=True):
            torch.testing.assert_close(a[:3], b[:3], rtol=2e-2, atol=2e-3)
    for kept, expected in zip(got[1], want[1], strict=True):
        for slot in kept:
            torch.testing.assert_close(kept[slot], expected[slot], **OFF[rule])
    assert sum(map(len, got[1])) > 5
    if rule == "kda":
        torch.testing.assert_close(*(pool.mamba_cache.temporal for pool in pools), **OFF[rule])
