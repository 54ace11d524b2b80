"""Layers of other libraries between whose projections one op does everything.

Such a layer's forward pass is replaced if its source is one that we have read. Then q, k, v, z and gates are read where
the projections put them, without the copies and concatenations of the layer's own code.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flash_delta.layers._plain import Projection, is_plain, project
from flash_delta.modules.norm import ACTIVATIONS
from flash_delta.ops.mixer import Layout, mix


class Form(NamedTuple):
    """The names of a layer's parts."""

    projections: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]  # modules one after the other; what they project
    convolutions: tuple[str, ...]
    norm: str
    eps: str
    out: str
    sizes: tuple[str, str, str, str]  # H, HV, K, V
    gate: str = "scalar"
    by_key_head: bool = False
    helper: str | None = None  # a method that the forward pass calls, which a subclass might replace
    gate_module: str | None = None  # the module that has A_log and dt_bias, if it is not the layer
    gate_forwards: tuple[Callable[..., Any], ...] = ()  # the forward functions of that module that we know
    lower_bound: str | None = None  # the attribute of modules that have a bound


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
    gate = layer if form.gate_module is None else getattr(layer, form.gate_module)
    parts = [*convolutions, norm]
    parameters = *(part.weight for part in parts), gate.A_log, gate.dt_bias
    if gate is not layer:
        if not is_plain(gate) or not any(type(gate).forward is known for known in form.gate_forwards):
            return False
        bound = _lower_bound(gate, form)
        if bound is not None and not -5 <= bound < 0:
            return False
    if any(c.bias is not None for c in convolutions) or not all(is_plain(part) for part in parts):
        return False
    return not any(isinstance(t, DTensor) for t in parameters)


def mix_layer(layer: nn.Module, form: Form, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The layer's output for x [B, T, D]."""
    projections = [Projection(parts, [attrgetter(path)(layer) for path in paths]) for paths, parts in form.projections]
    projected, sources = project(projections, x, jointly=not form.by_key_head)
    norm, taps = getattr(layer, form.norm), [getattr(layer, name).weight for name in form.convolutions]
    gate = layer if form.gate_module is None else getattr(layer, form.gate_module)
    y = mix(
        projected,
        taps if len(taps) > 1 else taps[0],
        gate.A_log.flatten(),
        gate.dt_bias,
        norm.weight,
        layout=Layout.adjoining(*(getattr(layer, name) for name in form.sizes), sources, form.gate, form.by_key_head),
        gate=form.gate,
        norm_eps=getattr(norm, form.eps),
        norm_activation=ACTIVATIONS[norm.activation],
        lower_bound=_lower_bound(gate, form),
        allow_neg_eigval=getattr(layer, "allow_neg_eigval", False),
        cu_seqlens=cu_seqlens,
    )
    return getattr(layer, form.out)(y)


def _lower_bound(gate: nn.Module, form: Form) -> float | None:
    return None if form.lower_bound is None else getattr(gate, form.lower_bound, None)
