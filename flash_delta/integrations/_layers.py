"""Layers of transformers between whose projections one op does everything.

A layer's forward pass is replaced if its source is one that we have read. Then q, k, v, z and gates are read where the
projections put them, without the copies and concatenations of the model's code. With a cache, and for the arguments in
`UNMIXED`, the layer's own forward runs on this library's functions, as it does in layers that we do not know.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flash_delta.layers._plain import is_plain, project_jointly
from flash_delta.modules.norm import ACTIVATIONS
from flash_delta.ops.mixer import NAMES, Layout, mix

UNMIXED = "cache_params", "cache", "cp_context"


class Form(NamedTuple):
    """What a layer calls its parts, and what each projection has."""

    projections: tuple[str, ...]
    sources: tuple[tuple[str, ...], ...]
    by_key_head: bool = False
    norm: str = "norm"
    out: str = "out_proj"
    helper: str | None = None  # a method that the forward pass calls, which a subclass might replace


QWEN3_NEXT = Form(
    ("in_proj_qkvz", "in_proj_ba"), (("q", "k", "v", "z"), ("beta", "g")), True, helper="fix_query_key_value_ordering"
)
QWEN3_5 = Form(
    ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"), (("q", "k", "v"), ("z",), ("g",), ("beta",))
)  # and MoE, Qwen4-Exp, Lara-mini
OLMO_HYBRID = Form(
    ("q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj"), tuple((name,) for name in NAMES), False, "o_norm",
    "o_proj",
)  # fmt: skip

# By the start of the SHA-256 of a forward function's source, in transformers 5.17.0, 5.23.0 and 5.24.0.
FORMS = {
    "fc80496fd00b7992": QWEN3_NEXT, "177c5d3df989a7b4": QWEN3_NEXT, "d97f22719fb58479": QWEN3_NEXT,
    "bd25761e1031fff0": QWEN3_5, "8f31ae7d35daf534": QWEN3_5, "08cf65a63ca582a2": QWEN3_5,
    "2cf524e0f1f4b609": OLMO_HYBRID, "167004f14399b33e": OLMO_HYBRID, "bc540b7a213f93d0": OLMO_HYBRID,
}  # fmt: skip


def form_of(cls: Any, module: str) -> Form | None:
    """The form of a layer's class of ``module``, if its source is known."""
    if not (inspect.isclass(cls) and cls.__module__ == module and "forward" in vars(cls)):
        return None
    return FORMS.get(digest(getattr(cls.forward, "of_functions", cls.forward)))


@cache
def digest(forward: Callable[..., Any]) -> str:
    """The start of the SHA-256 of a forward function's source; of no source ""."""
    try:
        source = inspect.getsource(inspect.unwrap(forward))
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def mixing(forward: Callable[..., Any], form: Form) -> Callable[..., Any]:
    """Wraps the ``forward`` of such a layer. Does not wrap it twice."""
    return _mixing(getattr(forward, "of_functions", forward), form)


@cache
def _mixing(forward: Callable[..., Any], form: Form) -> Callable[..., Any]:
    names = tuple(inspect.signature(forward).parameters)[1:]  # without self

    @wraps(forward)
    def call(self, *args, **kwargs):
        given = dict(zip(names, args, strict=False)) | kwargs
        bounds = given.get("cu_seq_lens_q")
        apart = bounds is None and given.get("seq_idx") is not None
        if apart or any(given.get(name) is not None for name in UNMIXED) or not _mixes(self, form, forward):
            return forward(self, *args, **kwargs)
        return _mix(self, form, given["hidden_states"], given.get("attention_mask"), bounds)

    call.of_functions = forward
    call.__module__, call.__qualname__ = __name__, f"mixing({forward.__qualname__})"
    return call


def _mixes(layer: nn.Module, form: Form, forward: Callable[..., Any]) -> bool:
    """Whether the parts that would not be called do what their classes say, and have whole weights."""
    if form.helper is not None and getattr(type(layer), form.helper).__module__ != forward.__module__:
        return False
    convolution, norm = layer.conv1d, getattr(layer, form.norm)
    activations = layer.activation in ("silu", "swish") and norm.activation in ACTIVATIONS
    if not activations or convolution.bias is not None or not (is_plain(convolution) and is_plain(norm)):
        return False
    parameters = convolution.weight, norm.weight, layer.A_log, layer.dt_bias
    return not any(isinstance(t, DTensor) for t in parameters)


def _mix(layer: nn.Module, form: Form, x: Tensor, mask: Tensor | None, bounds: Tensor | None) -> Tensor:
    if mask is not None:
        x = (x * mask[:, :, None]).to(x.dtype)
    projections = [getattr(layer, name) for name in form.projections]
    sources = form.sources
    projected = None if form.by_key_head else project_jointly(projections, x)
    if projected is None:
        projected = [projection(x) for projection in projections]
    else:
        sources = (tuple(name for names in sources for name in names),)
    sizes = layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    norm = getattr(layer, form.norm)
    y = mix(
        projected,
        layer.conv1d.weight,
        layer.A_log,
        layer.dt_bias,
        norm.weight,
        layout=Layout.adjoining(*sizes, sources, form.by_key_head),
        norm_eps=norm.variance_epsilon,
        norm_activation=ACTIVATIONS[norm.activation],
        allow_neg_eigval=getattr(layer, "allow_neg_eigval", False),
        cu_seqlens=bounds,
    )
    return getattr(layer, form.out)(y)
