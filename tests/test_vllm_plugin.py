"""The plugin for vLLM without vLLM: its classes and its metadata are stand-ins with the same names. tests/engines has
the real ones."""

import logging
import shutil
import sys
from collections import Counter
from functools import wraps
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from serving_truth import GPU, needs_triton

import flash_delta
from flash_delta.integrations.vllm import calls, plugin, warmup
from flash_delta.ops.serving import Convolution, OutputNorm
from flash_delta.problem import ENVIRONMENT

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
        self.num_spec, self.cache_config = drafts, SimpleNamespace(mamba_page_size_padded=None)

    def get_state_shape(self):
        return tuple(pool.shape[1:] for pool in self.kv_cache)

    def get_state_dtype(self):
        return tuple(pool.dtype for pool in self.kv_cache)

    def split_ba(self, ba):
        return ba.chunk(2, -1)

    def _forward_core(self, mixed_qkv, b, a, core_attn_out):
        core_attn_out.fill_(7)

    def _forward_core_fused_norm(self, mixed_qkv, b, a, output_gate, core_attn_out):
        core_attn_out.fill_(8)

    def _forward_core_fused_norm_packed(self, mixed_qkvz, ba, core_attn_out):
        core_attn_out.fill_(9)


class Olmo(Qwen):
    """Its beta reaches 2, and its norm is another method's."""

    allow_neg_eigval = True


class Bailing(torch.nn.Module):
    """Its gates are computed before the method, and q, k and v have a convolution each."""

    def __init__(self, safe=True):
        super().__init__()
        torch.manual_seed(2)
        self.prefix, self.local_num_heads, self.head_dim = "layer", H, K
        self.safe_gate, self.lower_bound, self.num_speculative_tokens = safe, -5.0, 0
        self.cache_config = SimpleNamespace()
        for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
            setattr(self, name, SimpleNamespace(weight=torch.randn(H * K, 1, W)))
        self.kv_cache = torch.randn(BLOCKS, W - 1, 3 * H * K), torch.randn(BLOCKS, H, K, K)

    def _forward(self, q_proj_states, k_proj_states, v_proj_states, g1, beta, core_attn_out):
        core_attn_out.fill_(9)


class Kimi(torch.nn.Module):
    def __init__(self, drafts=0):
        super().__init__()
        torch.manual_seed(1)
        self.prefix, self.local_num_heads, self.head_dim, self.gate_lower_bound = "layer", H, K, -5.0
        self.local_projection_size = H * K
        self.conv1d = SimpleNamespace(weight=torch.randn(3 * H * K, 1, W))
        self.A_log, self.dt_bias = torch.randn(1, 1, H, 1), torch.randn(H * K) - 2
        self.o_norm = SimpleNamespace(weight=torch.rand(K), eps=1e-5, activation="sigmoid")
        self.kv_cache = torch.randn(BLOCKS, W - 1 + drafts, 3 * H * K), torch.randn(BLOCKS, H, K, K)
        self.num_spec, self.cache_config = drafts, SimpleNamespace(mamba_page_size_padded=None)

    get_state_shape, get_state_dtype = Qwen.get_state_shape, Qwen.get_state_dtype

    def _forward(self, mixed_qkv, g1, g2, beta, core_attn_out):
        core_attn_out.fill_(9)


@pytest.fixture
def batch(monkeypatch):
    return pretend_vllm(monkeypatch)


def pretend_vllm(monkeypatch):
    """vLLM's modules, as far as the plugin asks for them. Returns what sets the metadata of the running batch."""
    context = SimpleNamespace(attn_metadata=None)
    modules = {
        plugin.LAYERS + ".qwen_gdn_linear_attn": {"QwenGatedDeltaNetAttention": type("Q", (Qwen,), {})},
        plugin.LAYERS + ".kimi_gdn_linear_attn": {"KimiGatedDeltaNetAttention": type("M", (Kimi,), {})},
        plugin.LAYERS + ".olmo_gdn_linear_attn": {"OlmoHybridGatedDeltaNetAttention": type("O", (Olmo,), {})},
        plugin.MODELS + ".bailing_moe_v3": {"BailingMoeV3KimiDeltaAttention": type("B", (Bailing,), {})},
        "vllm.forward_context": {"get_forward_context": lambda: context},
        "vllm.model_executor.layers.mamba.mamba_utils": {"is_conv_state_dim_first": lambda: False},
    }
    for name, values in modules.items():
        module = ModuleType(name)
        module.__dict__.update(values, __spec__=ModuleSpec(name, None))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(plugin, "_active", [])
    monkeypatch.setattr(warmup, "_warm", set())
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
    "spec_token_indx": None, "non_spec_token_indx": None, "spec_sequence_masks_cpu": None, "num_spec_decode_tokens": 0,
}  # fmt: skip


def qwen(**more):
    module = sys.modules[plugin.LAYERS + ".qwen_gdn_linear_attn"]
    return module.QwenGatedDeltaNetAttention(**more)


def index(*values):
    return torch.tensor(values, dtype=torch.int32)


def options(layer, rolling=False):
    """Returns the options of the ops, as one would write them for this layer."""
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


def test_what_a_step_takes_of_the_host(batch, monkeypatch):
    """Counted beside the op itself, with which a step of one layer takes some 30 us: functions of Python, and of torch,
    most of which make the views of six tensors."""
    layer, x, a, b, out = qwen(), torch.randn(3, D), torch.randn(3, HV), torch.randn(3, HV), torch.zeros(3, HV, V)
    batch(num_decodes=3, num_actual_tokens=3, non_spec_state_indices_tensor=index(4, 2, 1))
    layer._forward_core(x, b, a, out)
    monkeypatch.setattr(
        flash_delta, "decode_gated_delta_rule", wraps(flash_delta.decode_gated_delta_rule)(lambda **_: None)
    )
    count = Counter()
    sys.setprofile(lambda frame, event, function: count.update([event]))
    try:
        layer._forward_core(x, b, a, out)
    finally:
        sys.setprofile(None)
    assert count["call"] <= 44
    assert count["c_call"] <= 36


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


WHERE = {  # the tokens of two drafts: alone, on both sides of a prompt's tokens, before them
    "alone": (5, [0, 1, 2, 3, 4]), "apart": (25, [0, 1, 2, 23, 24]), "first": (25, [0, 1, 2, 3, 4]),
}  # fmt: skip


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("odd", [True, False])
def test_drafts(batch, monkeypatch, where, known, odd):
    """Drafts have different lengths. Nothing is gathered, and no output is copied, if drafts come first and vLLM tells
    the host (``known``). The gates' addresses may be ``odd``."""
    layer, (count, where) = qwen(drafts=DRAFTS), WHERE[where]
    alone, first = count == 5, where[-1] == 4
    x, a, b = torch.randn(count, D), torch.randn(count, HV), torch.randn(count, HV)
    if odd:
        a, b = (torch.randn(count, HV + 1)[:, :HV].copy_(t) for t in (a, b))
    given, out = options(layer, rolling=True), torch.zeros(count, HV, V)
    bounds, table, accepted = index(0, 3, 5), torch.tensor([[1, 2, 3], [4, 5, 6]]).int(), index(2, 1)
    where = torch.tensor(where)
    others = torch.tensor([t for t in range(count) if t not in where])
    masks = [True, True] if alone else [True, True, False] if first else [True, False, True]
    batch(
        num_prefills=int(not alone), num_spec_decodes=2, num_actual_tokens=count, spec_query_start_loc=bounds,
        spec_sequence_masks=torch.tensor(masks), spec_state_indices_tensor=table, num_accepted_tokens=accepted,
        spec_token_indx=where, non_spec_token_indx=others, non_spec_query_start_loc=index(0, 20),
        non_spec_state_indices_tensor=index(8), has_initial_state=torch.tensor([True]), num_spec_decode_tokens=5,
        spec_sequence_masks_cpu=torch.tensor(masks) if known else None,
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
    called = []
    monkeypatch.setattr(calls, "refusal", lambda *_: None)  # it would not know the ops below
    for name in ("decode_gated_delta_rule", "prefill_gated_delta_rule"):
        op = getattr(flash_delta, name)
        monkeypatch.setattr(flash_delta, name, wraps(op)(lambda op=op, **x: called.append(x) or op(**x)))
    layer._forward_core(x, b, a, out)
    judge(layer, given, out, want)
    assert out.flatten(1).any(1).all()
    for name, tensor in (("out", out), ("v", x), ("beta", b)):
        where = [given[name].untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for given in called]
        assert where == ([True] if alone else [first and known, first and known and not (odd and name == "beta")])
    if first and known and not alone:
        assert [given["beta"].data_ptr() % 16 for given in called] == [0, 0]
        assert [given["beta"].stride()[1] for given in called] == [b.stride(0)] * 2


def test_a_row_without_a_draft_goes_on_from_the_last_accepted_token(batch):
    """Two rows draft. Then one has no draft, counted as a draft of no tokens, and the other has one. Tokens, states and
    windows are those of single tokens."""
    layer, single = qwen(drafts=DRAFTS), qwen()
    x, a, b = torch.randn(10, D), torch.randn(10, HV), torch.randn(10, HV)
    got, want, table = torch.zeros(10, HV, V), torch.zeros(10, HV, V), torch.tensor([[1, 2, 3], [4, 5, 6]]).int()
    single.kv_cache = layer.kv_cache[0][:, : W - 1].clone(), layer.kv_cache[1].clone()
    for step, bounds, accepted in ((slice(0, 6), index(0, 3, 6), index(1, 1)), (slice(6, 9), index(0, 1, 3), [3, 2])):
        count = step.stop - step.start
        batch(
            num_spec_decodes=2, num_actual_tokens=count, num_spec_decode_tokens=count, spec_query_start_loc=bounds,
            spec_sequence_masks=torch.tensor([True, True]), spec_state_indices_tensor=table,
            num_accepted_tokens=torch.as_tensor(accepted).int(),
        )  # fmt: skip
        layer._forward_core(x[step], b[step], a[step], got[step])
    accepted = [[0, 1, 2, 6], [3, 4, 7, 8]]  # the last of the second row's three is rejected
    for row, tokens in zip(index(1, 4), accepted, strict=True):
        for t in tokens:
            batch(num_decodes=1, num_actual_tokens=1, non_spec_state_indices_tensor=row[None])
            single._forward_core(x[t : t + 1], b[t : t + 1], a[t : t + 1], want[t : t + 1])
    tokens = accepted[0] + accepted[1]
    assert torch.equal(got[tokens], want[tokens])
    assert torch.equal(layer.kv_cache[1][[1, 5]], single.kv_cache[1][[1, 4]])
    assert torch.equal(layer.kv_cache[0][1, : W - 1], single.kv_cache[0][1])


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


def test_olmo(batch, problems):
    layer = sys.modules[plugin.LAYERS + ".olmo_gdn_linear_attn"].OlmoHybridGatedDeltaNetAttention()
    x, a, b = torch.randn(2, D), torch.randn(2, HV), torch.randn(2, HV)
    given, out, rows = options(layer), torch.zeros(2, HV, V), index(3, 1)
    batch(num_decodes=2, num_actual_tokens=2, non_spec_state_indices_tensor=rows)
    want = flash_delta.decode_gated_delta_rule(
        *(t[:, None] for t in (*split(x), a, b)), read_indices=rows, write_indices=rows, allow_neg_eigval=True, **given
    )
    layer._forward_core(x, b, a, out)
    judge(layer, given, out, want[:, 0])
    assert problems[-1].most_beta == 2


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("prompts", [True, False])
def test_bailing(batch, problems, safe, prompts):
    """Log decays and beta are given. Of q, k and v each has a convolution, and the windows lie in one pool."""
    layer = sys.modules[plugin.MODELS + ".bailing_moe_v3"].BailingMoeV3KimiDeltaAttention(safe=safe)
    x, g1, beta = torch.randn(5, 3 * H * K), -4 * torch.rand(1, 5, H, K), torch.rand(1, 5, H)
    weight = torch.cat([conv.weight[:, 0] for conv in (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)])
    given = {
        "state_pool": layer.kv_cache[1].clone(), "state_v_first": True, "null_slot": 0, "use_qk_l2norm_in_kernel": True,
        "convolution": Convolution(layer.kv_cache[0].clone().mT, weight), "lower_bound": -5.0 if safe else None,
    }  # fmt: skip
    tokens, out = (*split(x, (H, H, H)), g1[0], beta[0]), torch.zeros(1, 5, H, K)
    rows = index(3, 1) if prompts else index(3, 1, 4, 5, 0)
    fields = {"num_actual_tokens": 5, "non_spec_state_indices_tensor": rows}
    more = {"read_indices": rows, "write_indices": rows}
    if prompts:
        more |= {"cu_seqlens": index(0, 2, 5), "has_initial_state": torch.tensor([True, False]), "max_prompts": 2}
        batch(num_prefills=2, non_spec_query_start_loc=more["cu_seqlens"],
              has_initial_state=more["has_initial_state"], **fields)  # fmt: skip
        want = flash_delta.prefill_kda(*(t[None] for t in tokens), **more, **given)[0]
    else:
        batch(num_decodes=5, **fields)
        want = flash_delta.decode_kda(*(t[:, None] for t in tokens), **more, **given)[:, 0]
    layer._forward(*x.split(H * K, -1), g1, beta, out)
    judge(layer, given, out[0], want)
    assert [p.most_beta for p in problems] == [2, 1]  # of the call above nothing is known


@pytest.mark.parametrize("drafts", [0, DRAFTS])
def test_while_vllm_profiles_every_form_of_calls_runs_once(batch, monkeypatch, drafts):
    """On caches of its own, whose pages are vLLM's."""
    called, compile_call = [], warmup.compile_call

    def counted(op, arguments):
        inputs, states = arguments["convolution"].pool.mT, arguments["state_pool"]
        assert inputs.stride() == (4096, D, 1)
        assert states.stride() == (4096, V * K, K, 1)
        assert states.data_ptr() - inputs.data_ptr() == 4 * inputs[0].numel()
        called.append((arguments.get("max_prompts", 0), arguments["q"].shape[0] * arguments["q"].shape[1]))
        compile_call(op, arguments)

    monkeypatch.setattr(warmup, "compile_call", counted)
    layer, out = qwen(drafts=drafts), torch.zeros(40, HV, V)
    layer.cache_config.mamba_page_size_padded = 4 * 4096
    before = [pool.clone() for pool in layer.kv_cache]
    for count in (8, 40, 40):  # a few tokens are not enough for every form
        layer._forward_core(torch.randn(count, D), torch.randn(count, HV), torch.randn(count, HV), out[:count])
    assert called == [(0, 1), (0, 2), (2, 40)] + [(0, 1 + DRAFTS)] * bool(drafts)
    assert all(map(torch.equal, layer.kv_cache, before))
    assert not out.any()


def to_device(layer, device, page):
    """With caches as vLLM has them: a page for each block, windows first."""
    for name, value in vars(layer).items():
        if isinstance(value, torch.Tensor):
            setattr(layer, name, value.to(device))
        elif isinstance(getattr(value, "weight", None), torch.Tensor):
            value.weight = value.weight.to(device)
    inputs, states = layer.kv_cache
    memory, size = torch.zeros(BLOCKS, page, device=device), inputs[0].numel()
    layer.cache_config.mamba_page_size_padded = 4 * page
    layer.kv_cache = (
        memory[:, :size].view(inputs.shape), memory[:, size:][:, : states[0].numel()].view(states.shape),
    )  # fmt: skip


def call_of(kind, drafts, device):
    """A layer, and what calls it with so many random tokens."""
    if kind == "qwen":
        layer = qwen(drafts=drafts)
    else:
        layer = sys.modules[plugin.LAYERS + ".kimi_gdn_linear_attn"].KimiGatedDeltaNetAttention(drafts=drafts)
    to_device(layer, device, 4096)

    def randn(*shape):
        return torch.randn(*shape, device=device)

    def call(count):
        if kind == "qwen":
            x, b, a = randn(count, D + 2 * HV).split([D, HV, HV], -1)
            return layer._forward_core(x, b.contiguous(), a.contiguous(), randn(count, HV, V))
        x, beta, _ = randn(count, 3 * H * K + H + 6).split([3 * H * K, H, 6], -1)
        return layer._forward(x, randn(1, count, H, K), randn(count, H, K), beta[None], randn(1, count, H, K))

    return call


def serve(monkeypatch, kind, drafts, device):
    """The kernels that are compiled while vLLM profiles, and those after later batches."""
    from flash_delta.kernels.runtime import run

    monkeypatch.setenv(ENVIRONMENT, "triton")
    monkeypatch.setattr(run, "compiled", {})
    batch, call = pretend_vllm(monkeypatch), call_of(kind, drafts, device)
    call(40)
    profiled = list(run.compiled)
    assert len(warmup._warm) == 1

    def on(*values):
        return index(*values).to(device)

    with flash_delta.forbid_compilation():
        for count in (1, 3):
            batch(num_decodes=count, num_actual_tokens=count, non_spec_state_indices_tensor=on(*range(1, 1 + count)))
            call(count)
        for bounds in ((0, 5), (0, 1, 70), (0, 16, 17, 33)):
            rows = on(*range(1, len(bounds)))
            batch(num_prefills=len(rows), num_actual_tokens=bounds[-1], non_spec_query_start_loc=on(*bounds),
                  non_spec_state_indices_tensor=rows, has_initial_state=rows > 1)  # fmt: skip
            call(bounds[-1] + 2)
        if drafts:
            table, accepted = on(1, 2, 3, 4, 5, 6).view(2, 3), on(2, 1)
            batch(num_spec_decodes=2, num_actual_tokens=5, spec_query_start_loc=on(0, 3, 5),
                  num_accepted_tokens=accepted, spec_state_indices_tensor=table,
                  spec_sequence_masks=on(1, 1).bool())  # fmt: skip
            call(5)
    return profiled, list(run.compiled)


def serve_pretended(place, *given):
    """On a GPU that is none."""
    from flash_delta.compiler.pretended_gpu import pretended_compiler

    def here(new):
        return lambda *values, device=None, **options: new(*values, **options)

    with pretended_compiler(place), pytest.MonkeyPatch.context() as m:
        for name in ("zeros", "randn", "tensor"):
            m.setattr(torch, name, here(getattr(torch, name)))
        return serve(m, *given, "cpu")


@needs_triton
@pytest.mark.skipif(not GPU and shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize(("kind", "drafts"), [("qwen", 0), ("qwen", DRAFTS), ("kimi", 0)])
def test_what_ran_while_vllm_profiled_is_all_that_calls_compile(process, place, monkeypatch, kind, drafts):
    """The compiled code of every later batch is there already."""
    if GPU:
        profiled, later = serve(monkeypatch, kind, drafts, "cuda")
    else:
        profiled, later = process.submit(serve_pretended, place, kind, drafts).result()
    assert profiled
    assert later == profiled


def test_a_packed_call_while_vllm_profiles_does_not_reach_vllms_own_code(batch):
    """vLLM's would tune its kernels. The same method serves later calls."""
    layer, x, ba = qwen(), torch.randn(40, D + HV * V), torch.randn(40, 2 * HV)
    layer._forward_core_fused_norm_packed(x, ba, torch.zeros(40, HV, V))
    assert len(warmup._warm) == 1
    x, ba, out = x[:3], ba[:3], torch.zeros(3, HV, V)
    given, rows = options(layer), index(4, 2, 1)
    batch(num_decodes=3, num_actual_tokens=3, non_spec_state_indices_tensor=rows)
    norm = OutputNorm(x[:, None, D:].unflatten(-1, (HV, V)), layer.norm.weight, 1e-6)
    want = flash_delta.decode_gated_delta_rule(
        *(t[:, None] for t in (*split(x[:, :D]), ba[:, HV:], ba[:, :HV])), read_indices=rows, write_indices=rows,
        output_norm=norm, **given,
    )  # fmt: skip
    layer._forward_core_fused_norm_packed(x, ba, out)
    judge(layer, given, out, want[:, 0])


def test_a_layer_whose_kernels_fail_while_vllm_profiles_runs_on_vllms_own_code(batch, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(warmup, "compile_call", fail)
    layer, out = qwen(), torch.zeros(40, HV, V)
    with caplog.at_level(logging.WARNING, "vllm.flash_delta"):
        layer._forward_core(torch.randn(40, D), torch.randn(40, HV), torch.randn(40, HV), out)
    assert (out == 7).all()
    assert "RuntimeError: no such instruction" in caplog.text


def test_a_version_without_a_layer_or_with_one_that_cannot_be_imported(batch, monkeypatch, caplog):
    """Nothing is said about the first. The second gives a warning."""
    monkeypatch.delitem(sys.modules, plugin.MODELS + ".bailing_moe_v3")
    monkeypatch.setattr(plugin, "find_spec", lambda name: None if "bailing" in name else name)
    broken = ModuleType("broken")
    broken.__getattr__ = lambda name: 1 / 0
    monkeypatch.setitem(sys.modules, plugin.LAYERS + ".olmo_gdn_linear_attn", broken)
    plugin._active[:] = ["Q", "M"]
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert plugin._active == ["Q", "M"]
    (warning,) = caplog.messages
    assert warning.endswith("OlmoHybridGatedDeltaNetAttention: division by zero")


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


@pytest.mark.parametrize(
    ("changed", "reason"), [("kv_cache", "it keeps 3 caches"), ("cache_config", "with --use-replayssm vLLM has no")]
)
def test_a_layer_with_other_caches_runs_on_vllms_own_code(batch, caplog, changed, reason):
    layer, out = qwen(), torch.zeros(3, HV, V)
    caches, config = (*layer.kv_cache, torch.zeros(BLOCKS)), SimpleNamespace(use_kda_recoverssm=True)
    setattr(layer, changed, {"kv_cache": caches, "cache_config": config}[changed])
    batch(num_decodes=3, num_actual_tokens=3, non_spec_state_indices_tensor=index(4, 2, 0))
    layer._forward_core(torch.randn(3, D), torch.randn(3, HV), torch.randn(3, HV), out)
    assert (out == 7).all()
    assert f"this layer: {reason}" in caplog.text


@pytest.mark.parametrize(
    ("wish", "version", "on"),
    [
        (None, "0.32.0", True), (None, "0.26.1", True), (None, "0.32.1rc1+cpu", True), (None, "0.33.0", False),
        (None, "0.320.1", False), (None, "0.3", False), ("1", "0.33.0", True), ("0", "0.32.0", False),
        ("0", "0.33.0", False), ("1", None, False),
    ],
)  # fmt: skip
def test_on_in_tested_versions_or_if_it_is_asked_for(batch, monkeypatch, caplog, wish, version, on):
    monkeypatch.delenv(plugin.VARIABLE) if wish is None else monkeypatch.setenv(plugin.VARIABLE, wish)
    monkeypatch.setattr(plugin, "_version", lambda package: version if package == "vllm" else None)
    cls = type("Fresh", (Qwen,), {})
    sys.modules[plugin.LAYERS + ".qwen_gdn_linear_attn"].QwenGatedDeltaNetAttention = cls
    plugin._warn_once.cache_clear()
    for _ in range(2):
        plugin.register()
    assert (cls._forward_core is not Qwen._forward_core) == on == ("Fresh" in plugin._active)
    lines = [(r.name, r.levelname, f"vLLM {version} is not tested" in r.getMessage()) for r in caplog.records]
    assert lines == ([] if on or wish or version is None else [("vllm.flash_delta", "WARNING", True)])


def test_a_warning_before_vllm_has_set_up_its_log_is_a_line_of_stderr(monkeypatch, capsys):
    monkeypatch.setattr(calls.logger, "propagate", False)
    plugin._warn_once.cache_clear()
    for _ in range(2):
        plugin._warn_once("0.33.0")
    assert capsys.readouterr().err == (
        "WARNING vllm.flash_delta: FLASH_DELTA_VLLM: vLLM's own code runs all layers: flash_delta "
        f"{flash_delta.__version__} is off, because vLLM 0.33.0 is not tested: 0.26 and 0.32 are. "
        "FLASH_DELTA_VLLM=1 switches it on\n"
    )
    assert not calls.logger.handlers


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
    assert plugin._active == ["O", "M", "B"]
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


@pytest.fixture
def packed(batch, monkeypatch):
    """Qwen3.5's layer in vLLM 0.26. Its projections do nothing, and out_proj doubles."""
    monkeypatch.delattr(Qwen, "_forward_core_fused_norm")
    monkeypatch.delattr(Qwen, "_forward_core_fused_norm_packed")

    class Older(Qwen):
        gqa_interleaved_layout = False

        def forward_cuda(self, hidden_states):
            return hidden_states - 1

        def _forward_core_rocm(self, qkvz, ba, z_out, core_attn_out):
            raise AssertionError

        def _output_projection(self, core_attn_out, z):
            raise AssertionError

    module = sys.modules[plugin.LAYERS + ".qwen_gdn_linear_attn"]
    Older.__module__, module.QwenGatedDeltaNetAttention = module.__name__, Older
    module._encode_layer_name = lambda name: f"encoded {name}"
    plugin.register()
    layer = Older()
    layer.in_proj_qkvz, layer.in_proj_ba = (
        (lambda x: (x[:, : D + HV * V], None)),
        (lambda x: (x[:, D + HV * V :], None)),
    )
    layer.out_proj, layer.norm = (lambda x: (2 * x, None)), RMSNormGated()

    def operator(qkvz, ba, unused, core_attn_out, layer_name, use_aiter):
        assert (layer_name, use_aiter) == ("encoded layer", True)
        layer._forward_core_rocm(qkvz=qkvz, ba=ba, z_out=unused, core_attn_out=core_attn_out)

    monkeypatch.setattr(torch.ops, "vllm", SimpleNamespace(qwen_gdn_attention_core=operator), raising=False)
    return layer


class RMSNormGated(torch.nn.Module):
    weight, eps, activation = torch.linspace(0.5, 2, V), 1e-6, "silu"

    def forward(self, x, gate):
        return F.rms_norm(x, (V,), self.weight, self.eps) * F.silu(gate)


def test_a_version_without_the_fused_norm_has_it_by_its_packed_method(packed, batch):
    """The last row is nobody's."""
    x, rows = torch.randn(4, D + HV * V + 2 * HV), index(4, 2, 1)
    batch(num_decodes=3, num_actual_tokens=3, non_spec_state_indices_tensor=rows)
    given, (qkv, gate, b, a) = options(packed), x[:3].split([D, HV * V, HV, HV], -1)
    norm = OutputNorm(gate.unflatten(-1, (1, HV, V)), packed.norm.weight, 1e-6)
    want = flash_delta.decode_gated_delta_rule(
        *(t[:, None] for t in (*split(qkv), a, b)), read_indices=rows, write_indices=rows, output_norm=norm, **given
    )
    out = packed.forward_cuda(x)
    judge(packed, given, out[:3], 2 * want.flatten(1))
    assert out[:3].all()
    assert not out[3].any()


def test_a_packed_layer_that_is_declined_has_its_norm_from_vllm(packed, batch):
    packed.kv_cache = packed.kv_cache[0], packed.kv_cache[1].long()
    batch(num_decodes=3, num_actual_tokens=3, non_spec_state_indices_tensor=index(4, 2, 1))
    x = torch.randn(3, D + HV * V + 2 * HV)
    gate = x[:, D : D + HV * V].unflatten(-1, (HV, V))
    core = torch.full((3, HV, V), 7.0)  # what the stand-in fills in
    for _ in range(2):
        assert torch.equal(packed.forward_cuda(x), 2 * packed.norm(core, gate).flatten(1))


def test_interleaved_heads_have_vllms_own_norm(packed):
    packed.gqa_interleaved_layout = True
    x = torch.randn(3, 5)
    assert torch.equal(packed.forward_cuda(x), x - 1)
