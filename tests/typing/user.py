"""A user's code. `mypy --strict` accepts it, and each `assert_type` says which type the user gets."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import assert_type

import flash_delta
from flash_delta import chunk_gated_delta_rule, chunk_kda, decode_gated_delta_rule, explain
from flash_delta.integrations import fla
from flash_delta.integrations.fla import ops as fla_ops
from flash_delta.integrations.fla import register
from flash_delta.integrations.fla.modules.convolution import ShortConvolution as FlaConvolution
from flash_delta.integrations.fla.ops.kda.chunk import chunk_kda as fla_chunk_kda
from flash_delta.integrations.transformers import Refused, Replaced, disable, enable
from flash_delta.layers import Attention, AttentionState, GatedDeltaNet, KimiDeltaAttention, MixerState
from flash_delta.models import (
    FlashDeltaCache,
    FlashDeltaConfig,
    FlashDeltaForCausalLM,
    FlashDeltaModel,
    parameter_groups,
)
from flash_delta.modules import GatedRMSNorm, RMSNorm, ShortConvolution, causal_conv1d, gated_rms_norm, rms_norm
from flash_delta.ops.serving import Convolution, OutputNorm, warmup
from flash_delta.ops.serving import workspace_bytes as count
from flash_delta.parallel import ContextParallel
from flash_delta.training import Settings, generate_text


def ops(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    assert_type(chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True), tuple[Tensor, Tensor | None])
    assert_type(flash_delta.fused_recurrent_gated_delta_rule(q, k, v, g), tuple[Tensor, Tensor | None])
    assert_type(flash_delta.chunk_delta_rule(q, k, v, beta), tuple[Tensor, Tensor | None])
    assert_type(flash_delta.chunk_comba(q, k, v, k, g, beta), tuple[Tensor, Tensor | None])
    assert_type(flash_delta.chunk_simple_gla(q, k, v, g), tuple[Tensor, Tensor | None])
    assert_type(flash_delta.fused_recurrent_kda(q, k, v, g, beta), tuple[Tensor, Tensor | None])
    assert_type(flash_delta.fused_kda_gate(g, g, g), Tensor)
    assert_type(flash_delta.naive_gdn_gate(g, g), Tensor)
    assert_type(chunk_kda(q, k, v, g, beta), tuple[Tensor, ...])
    assert_type(fla_ops.chunk_kda(q, k, v, g, beta), tuple[Tensor, ...])
    assert_type(fla_chunk_kda(q, k, v, g, beta), tuple[Tensor, ...])
    explained = explain(chunk_kda, q, k, v, g, beta)
    assert_type(explained, flash_delta.Explanation)
    assert_type(explained.backend, str | None)
    assert_type(explained.reasons, dict[str, str])
    with flash_delta.forbid_compilation():
        pass
    assert_type(flash_delta.__version__, str)


def serving(q: Tensor, g: Tensor, pool: Tensor, slots: Tensor, starts: Tensor) -> None:
    convolution, norm = Convolution(q, slots, pool), OutputNorm(q, q, 1e-6)
    o = decode_gated_delta_rule(
        q, q, q, g, g, pool, slots, slots, state_v_first=True, convolution=convolution, output_norm=norm
    )
    assert_type(o, Tensor)
    assert_type(flash_delta.decode_kda(q, q, q, g, g, pool, slots, state_v_first=True), Tensor)
    assert_type(flash_delta.prefill_gated_delta_rule(q, q, q, g, g, pool, starts, slots, state_v_first=True), Tensor)
    assert_type(flash_delta.prefill_kda(q, q, q, g, g, pool, starts, slots, state_v_first=True), Tensor)
    call: dict[str, Any] = {
        "q": q,
        "k": q,
        "v": q,
        "g": g,
        "beta": g,
        "state_pool": pool,
        "read_indices": slots,
        "state_v_first": True,
    }
    assert_type(warmup([(decode_gated_delta_rule, call)], device="cpu"), list[float])
    assert_type(count(decode_gated_delta_rule, **call), int)


def modules(x: Tensor, weight: Tensor) -> None:
    assert_type(causal_conv1d(x, weight), tuple[Tensor, Tensor | None])
    assert_type(rms_norm(x, weight, 1e-6), Tensor)
    assert_type(gated_rms_norm(x, x, weight, 1e-6, "silu"), Tensor)
    assert_type(RMSNorm(64).forward(x), Tensor)
    assert_type(GatedRMSNorm(64).forward(x, x), Tensor)
    assert_type(RMSNorm(64).weight, torch.nn.Parameter)
    assert_type(ShortConvolution(64, 4).forward(x), tuple[Tensor, Tensor | None])


def layers(x: Tensor, mask: Tensor, context: ContextParallel) -> None:
    state, past = MixerState(), AttentionState()
    assert_type(GatedDeltaNet(hidden_size=128, head_dim=32, num_heads=4).forward(x, attention_mask=mask), Tensor)
    assert_type(KimiDeltaAttention(hidden_size=128, head_dim=32, num_heads=4).forward(x, state=state), Tensor)
    assert_type(Attention(128, 4).forward(x, state=past), Tensor)
    assert_type(state.recurrent, Tensor | None)
    y, _, _ = fla.GatedDeltaNet(hidden_size=128, head_dim=32, num_heads=4).forward(x)
    assert_type(y, Tensor)
    assert_type(FlaConvolution(64, 4).forward(x), tuple[Tensor, Tensor | None])
    assert_type(register().registered, tuple[str, ...])
    chunk_kda(x, x, x, x, x, cp_context=context)


def models(tokens: Tensor) -> None:
    config = FlashDeltaConfig(vocab_size=256, hidden_size=128, mixers=["gdn", "attention"])
    assert_type(config.hidden_size, int)
    model = FlashDeltaForCausalLM(config)
    assert_type(FlashDeltaModel(config).config_class, type[FlashDeltaConfig])
    assert_type(FlashDeltaCache(config).get_seq_length(), int)
    loss = model(tokens, labels=tokens).loss
    parameter_groups(model, 0.1)
    Settings(steps=3, batch_size=2, seq_len=32)
    generate: Callable[..., object] = generate_text
    print(loss, generate)


def transformers(model: torch.nn.Module) -> None:
    with enable(model) as report:
        assert_type(report.replaced, tuple[Replaced, ...])
        assert_type(report.refused, tuple[Refused, ...])
    disable()
