"""`flash-delta check --states` follows a model's own states, and says what fewer bits do to them."""

import json

import pytest
import tiny_model
import tiny_transformers
import torch
from torch import nn
from typer.testing import CliRunner

from flash_delta import chunk_gated_delta_rule, decode_gated_delta_rule
from flash_delta.backend import names
from flash_delta.cli.app import app
from flash_delta.integrations import transformers as integration
from flash_delta.models import FlashDeltaConfig, FlashDeltaForCausalLM
from flash_delta.ops.serving import Int8States, dequantize_states, quantize_states
from flash_delta.reference.recurrent import recurrent
from flash_delta.testing import recorder, relative_error
from flash_delta.testing.recorder import recording
from flash_delta.testing.states import measure_states
from flash_delta.training import byte_tokenizer

BYTES = tiny_model.SIZES | {"vocab_size": 256}


def check(*arguments):
    return CliRunner().invoke(app, ["check", *map(str, arguments)])


def save(model, folder):
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def hybrid(growth=1.0):
    torch.manual_seed(0)
    model = FlashDeltaForCausalLM(FlashDeltaConfig(**BYTES, mixers=["gdn", "attention", "kda"]))
    with torch.no_grad():
        model.model.layers[2].mixer.v_proj.weight.mul_(growth)
    return model


class Rule(nn.Module):
    """A model whose only layer is the op."""

    def __init__(self, T=150):
        super().__init__()
        torch.manual_seed(0)
        self.bias = nn.Parameter(torch.zeros(()))
        self.q, self.k = torch.randn(2, 1, T, 2, 16)
        self.v, self.g, self.beta = torch.randn(1, T, 4, 24), -torch.rand(1, T, 4) / 9, torch.rand(1, T, 4)

    def forward(self, input_ids, use_cache):
        options = {"use_qk_l2norm_in_kernel": True, "backend": None}
        return chunk_gated_delta_rule(self.q, self.k, self.v, self.g, self.beta, **options)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_those_of_decoding(dtype):
    model = Rule()
    (found,) = measure_states(model, torch.zeros(150, dtype=torch.long))
    q, k, v, g, beta = model.q, model.k, model.v, model.g, model.beta
    pool, slot = torch.zeros(1, 4, 16, 24, dtype=dtype), torch.tensor([0])
    o = [
        decode_gated_delta_rule(
            *(t[:, i : i + 1] for t in (q, k, v, g, beta)), pool, slot, slot, use_qk_l2norm_in_kernel=True,
            state_v_first=False,
        )
        for i in range(150)
    ]  # fmt: skip
    wide = [t.double() for t in (q, k, v, g, beta)]
    for t in wide[:2]:
        t *= torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6)
    truth, _ = recurrent(*wide)
    error = relative_error(torch.cat(o, 1)[:, 75:], truth[:, 75:])
    assert found.errors[str(dtype).removeprefix("torch.")] == pytest.approx(error, rel=1e-3)


def test_error_at_rest_is_that_of_the_ops():
    """The state after 75 tokens is kept in int8 and restored, and 75 tokens follow in a float32 pool."""
    model = Rule()
    (found,) = measure_states(model, torch.zeros(150, dtype=torch.long))
    x = model.q, model.k, model.v, model.g, model.beta
    first, rest = ([t[:, part] for t in x] for part in (slice(75), slice(75, None)))
    options = {"use_qk_l2norm_in_kernel": True}
    _, S = chunk_gated_delta_rule(*first, output_final_state=True, **options)
    slot, store = torch.tensor([0]), Int8States(S.to(torch.int8), torch.empty(1, 4, 16, 1))
    quantize_states(S, slot, store, slot)
    dequantize_states(store, slot, S, slot)
    o, _ = chunk_gated_delta_rule(*rest, initial_state=S, **options)
    wide = [t.double() for t in x]
    for t in wide[:2]:
        t *= torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6)
    truth, _ = recurrent(*wide)
    assert found.errors["int8 at rest"] == pytest.approx(relative_error(o, truth[:, 75:]), rel=1e-3)
    assert found.errors["float32"] < found.errors["int8 at rest"] < found.errors["bfloat16"]


def test_sizes_of_states():
    model = Rule(64)
    model.g = torch.zeros(1, 64, 4)
    model.beta[:, 1:] = 0  # so one outer product stays
    model.v *= torch.tensor([1.0, 1.0, 1e-6, 0.0])[:, None]
    (found,) = measure_states(model, torch.zeros(64, dtype=torch.long))
    k, v = model.k[0, 0].double(), model.v[0, 0].double() * model.beta[0, 0, :, None]
    S = (k / k.norm(dim=-1, keepdim=True)).repeat_interleave(2, 0)[:, :, None] * v[:, None]
    assert found.largest == pytest.approx(float(S.abs().max()), rel=1e-5)
    assert found.typical == pytest.approx(float(S.square().mean().sqrt()), rel=1e-5)
    assert found.smallest == 0
    low = (S[2].abs() < 2.0**-14).float().mean() / 4  # of all heads, that of the third
    assert found.subnormal == pytest.approx(float(low), abs=0.02)


def test_a_run_of_ours(tmp_path):
    folder, path = save(hybrid(), tmp_path / "model"), tmp_path / "states.json"
    result = check("--states", folder, "--tokens", 100, "--json", path)
    assert result.exit_code == 0, result.output
    assert "float16: fits, largest |S|" in result.output
    found = json.loads(path.read_text())
    assert found["tokens"] == 100
    layers = [layer["layer"] for layer in found["layers"]]
    assert layers == ["model.layers.0.mixer", "model.layers.2.mixer"]
    assert [layer["op"] for layer in found["layers"]] == ["chunk_gated_delta_rule", "chunk_kda"]
    assert all(0 < layer["errors"]["float32"] < layer["errors"]["float16"] for layer in found["layers"])


def test_states_beyond_float16(tmp_path):
    result = check("--states", save(hybrid(growth=1e6), tmp_path), "--tokens", 100)
    assert result.exit_code == 1, result.output
    assert "float16: does not fit" in result.output
    assert "error inf of bfloat16's" in result.output


@pytest.mark.parametrize("family", ["qwen3_next", "olmo_hybrid", "kimi_linear"])
def test_models_of_transformers(family):
    if family not in tiny_transformers.FAMILIES:
        pytest.skip(f"this transformers has no {family}")
    with integration.enable():
        found = measure_states(tiny_transformers.build(family), torch.randint(37, (80,)))
    assert ["layers.0" in layer.layer for layer in found] == [True]
    assert 0 < found[0].errors["float32"] < 1e-4 < found[0].errors["bfloat16"]


def test_updates_of_a_product():
    torch.manual_seed(0)
    model = FlashDeltaForCausalLM(FlashDeltaConfig(**BYTES, mixer="gdp", num_householder=3))
    found = measure_states(model, torch.randint(256, (80,)))
    assert [layer.fits_half for layer in found] == [True] * 3


def test_a_text_of_the_users(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("ab " * 20)
    folder = save(hybrid(), tmp_path / "model")
    assert "text: expected at least 64 tokens, got 60" in check("--states", folder, "--text", text).output
    text.write_text("ab " * 30)
    result = check("--states", folder, "--text", text)
    assert result.exit_code == 0, result.output
    assert "90 tokens" in result.output


def test_models_that_cannot_be_followed(tmp_path, monkeypatch):
    assert "states: expected a model that transformers can load" in check("--states", tmp_path).output
    folder = save(hybrid(), tmp_path / "model")
    monkeypatch.setenv("FLASH_DELTA_BACKEND", "torch")
    result = check("--states", folder, "--tokens", 64)
    assert result.exit_code == 2
    assert "model: expected layers that call this library's ops and name no backend" in result.output


def test_options_apart():
    assert "full: expected no such option beside --states" in check("--states", "runs/demo", "--full").output
    assert "tokens: expected no such option without --states" in check("--tokens", 100).output


def stop_after(model):
    with recording(model) as calls:
        model(None, False)
        assert len(calls) == 1
        raise RuntimeError("stop")


def test_nothing_is_left_of_a_recording():
    model = Rule()
    with pytest.raises(RuntimeError, match="stop"):
        stop_after(model)
    assert "recorder" not in names()
    assert not recorder._calls
    assert not recorder._running
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
