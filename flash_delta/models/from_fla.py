"""Models of fla (flash-linear-attention) as ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

from flash_delta.models.configuration import FlashDeltaConfig
from flash_delta.models.heads import FlashDeltaForCausalLM

EMBEDDINGS = "model.embeddings.weight"
NAMES = {"model.embeddings.": "model.embed_tokens.", ".attn_norm.": ".mixer_norm.", ".attn.": ".mixer."}  # fla's: ours


class Kind(NamedTuple):
    """A model type of fla. Its fields have fla's defaults, which `config.json` of an older fla may rely on."""

    mixer: str
    same: dict[str, Any]  # fields that a FlashDeltaConfig has under the same name
    converted: dict[str, Any]  # fields that become others
    fixed: dict[str, tuple[Any, ...]]  # fields, and the values that our layers compute; fla's default comes first
    unread: frozenset[str] = frozenset()  # fields that change nothing in what fla computes


SAME = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "conv_size": 4,
    "norm_eps": 1e-6,
    "allow_neg_eigval": False,
    "initializer_range": 0.02,
    "use_cache": True,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONVERTED = {"hidden_ratio": 4, "intermediate_size": None, "attn": None}
FIXED = {"hidden_act": ("swish",), "use_short_conv": (True,), "use_l2warp": (False,), "attnres_block_size": (None,)}
# How fla computes: one of two ways, fused kernels, how many rotations it makes in advance.
UNREAD = {"attn_mode", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy", "max_position_embeddings"}
# Of an attention layer. Ours have no bias and no window.
ATTENTION = {"layers", "num_heads", "num_kv_heads", "qkv_bias", "window_size", "rope_theta"}

KINDS = {
    "gated_deltanet": Kind(
        "gdn",
        {**SAME, "num_hidden_layers": 21, "num_heads": 6, "num_v_heads": None, "head_dim": 256, "expand_v": 2.0},
        CONVERTED,
        {**FIXED, "use_gate": (True,), "output_gate_activation": ("swish", "silu")},
        frozenset({*UNREAD, "fuse_linear_cross_entropy"}),
    ),
    "kda": Kind(
        "kda",
        {**SAME, "num_hidden_layers": 24, "num_heads": 16, "num_v_heads": None, "head_dim": 128, "expand_v": 1.0}
        | {"lower_bound": None},
        CONVERTED,
        FIXED,
        frozenset({*UNREAD, "safe_gate"}),  # of kernels; a bounded gate is bounded without it
    ),
    "gated_deltaproduct": Kind(
        "gdp",
        {**SAME, "num_hidden_layers": 21, "num_heads": 6, "head_dim": 256, "expand_v": 2.0}
        | {"num_householder": 1, "use_forget_gate": False},
        CONVERTED,
        {**FIXED, "use_output_gate": (True,)},
        frozenset({*UNREAD, "fuse_linear_cross_entropy"}),
    ),
    "delta_net": Kind(
        "delta_net",
        {**SAME, "num_hidden_layers": 24, "num_heads": 16},
        {**CONVERTED, "expand_k": 1.0, "expand_v": 1.0},
        {**FIXED, "use_gate": (False,), "use_beta": (True,), "qk_norm": ("l2",), "qk_activation": ("silu",)},
        frozenset({*UNREAD, "fuse_linear_cross_entropy", "use_output_norm"}),  # the last is for no layer of fla
    ),
}


def from_fla(folder: str | Path) -> FlashDeltaForCausalLM:
    """Load a whole model of fla from the folder that its ``save_pretrained`` wrote. fla need not be installed.

    The model computes fla's logits, with ``A_log`` and ``dt_bias`` in float32 and all other parameters in the dtype of
    the folder's embeddings. ``save_pretrained`` then writes it as a model of ours. docs/fla.md lists every field of
    fla's configurations.

    Args:
        folder: a folder with ``config.json`` and ``*.safetensors`` of a GatedDeltaNetForCausalLM, a KDAForCausalLM, a
            GatedDeltaProductForCausalLM or a DeltaNetForCausalLM, of which some layers may be attention.

    Raises:
        FileNotFoundError: if the folder lacks ``config.json``, or has no ``*.safetensors``.
        ValueError: if it has another model, a field that fla 0.6.0 does not have or whose value our layers do not
            compute, or tensors that do not fit.

    Example:
        >>> from flash_delta.models import from_fla
        >>> model = from_fla("fla-model")  # doctest: +SKIP
        >>> model.save_pretrained("our-model")  # doctest: +SKIP

    Source: the models of fla 0.6.0, ``fla.models``.
    """
    folder = Path(folder)
    config, tensors = _read_config(folder), _read_tensors(folder)
    model, found = FlashDeltaForCausalLM.from_pretrained(
        None,
        config=config,
        state_dict={_our_name(name): tensor for name, tensor in tensors.items()},
        dtype=tensors[EMBEDDINGS].dtype,
        ignore_mismatched_sizes=True,  # they are refused with the others
        output_loading_info=True,
    )
    if wrong := {name: sorted(keys)[:3] for name, keys in found.items() if keys}:
        raise ValueError(f"folder: expected the tensors that {folder}/config.json describes, got among others {wrong}")
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _our_name(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"folder: expected *.safetensors in it, got {folder} without any")
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    if EMBEDDINGS not in tensors:
        raise ValueError(f"folder: expected a tensor {EMBEDDINGS} in {folder}, got {sorted(tensors)[:3]} and so on")
    return tensors


def _read_config(folder: Path) -> FlashDeltaConfig:
    file = folder / "config.json"
    if not file.exists():
        raise FileNotFoundError(f"folder: expected config.json in it, got {folder} without one")
    given = json.loads(file.read_text(encoding="utf-8"))
    kind = KINDS.get(given.get("model_type"))
    if kind is None:
        raise ValueError(f"model_type: expected one of {', '.join(KINDS)} in {file}, got {given.get('model_type')!r}")
    known = {*kind.same, *kind.converted, *kind.fixed, *kind.unread}
    common = {*PreTrainedConfig().to_dict(), "torch_dtype", "auto_map"}  # what any model of transformers may have
    if unknown := sorted(given.keys() - known - common):
        expected = "only fields of fla 0.6.0 (if these change nothing, remove them)"
        raise ValueError(f"{unknown[0]}: expected {expected} in {file}, got {unknown}")
    for name, values in kind.fixed.items():
        if given.get(name, values[0]) not in values:
            expected = " or ".join(map(repr, values))
            raise ValueError(f"{name}: expected {expected}, which our layers compute, got {given[name]!r}")
    if given.get("safe_gate") and given.get("lower_bound") is None:
        raise ValueError("lower_bound: expected a number with safe_gate=True, got None")
    sizes = {name: given.get(name, default) for name, default in kind.same.items()}
    ours = _converted(kind, {**kind.converted, **given}, sizes)
    if "gdp" not in ours["mixers"]:  # all layers may be attention
        sizes.pop("use_forget_gate", None)
    return FlashDeltaConfig(**sizes, **ours)


def _converted(kind: Kind, given: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """The other fields of ours."""
    width = given["intermediate_size"]
    if width is None:  # as fla does it
        ratio = 4 if given["hidden_ratio"] is None else given["hidden_ratio"]
        width = -(-int(sizes["hidden_size"] * ratio * 2 / 3) // 256) * 256
    ours = {"intermediate_size": width, **_attention(kind.mixer, given["attn"], sizes["num_hidden_layers"])}
    if kind.mixer == "delta_net":
        keys = sizes["hidden_size"] * given["expand_k"] / sizes["num_heads"]
        if not keys.is_integer():
            raise ValueError(f"expand_k: expected heads of a whole width, got {given['expand_k']}, for {keys} channels")
        ours |= {"head_dim": int(keys), "expand_v": given["expand_v"] / given["expand_k"]}
    return ours


def _attention(mixer: str, attn: dict[str, Any] | list[dict[str, Any]] | None, layers: int) -> dict[str, Any]:
    """Which layers are softmax attention, and their sizes: fla's field ``attn`` has one or several groups of layers."""
    groups = [] if attn is None else [attn] if isinstance(attn, dict) else attn
    mixers, sizes = [mixer] * layers, set()
    for group in groups:
        got = group | {"qkv_bias": group.get("qkv_bias") or False}
        if unknown := sorted(got.keys() - ATTENTION):
            raise ValueError(f"attn: expected fields among {sorted(ATTENTION)}, got {unknown}")
        if missing := sorted({"layers", "num_heads"} - got.keys()):
            raise ValueError(f"attn: expected layers and num_heads, got a group without {' and '.join(missing)}")
        if got["qkv_bias"] or got.get("window_size") is not None:
            raise ValueError(f"attn: expected no qkv_bias and no window_size, which our attention lacks, got {group}")
        if not set(got["layers"]) <= set(range(layers)):
            raise ValueError(f"attn: expected layers among 0 to {layers - 1}, got {got['layers']}")
        for layer in got["layers"]:
            mixers[layer] = "attention"
        sizes.add((got["num_heads"], got.get("num_kv_heads") or got["num_heads"], got.get("rope_theta", 10000.0)))
    if len(sizes) > 1:
        raise ValueError(f"attn: expected attention layers with one number of heads and one rope_theta, got {attn}")
    names = "num_attention_heads", "num_key_value_heads", "rope_theta"
    return {"mixers": mixers} | {name: size for each in sizes for name, size in zip(names, each, strict=True)}
