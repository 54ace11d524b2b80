"""Layers of transformers that run as one op between their projections (_mixing.py).

With a cache or a ``cp_context``, a layer's own forward runs on this library's functions, as it does in
layers that we do not know. A cache that records its past gets what a crop needs (rollback.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial, wraps
from types import ModuleType
from typing import Any

from flash_delta.integrations._mixing import Form, digest, mix_layer, mixes
from flash_delta.integrations.transformers.rollback import record

_form = partial(
    Form, convolutions=("conv1d",), norm="norm", eps="variance_epsilon", out="out_proj",
    sizes=("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim"),
)  # fmt: skip
QWEN3_NEXT = _form(
    ((("in_proj_qkvz",), ("q", "k", "v", "z")), (("in_proj_ba",), ("beta", "g"))), by_key_head=True,
    helper="fix_query_key_value_ordering",
)  # fmt: skip
QWEN3_5 = _form(  # and Qwen4-Exp, Lara-mini
    (
        (("in_proj_qkv",), ("q", "k", "v")),
        (("in_proj_z",), ("z",)),
        (("in_proj_a",), ("g",)),
        (("in_proj_b",), ("beta",)),
    )
)
_APART = tuple(
    ((f"{module}_proj",), (name,))
    for module, name in (("q", "q"), ("k", "k"), ("v", "v"), ("g", "z"), ("a", "g"), ("b", "beta"))
)
OLMO_HYBRID = _form(_APART, norm="o_norm", out="o_proj")
KIMI_LINEAR = _form(  # and GLM-5-Next
    (
        *_APART[:3],
        (("b_proj",), ("beta",)),
        (("forget_gate.f_a_proj", "forget_gate.f_b_proj"), ("g",)),
        (("g_a_proj", "g_b_proj"), ("z",)),
    ),
    norm="o_norm", out="o_proj", sizes=("num_heads", "num_heads", "head_dim", "head_dim"), gate="channel",
    gate_module="forget_gate", lower_bound="safe_gate_lower_bound",
)  # fmt: skip

# By the digest of a forward function, in transformers 5.17.0, 5.23.0 and 5.24.0.
FORMS = {
    "fc80496fd00b7992": QWEN3_NEXT, "177c5d3df989a7b4": QWEN3_NEXT, "d97f22719fb58479": QWEN3_NEXT,
    "bd25761e1031fff0": QWEN3_5, "8f31ae7d35daf534": QWEN3_5, "08cf65a63ca582a2": QWEN3_5,
    "abef7c9baf57573d": KIMI_LINEAR, "e696ac62c104e9c6": KIMI_LINEAR, "18a6676bcbf5260a": KIMI_LINEAR,
    "2cf524e0f1f4b609": OLMO_HYBRID, "167004f14399b33e": OLMO_HYBRID, "bc540b7a213f93d0": OLMO_HYBRID,
}  # fmt: skip


GATES = "f855c68f8a68417b", "519132022b862dc7"  # of Kimi-Linear and GLM-5-Next


def form_of(cls: Any, module: ModuleType) -> Form | None:
    """The form of a layer's class of ``module``, if its source is known."""
    if not _is_own(cls, module):
        return None
    form = FORMS.get(digest(getattr(cls.forward, "of_functions", cls.forward)))
    if form is None or form.gate_module is None:
        return form
    forwards = [gate.forward for gate in vars(module).values() if _is_own(gate, module)]
    return form._replace(gate_forwards=tuple(forward for forward in forwards if digest(forward) in GATES))


def _is_own(cls: Any, module: ModuleType) -> bool:
    return inspect.isclass(cls) and cls.__module__ == module.__name__ and "forward" in vars(cls)


def mixing(forward: Callable[..., Any], form: Form) -> Callable[..., Any]:
    """Wraps the ``forward`` of such a layer. Does not wrap it twice."""
    return _mixing(getattr(forward, "of_functions", forward), form)


@cache
def _mixing(forward: Callable[..., Any], form: Form) -> Callable[..., Any]:
    names = tuple(inspect.signature(forward).parameters)[1:]  # without self

    @wraps(forward)
    def call(self, *args, **kwargs):
        given = dict(zip(names, args, strict=False)) | kwargs
        states = given.get("cache", given.get("cache_params"))  # its name since transformers 5.24, and before
        if states is not None:
            layer = states.layers[self.layer_idx]
            if getattr(layer, "record_past", False):
                return record(forward, self, given, layer)
            vars(layer).pop("replay", None)
            return forward(self, *args, **kwargs)
        bounds, mask, x = given.get("cu_seq_lens_q"), given.get("attention_mask"), given["hidden_states"]
        apart = bounds is None and given.get("seq_idx") is not None
        known = self.activation in ("silu", "swish") and mixes(self, form, forward)
        if not known or apart or given.get("cp_context") is not None:
            return forward(self, *args, **kwargs)
        x = x if mask is None else (x * mask[:, :, None]).to(x.dtype)
        return mix_layer(self, form, x, bounds)

    call.of_functions = forward
    call.__module__, call.__qualname__ = __name__, f"mixing({forward.__qualname__})"
    return call
