"""Layers of fla that run as one op between their projections (_mixing.py).

With a cache, padding, or few tokens without gradients, a layer's own forward runs, and its functions are ours where
they can be (table.py). This holds for layers that we do not know, too.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import cache, partial, wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from flash_delta.integrations._mixing import Form, digest, mix_layer, mixes
from flash_delta.integrations._report import Replaced
from flash_delta.integrations.fla.takeover.door import CPU, SWITCH
from flash_delta.ops import chunk_gated_delta_rule, chunk_kda, explain

FEW = 64  # tokens up to which fla's layers walk token by token, if there are no gradients
UNMIXED = "attention_mask", "past_key_values"

_form = partial(
    Form, convolutions=("q_conv1d", "k_conv1d", "v_conv1d"), norm="o_norm", eps="eps", out="o_proj",
    sizes=("num_heads", "num_v_heads", "head_k_dim", "head_v_dim"),
)  # fmt: skip
_TOKENS = tuple(((f"{name}_proj",), (name,)) for name in "qkv")
_BETA = (("b_proj",), ("beta",))
GDN = _form((*_TOKENS, (("g_proj",), ("z",)), (("a_proj",), ("g",)), _BETA), helper="_use_fused_qkv_conv")
KDA = _form((*_TOKENS, _BETA, (("f_proj",), ("g",)), (("g_proj",), ("z",))), gate="channel")

LAYERS = (("gated_deltanet", "GatedDeltaNet"), ("kda", "KimiDeltaAttention"))
FORMS = {  # by the digest of a forward function, in fla 0.5.2 and 0.6.0
    "77b3f02a2182662f": GDN, "c3683941f4ba6e89": GDN,
    "1eec90c03718536e": KDA, "fc5dedde41cb3d29": KDA,
}  # fmt: skip


def take_layers() -> list[Replaced]:
    """Replaces the forward functions that we know."""
    found = []
    for module, name in LAYERS:
        try:
            cls = getattr(import_module(f"fla.layers.{module}"), name, None)
        except ModuleNotFoundError:
            continue
        form = None if cls is None else FORMS.get(digest(cls.forward))
        if form is not None:
            found.append(Replaced(cls, "forward", cls.forward, _mixing(cls.forward, form)))
            cls.forward = found[-1].new
    return found


def leave_layers(taken: list[Replaced]) -> None:
    """Restores forward functions, except where other code has put its own since then."""
    for entry in taken:
        if vars(entry.owner).get(entry.name) is entry.new:
            setattr(entry.owner, entry.name, entry.old)


def _mixing(forward: Callable[..., Any], form: Form) -> Callable[..., Any]:
    names = tuple(inspect.signature(forward).parameters)[1:]  # without self

    @wraps(forward)
    def call(self, *args, **kwargs):
        given = dict(zip(names, args, strict=False)) | kwargs
        x, theirs = given["hidden_states"], os.environ.get(SWITCH) == "0"
        few = x.shape[1] <= FEW and not torch.is_grad_enabled()
        if theirs or few or any(given.get(name) is not None for name in UNMIXED) or given.get("use_cache"):
            return forward(self, *args, **kwargs)
        if not (_is_usual(self) and mixes(self, form, forward) and _has_kernels(self, form, x)):
            return forward(self, *args, **kwargs)
        return mix_layer(self, form, x, given.get("cu_seqlens")), None, None

    call.of_functions = forward
    call.__module__, call.__qualname__ = __name__, f"mixing({forward.__qualname__})"
    return call


def _is_usual(layer: nn.Module) -> bool:
    if not (layer.mode == "chunk" and layer.use_short_conv and getattr(layer, "use_gate", True)):
        return False
    bounded = getattr(layer, "safe_gate", False) or getattr(layer, "lower_bound", None) is not None
    convolutions = layer.q_conv1d, layer.k_conv1d, layer.v_conv1d
    return not bounded and all(c.activation == "silu" and c.backend == "triton" for c in convolutions)


def _has_kernels(layer: nn.Module, form: Form, x: Tensor) -> bool:
    """Whether our kernels compute the rule. Where PyTorch would, fla's kernels are faster on a GPU."""
    if x.device == CPU or torch.compiler.is_compiling():
        return True
    sizes = layer.num_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    return _rule_has_kernels(x.device, dtype, form.gate, *sizes)


@cache
def _rule_has_kernels(device: torch.device, dtype: torch.dtype, gate: str, H: int, HV: int, K: int, V: int) -> bool:
    new = partial(torch.empty, dtype=dtype, device=device)
    g = new(1, FEW, HV, *([K] if gate == "channel" else []))
    rule = chunk_kda if gate == "channel" else chunk_gated_delta_rule
    found = explain(rule, q=new(1, FEW, H, K), k=new(1, FEW, H, K), v=new(1, FEW, HV, V), g=g, beta=new(1, FEW, HV))
    return found.backend not in (None, "torch")
