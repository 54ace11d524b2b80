"""The plugin for vLLM without vLLM: its classes and its metadata are stand-ins with the same names. tests/engines has
the real ones."""

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import flash_delta
from flash_delta.integrations import vllm as plugin
from flash_delta.ops.serving import Convolution, OutputNorm

H, HV, K, V, W, DRAFTS, BLOCKS = 2, 4, 16, 16, 4, 2, 12
D = 2 * H * K + HV * V


class Qwen(torch.nn.Module):
    """With the attributes that the plugin reads."""

    def __init__(self, drafts=0):
        super().__init__()
        torch.manual_seed(0)
        self.prefix, self.tp_size = "layer", 1
        self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim = H, HV, K, V
        self.conv1d = SimpleNamespace(weight=torch.randn(D, 1, W))
        self.A_log, self.dt_bias = torch.randn(HV), torch.randn(HV) - 2
        self.norm = SimpleNamespace(weight=torch.rand(V), eps=1e-6, activation="silu")
        self.kv_cache = torch.randn(BLOCKS, W - 1 + drafts, D), torch.randn(BLOCKS, HV, V, K)

    def _forward_core(self, mixed_qkv, b, a, core_attn_out):
        core_attn_out.fill_(7)

    def _forward_core_fused_norm(self, mixed_qkv, b, a, output_gate, core_attn_out):
        core_attn_out.fill_(8)


class Kimi(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.prefix, self.local_num_heads, self.head_dim, self.gate_lower_bound = "layer", H, K, -5.0
        self.local_projection_size = H * K
        self.conv1d = SimpleNamespace(weight=torch.randn(3 * H * K, 1, W))
        self.A_log, self.dt_bias = torch.randn(1, 1, H, 1), torch.randn(H * K) - 2
        self.o_norm = SimpleNamespace(weight=torch.rand(K), eps=1e-5, activation="sigmoid")
        self.kv_cache = torch.randn(BLOCKS, W - 1, 3 * H * K), torch.randn(BLOCKS, H, K, K)

    def _forward(self, mixed_qkv, g1, g2, beta, core_attn_out):
        core_attn_out.fill_(9)


@pytest.fixture
def batch(monkeypatch):
    """vLLM's modules, as far as the plugin asks for them. Returns what sets the metadata of the running batch."""
    context = SimpleNamespace(attn_metadata=None)
    modules = {
        plugin.LAYERS + ".qwen_gdn_linear_attn": {"QwenGatedDeltaNetAttention": type("Q", (Qwen,), {})},
        plugin.LAYERS + ".kimi_gdn_linear_attn": {"KimiGatedDeltaNetAttention": type("M", (Kimi,), {})},
        "vllm.forward_context": {"get_forward_context": lambda: context},
        "vllm.model_executor.layers.mamba.mamba_utils": {"is_conv_state_dim_first": lambda: False},
    }
    for name, values in modules.items():
        module = ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(plugin, "_active", [])
    monkeypatch.setattr(plugin, "_version", lambda package: "0.32.0" if package == "vllm" else None)
    monkeypatch.setenv(plugin.VARIABLE, "1")
    plugin.register()

    def set_metadata(**fields):
        context.attn_metadata = {"layer": SimpleNamespace(**EMPTY | fields)}

    return set_metadata


EMPTY = {
    "num_prefills": 0, "num_decodes": 0, "num_spec_decodes": 0, "num_actual_tokens": 0, "spec_sequence_masks": None,
    "has_initial_state": None, "non_spec_query_start_loc": None, "non_spec_state_indices_tensor": None,
    "spec_query_start_loc": None, "spec_state_indices_tensor": None, "num_accepted_tokens": None, "checkpoint": None,
    "spec_token_indx": None, "non_spec_token_indx": None,
}  # fmt: skip


def qwen(**more):
    module = sys.modules[plugin.LAYERS + ".qwen_gdn_linear_attn"]
    return module.QwenGatedDeltaNetAttention(**more)


def index(*values):
    return torch.tensor(values, dtype=torch.int32)


def options(layer, rolling=False):
    """Of the ops, as one would write them for this layer."""
    windows = Convolution(layer.kv_cache[0].clone().mT, layer.conv1d.weight[:, 0], rolling=rolling)
    return {
        "state_pool": layer.kv_cache[1].clone(), "state_v_first": True, "convolution": windows, "null_slot": 0,
        "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "A_log": layer.A_log.flatten(),
        "dt_bias": layer.dt_bias, "use_beta_sigmoid_in_kernel": True,
    }  # fmt: skip


def split(x, heads=(H, H, HV), width=K):
    return [t.unflatten(-1, (n, width)) for t, n in zip(x.split([n * width for n in heads], -1), heads, strict=True)]


def judge(layer, given, out, want):
    """Outputs, states and windows are those of the call that was made by hand."""
    assert torch.equal(out, want)
    assert torch.equal(layer.kv_cache[1], given["state_pool"])
    assert torch.equal(layer.kv_cache[0].mT, given["convolution"].pool)


@pytest.mark.parametrize("norm", [False, True])
def test_rows(batch, norm):
    """The third one is padding, whose block is 0."""
    layer, x, a, b, gate = qwen(), torch.randn(3, D), torch.randn(3, HV), torch.randn(3, HV), torch.randn(3, HV, V)
    given, out, rows = options(layer), torch.zeros(3, HV, V), index(4, 2, 0)
    batch(num_decodes=3, num_actual_tokens=3, non_spec_state_indices_tensor=rows)
    more = {"output_norm": OutputNorm(gate[:, None], layer.norm.weight, 1e-6)} if norm else {}
    want = flash_delta.decode_gated_delta_rule(
        *(t[:, None] for t in (*split(x), a, b)), read_indices=rows, write_indices=rows, **given, **more
    )
    layer._forward_core_fused_norm(x, b, a, gate, out) if norm else layer._forward_core(x, b, a, core_attn_out=out)
    judge(layer, given, out, want[:, 0])
    assert not out[2].any()
    assert out[:2].any()


def test_prompts_with_a_checkpoint(batch):
    """And a row of one token; the last tokens belong to nobody."""
    layer, x, a, b = qwen(), torch.randn(90, D), torch.randn(90, HV), torch.randn(90, HV)
    given, out = options(layer), torch.zeros(90, HV, V)
    bounds, rows, begun = index(0, 1, 71, 87), index(4, 2, 6), torch.tensor([True, False, True])
    kept = SimpleNamespace(checkpoint_offsets=index(0, 64, 0), state_indices=index(0, 9, 0))
    batch(
        num_prefills=2, num_decodes=1, num_actual_tokens=88, non_spec_query_start_loc=bounds, checkpoint=kept,
        non_spec_state_indices_tensor=rows, has_initial_state=begun,
    )  # fmt: skip
    want = flash_delta.prefill_gated_delta_rule(
        *(t[None, :88] for t in (*split(x), a, b)), cu_seqlens=bounds, read_indices=rows, write_indices=rows,
        has_initial_state=begun, checkpoint_indices=kept.state_indices, checkpoint_offsets=kept.checkpoint_offsets,
        **given,
    )  # fmt: skip
    before = layer.kv_cache[1][9].clone()
    layer._forward_core(x, b, a, out)
    judge(layer, given, out[:88], want[0])
    assert not torch.equal(layer.kv_cache[1][9], before)
    assert not out[87:].any()


@pytest.mark.parametrize("alone", [True, False])
def test_drafts(batch, alone):
    """Of different lengths, alone or between the tokens of a prompt."""
    layer, count = qwen(drafts=DRAFTS), 5 if alone else 25
    x, a, b = torch.randn(count, D), torch.randn(count, HV), torch.randn(count, HV)
    given, out = options(layer, rolling=True), torch.zeros(count, HV, V)
    bounds, table, accepted = index(0, 3, 5), torch.tensor([[1, 2, 3], [4, 5, 6]]).int(), index(2, 1)
    where, others = (torch.arange(5), None) if alone else (torch.tensor([0, 1, 2, 23, 24]), torch.arange(3, 23))
    batch(
        num_prefills=int(not alone), num_spec_decodes=2, num_actual_tokens=count, spec_query_start_loc=bounds,
        spec_sequence_masks=torch.tensor([True, True]), spec_state_indices_tensor=table, num_accepted_tokens=accepted,
        spec_token_indx=where, non_spec_token_indx=others, non_spec_query_start_loc=index(0, 20),
        non_spec_state_indices_tensor=index(8), has_initial_state=torch.tensor([True]),
    )  # fmt: skip
    want = torch.zeros_like(out)
    tokens = (*split(x), a, b)
    want[where] = flash_delta.decode_gated_delta_rule(
        *(t[None, where] for t in tokens), read_indices=table, write_indices=table, num_accepted_tokens=accepted,
        cu_seqlens=bounds, **given,
    )[0]  # fmt: skip
    if not alone:
        want[others] = flash_delta.prefill_gated_delta_rule(
            *(t[None, others] for t in tokens), cu_seqlens=index(0, 20), read_indices=index(8), write_indices=index(8),
            **given,
        )[0]  # fmt: skip
    layer._forward_core(x, b, a, out)
    judge(layer, given, out, want)
    assert out.flatten(1).any(1).all()


def test_kimi(batch):
    """The output norm is in the call."""
    layer = sys.modules[plugin.LAYERS + ".kimi_gdn_linear_attn"].KimiGatedDeltaNetAttention()
    x, g1, g2, beta = torch.randn(2, 3 * H * K), torch.randn(1, 2, H, K), torch.randn(2, H, K), torch.randn(1, 2, H)
    given, out, rows = options(layer), torch.zeros(1, 2, H, K), index(3, 1)
    batch(num_decodes=2, num_actual_tokens=2, non_spec_state_indices_tensor=rows)
    norm = OutputNorm(g2[:, None], layer.o_norm.weight, 1e-5, "sigmoid")
    want = flash_delta.decode_kda(
        *(t[:, None] for t in (*split(x, (H, H, H)), g1[0], beta[0])), read_indices=rows, write_indices=rows,
        lower_bound=-5.0, output_norm=norm, **given,
    )  # fmt: skip
    layer._forward(x, g1, g2, beta, out)
    judge(layer, given, out[0], want[:, 0])


def test_while_vllm_profiles_nothing_runs(batch):
    layer, out = qwen(), torch.zeros(3, HV, V)
    layer._forward_core(torch.randn(3, D), torch.randn(3, HV), torch.randn(3, HV), out)
    assert not out.any()


def test_what_the_ops_do_not_take_runs_on_vllms_own_code(batch, caplog):
    """Nothing has run before, and the log says why, once."""
    layer, out = qwen(), torch.zeros(3, HV, V)
    layer.kv_cache = layer.kv_cache[0], layer.kv_cache[1].long()
    batch(num_decodes=3, num_actual_tokens=3, non_spec_state_indices_tensor=index(4, 2, 0))
    with caplog.at_level(logging.WARNING, "vllm.flash_delta"):
        for _ in range(2):
            layer._forward_core(torch.randn(3, D), torch.randn(3, HV), torch.randn(3, HV), out)
    assert (out == 7).all()
    (warning,) = (record.message for record in caplog.records if record.name == "vllm.flash_delta")
    assert warning.startswith(
        "FLASH_DELTA_VLLM: vLLM's own code runs this layer: decode_gated_delta_rule: state_pool: "
    )
    assert warning.endswith("got torch.int64")


def test_a_layer_with_more_caches_runs_on_vllms_own_code(batch):
    layer, out = qwen(), torch.zeros(3, HV, V)
    layer.kv_cache = *layer.kv_cache, torch.zeros(BLOCKS)
    batch(num_decodes=3, num_actual_tokens=3, non_spec_state_indices_tensor=index(4, 2, 0))
    layer._forward_core(torch.randn(3, D), torch.randn(3, HV), torch.randn(3, HV), out)
    assert (out == 7).all()


@pytest.mark.parametrize("wish", [None, "0"])
def test_off_unless_it_is_asked_for(batch, monkeypatch, wish):
    monkeypatch.delenv(plugin.VARIABLE) if wish is None else monkeypatch.setenv(plugin.VARIABLE, wish)
    cls = type("Fresh", (Qwen,), {})
    sys.modules[plugin.LAYERS + ".qwen_gdn_linear_attn"].QwenGatedDeltaNetAttention = cls
    plugin._active.clear()
    plugin.register()
    assert cls._forward_core is Qwen._forward_core
    assert not plugin._active


def test_other_methods_are_left_alone(batch, caplog):
    class Other(Qwen):
        def _forward_core(self, hidden_states):
            return F.silu(hidden_states)

    sys.modules[plugin.LAYERS + ".qwen_gdn_linear_attn"].QwenGatedDeltaNetAttention = Other
    plugin._active.remove("Q")
    method = Other._forward_core
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert Other._forward_core is method
    assert plugin._active == ["M"]
    assert "_forward_core takes self, hidden_states" in caplog.text


def test_a_version_without_the_fused_norm_and_checkpoints(batch, monkeypatch):
    """vLLM 0.26."""
    monkeypatch.delattr(Qwen, "_forward_core_fused_norm")
    cls = type("Older", (Qwen,), {})
    sys.modules[plugin.LAYERS + ".qwen_gdn_linear_attn"].QwenGatedDeltaNetAttention = cls
    plugin.register()
    assert "Older" in plugin._active
    layer, x = cls(), torch.randn(5, D)
    bounds, slots = index(0, 5), index(3)
    monkeypatch.delitem(EMPTY, "checkpoint")
    batch(num_prefills=1, num_actual_tokens=5, has_initial_state=torch.tensor([False]),
          non_spec_query_start_loc=bounds, non_spec_state_indices_tensor=slots)  # fmt: skip
    a, b, out = torch.randn(5, HV), torch.randn(5, HV), torch.empty(5, HV, V)
    given = options(layer)
    layer._forward_core(x, b, a, out)
    q, k, v = split(x[None])
    want = flash_delta.prefill_gated_delta_rule(
        q, k, v, a[None], b[None], read_indices=slots, write_indices=slots, cu_seqlens=bounds, max_prompts=1,
        has_initial_state=torch.tensor([False]), **given,
    )[0]  # fmt: skip
    judge(layer, given, out, want)
