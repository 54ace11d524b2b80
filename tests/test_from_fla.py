"""`from_fla` without fla: what it reads, and what it refuses. tests/engines/test_fla_models.py compares with fla."""

import json

import pytest
import torch
from safetensors.torch import save_file

from flash_delta.models import FlashDeltaConfig, FlashDeltaForCausalLM, from_fla

SIZES = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_heads": 2}
MODELS = {
    "gated_deltanet": ({"head_dim": 8, "expand_v": 2.0, "norm_eps": 1e-6}, {"mixer": "gdn"}),
    "delta_net": ({"norm_eps": 1e-6}, {"mixer": "delta_net", "head_dim": 8}),
}


def fla_names(model):
    """The state dict with the names of fla."""
    names = {".embed_tokens.": ".embeddings.", ".mixer_norm.": ".attn_norm.", ".mixer.": ".attn."}
    tensors = {}
    for name, tensor in model.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        tensors[name] = tensor.contiguous()
    return tensors


def write(folder, model_type="gated_deltanet", dtype=torch.float32, **fields):
    """A folder as fla writes it, and the model in it. The fields are more of fla's configuration."""
    theirs, ours = MODELS[model_type]
    torch.manual_seed(0)
    model = FlashDeltaForCausalLM(FlashDeltaConfig(**SIZES | theirs | ours)).to(dtype).eval()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **SIZES, **theirs, **fields}))
    save_file(fla_names(model), folder / "model.safetensors")
    return model


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_keep_their_bits(model_type, dtype, tmp_path):
    """`A_log` and `dt_bias` are float32, whatever the rest is. What is saved has our names."""
    expected = write(tmp_path / "theirs", model_type, dtype)
    from_fla(tmp_path / "theirs").save_pretrained(tmp_path / "ours")
    found, loading = FlashDeltaForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(loading.values())
    assert found.config.model_type == "flash_delta"
    for (name, a), (same, b) in zip(expected.named_parameters(), found.named_parameters(), strict=True):
        assert name == same
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name
        assert b.dtype == (torch.float32 if name.endswith(("A_log", "dt_bias")) else dtype), name


def test_several_files_and_the_settings_of_generate(tmp_path):
    model = write(tmp_path)
    tensors = list(fla_names(model).items())
    for i, part in enumerate((tensors[:7], tensors[7:])):
        save_file(dict(part), tmp_path / f"model-0000{i + 1}-of-00002.safetensors")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.7, "do_sample": true, "eos_token_id": 5}')
    found = from_fla(tmp_path)
    ids = torch.arange(9)[None]
    assert torch.equal(found(ids).logits, model(ids).logits)
    assert (found.generation_config.temperature, found.generation_config.eos_token_id) == (0.7, 5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_rope": True}, r"use_rope: expected only fields of fla 0.6.0 .*, got \['use_rope'\]"),
        ({"use_gate": False}, "use_gate: expected True, which our layers compute, got False"),
        ({"output_gate_activation": "sigmoid"}, "output_gate_activation: expected 'swish' or 'silu', .*'sigmoid'"),
        ({"use_short_conv": False}, "use_short_conv: expected True"),
        ({"use_l2warp": True}, "use_l2warp: expected False"),
        ({"hidden_act": "powlu"}, "hidden_act: expected 'swish', which our layers compute, got 'powlu'"),
        ({"attnres_block_size": 2}, "attnres_block_size: expected None"),
        ({"attn": {"layers": [1], "num_heads": 2, "window_size": 8}}, "attn: expected no qkv_bias and no window_size"),
        ({"attn": {"layers": [1], "num_heads": 2, "qkv_bias": True}}, "attn: expected no qkv_bias and no window_size"),
        ({"attn": {"layers": [2], "num_heads": 2}}, r"attn: expected layers among 0 to 1, got \[2\]"),
        ({"attn": {"layers": [1], "num_heads": 2, "qk_norm": True}}, r"attn: expected fields among .*\['qk_norm'\]"),
        (
            {"attn": [{"layers": [0], "num_heads": 2}, {"layers": [1], "num_heads": 4}]},
            "attn: expected attention layers with one number of heads",
        ),
        ({"attn": {"layers": [1], "num_heads": 2}}, "folder: expected the tensors that .*mismatched_keys"),
        ({"num_hidden_layers": 3}, "folder: expected the tensors that .*missing_keys"),
        ({"num_hidden_layers": 1}, "folder: expected the tensors that .*unexpected_keys"),
        ({"intermediate_size": None}, "folder: expected the tensors that .*mismatched_keys"),
    ],
)
def test_what_our_models_cannot_be_is_refused(fields, message, tmp_path):
    write(tmp_path, **fields)
    with pytest.raises(ValueError, match=message):
        from_fla(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"qk_norm": "sum"}, "qk_norm: expected 'l2'"),
        ({"use_gate": True}, "use_gate: expected False"),
        ({"head_dim": 8}, "head_dim: expected only fields of fla 0.6.0"),
        ({"expand_k": 0.3}, "expand_k: expected heads of a whole width, got 0.3"),
    ],
)
def test_what_our_delta_net_cannot_be_is_refused(fields, message, tmp_path):
    write(tmp_path, "delta_net", **fields)
    with pytest.raises(ValueError, match=message):
        from_fla(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gla"}, "model_type: expected one of gated_deltanet, kda, .*, got 'gla'"),
        ({}, "model_type: expected one of gated_deltanet, kda, .*, got None"),
        ({"model_type": "kda", "safe_gate": True}, "lower_bound: expected a number with safe_gate=True, got None"),
    ],
)
def test_what_is_no_model_of_fla(config, message, tmp_path):
    write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        from_fla(tmp_path)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"folder: expected config\.json in it"):
        from_fla(tmp_path)
    write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model.bin")
    with pytest.raises(FileNotFoundError, match=r"folder: expected \*\.safetensors in it"):
        from_fla(tmp_path)
    save_file({"weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"folder: expected a tensor model\.embeddings\.weight"):
        from_fla(tmp_path)
