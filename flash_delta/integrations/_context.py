"""Models of transformers on one rank's part of a row. It does what a ``cp_context`` needs around the ops.

A model passes its ``**kwargs`` to its layers. There the short convolutions and the rules read ``cp_context``. So does
the implementation of softmax attention that is registered here. Other implementations would see only this rank's
tokens.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor, nn

from flash_delta.modules import causal_conv1d
from flash_delta.parallel import ContextParallel

ATTENTION = "gathered_keys"
CACHE_NAMES = ("cache", "past_key_values")  # the name of the cache since transformers 5.24, and before


def register_attention() -> None:
    """Registers `attention` for ``set_attn_implementation``. transformers makes no mask for it."""
    import_module("transformers").AttentionInterface.register(ATTENTION, attention)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cp_context: ContextParallel | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """This rank's queries [1, H, T, K] with the keys and values of all ranks -> [1, T, H, V]."""
    if cp_context is None:
        raise ValueError(f"cp_context: expected a ContextParallel with the attention {ATTENTION!r}, got None")
    if sliding_window is not None:
        raise ValueError(f"sliding_window: expected None with cp_context, got {sliding_window}")
    return cp_context.attend(query, key, value, dropout_p=dropout, scale=scaling).transpose(1, 2), None


def convolve(
    context: ContextParallel, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """The convolution of x [1, T, D], which continues after the inputs of earlier ranks."""
    halo = context.halo((x,), None, weight.shape[-1])
    (x,), (state,) = halo.wait()
    return causal_conv1d(x, weight, bias, activation, state, cu_seqlens=context.local_bounds(x.device))[0]


def with_context(model: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """A model's arguments, with added positions of this rank's tokens in their sequences."""
    context = given["cp_context"]
    if not isinstance(context, ContextParallel):
        raise ValueError(f"cp_context: expected a flash_delta.parallel.ContextParallel, got {type(context).__name__}")
    for name in ("attention_mask", *CACHE_NAMES, "cu_seq_lens_q", "seq_idx"):
        if given.get(name) is not None:
            raise ValueError(f"{name}: expected None with cp_context, got a {type(given[name]).__name__}")
    if given.get("use_cache"):
        raise ValueError("use_cache: expected False with cp_context (a rank has its own sequences only), got True")
    kinds = {*(getattr(model.config, "layer_types", None) or ("full_attention",))} - {"linear_attention"}
    if kinds and model.config._attn_implementation != ATTENTION:
        got = model.config._attn_implementation
        raise ValueError(
            f"cp_context: expected a model after set_attn_implementation({ATTENTION!r}) (attention needs the keys of "
            f"all ranks), got {got!r}"
        )
    tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    if tokens is not None and tokens.shape[:2] != (1, context.tokens):
        expected = f"this rank's tokens [1, {context.tokens}]"
        raise ValueError(f"input_ids: expected {expected} with cp_context, got shape {list(tokens.shape[:2])}")
    if given.get("position_ids") is None and tokens is not None:
        given = given | {"position_ids": context.positions(tokens.device)}
    return given | {"use_cache": False}
