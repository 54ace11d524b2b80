"""Layers of other libraries between whose projections one op does everything.

Such a layer's forward pass is replaced if its source is one that we have read. Then q, k, v, z and gates are read where
the projections put them, without the copies and concatenations of the layer's own code.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flash_delta.layers._plain import is_plain, project_jointly
from flash_delta.modules.norm import ACTIVATIONS
from flash_delta.ops.mixer import Layout, mix


class Form(NamedTuple):
    """What a layer calls its parts, and what each projection has."""

    projections: tuple[str, ...]
    sources: tuple[tuple[str, ...], ...]
    convolutions: tuple[str, ...]
    norm: str
    eps: str
    out: str
    key_heads: str
    gate: str = "scalar"
    by_key_head: bool = False
    helper: str | None = None  # a method that the forward pass calls, which a subclass might replace


@cache
def digest(forward: Callable[..., Any]) -> str:
    """The start of the SHA-256 of a forward function's source; of no source ""."""
    try:
        source = inspect.getsource(inspect.unwrap(forward))
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def mixes(layer: nn.Module, form: Form, forward: Callable[..., Any]) -> bool:
    """Whether the parts that would not be called do what their classes say, and have whole weights."""
    if form.helper is not None and getattr(type(layer), form.helper).__module__ != forward.__module__:
        return False
    convolutions, norm = [getattr(layer, name) for name in form.convolutions], getattr(layer, form.norm)
    if getattr(norm, "activation", None) not in ACTIVATIONS or norm.weight is None:
        return False
    parts = [*convolutions, norm]
    if any(c.bias is not None for c in convolutions) or not all(is_plain(part) for part in parts):
        return False
    parameters = *(part.weight for part in parts), layer.A_log, layer.dt_bias
    return not any(isinstance(t, DTensor) for t in parameters)


def mix_layer(layer: nn.Module, form: Form, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The layer's output for x [B, T, D]."""
    projections, sources = [getattr(layer, name) for name in form.projections], form.sources
    projected = None if form.by_key_head else project_jointly(projections, x)
    if projected is None:
        projected = [projection(x) for projection in projections]
    else:
        sources = (tuple([name for names in sources for name in names]),)
    sizes = getattr(layer, form.key_heads), layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    norm, taps = getattr(layer, form.norm), [getattr(layer, name).weight for name in form.convolutions]
    y = mix(
        projected,
        taps if len(taps) > 1 else taps[0],
        layer.A_log,
        layer.dt_bias,
        norm.weight,
        layout=Layout.adjoining(*sizes, sources, form.gate, form.by_key_head),
        gate=form.gate,
        norm_eps=getattr(norm, form.eps),
        norm_activation=ACTIVATIONS[norm.activation],
        allow_neg_eigval=getattr(layer, "allow_neg_eigval", False),
        cu_seqlens=cu_seqlens,
    )
    return getattr(layer, form.out)(y)
