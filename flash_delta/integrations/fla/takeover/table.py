"""The functions of fla that ours replace, and which of their calls ours take."""

from collections.abc import Callable, Mapping
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flash_delta.integrations.fla.calls import (
    chunk_comba,
    chunk_delta_rule,
    chunk_gated_delta_product,
    chunk_gated_delta_rule,
    chunk_gdn2,
    chunk_kda,
    chunk_simple_gla,
    fused_recurrent_comba,
    fused_recurrent_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn2,
    fused_recurrent_kda,
    fused_recurrent_simple_gla,
)
from flash_delta.integrations.fla.convolution import _flat, _silu, causal_conv1d, causal_conv1d_update
from flash_delta.integrations.fla.norms import l2norm, rms_norm, rms_norm_gated
from flash_delta.integrations.fla.passes import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
from flash_delta.integrations.fla.takeover.door import Refusal, Taken
from flash_delta.modules.norm import ACTIVATIONS
from flash_delta.ops import explain, fused_gdn_gate, fused_kda_gate
from flash_delta.ops._check.elementwise import describe_convolution, describe_gate, describe_norm, describe_token
from flash_delta.ops._elementwise import chosen
from flash_delta.ops._operators.elementwise import Convolved, Gated, Normalized


def _rule(op: Callable[..., Any]) -> Refusal:
    def refusal(**arguments: Any) -> str | None:
        found = explain(op, **arguments)
        if found.backend is None:
            return "; ".join(f"{name} {why}" for name, why in found.reasons.items())
        return _left_to_torch(found.backend, arguments["q"].device, found.reasons)

    return refusal


def _left_to_torch(backend: str, device: torch.device, reasons: Mapping[str, str] | None = None) -> str | None:
    """Why a call that would run in PyTorch stays with fla. On a GPU fla's kernels are faster. On a CPU fla has none."""
    if backend != "torch" or device.type == "cpu":
        return None
    why = "; ".join(f"{name} {why}" for name, why in (reasons or {}).items() if name != "torch")
    return f"only PyTorch's operations could run it{': ' if why else ''}{why}"


def _channels(op: Callable[..., Any], *sizes: int) -> Refusal:
    """``sizes``: those of chunks that fla takes. Ours take 16, 32 and 64."""
    rule = _rule(op)

    def refusal(**arguments: Any) -> str | None:
        if arguments.get("chunk_size", 64) not in sizes:
            return f"chunk_size: expected {' or '.join(map(str, sizes))}, got {arguments['chunk_size']}"
        read = arguments.get("use_gate_in_kernel") or arguments.get("safe_gate")
        if arguments.get("lower_bound") is not None and not read:
            return "lower_bound: fla does not read it here, and ours bounds the log decays"
        return rule(**arguments)

    return refusal


def _one_pass(q: Tensor, **arguments: Any) -> str | None:
    """Why a call stays with fla in both passes, or None. fla's backward pass cannot continue our forward pass."""
    if arguments.get("cp_context") is not None:
        return "cp_context: expected None"
    given = {name: arguments[name] for name in arguments.keys() & signature(chunk_gated_delta_rule).parameters}
    with torch.enable_grad():
        return _rule(chunk_gated_delta_rule)(q=q.detach().requires_grad_(), **given)


def _without_decay(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> str | None:
    if q.dtype != v.dtype:
        return f"o would have the dtype of v, {v.dtype}, in place of that of q, {q.dtype}"
    g = torch.empty(v.shape[:3], device=v.device)
    return _rule(fused_recurrent_gated_delta_rule)(q=q, k=k, v=v, g=g, **arguments)


def _forward_in_time(reverse: bool = False, **arguments: Any) -> str | None:
    return "reverse: expected False, got True" if reverse else _rule(chunk_simple_gla)(**arguments)


def _reading(ours: Callable[..., Any]) -> Callable[[Callable[[SimpleNamespace], str | None]], Refusal]:
    """Makes a refusal of a function of all arguments of ``ours``, those with defaults included."""
    arguments_of = signature(ours)

    def reading(why: Callable[[SimpleNamespace], str | None]) -> Refusal:
        def refusal(**arguments: Any) -> str | None:
            bound = arguments_of.bind(**arguments)
            bound.apply_defaults()
            return why(SimpleNamespace(**bound.arguments))

        return refusal

    return reading


@_reading(fused_gdn_gate)
def _gdn_gate(a: SimpleNamespace) -> str | None:
    fields = "fused_gdn_gate", ("scalar", True, None), a.output_dtype
    return _left_to_torch(chosen(describe_gate, Gated(a.g, a.A_log, a.dt_bias), *fields), a.g.device)


@_reading(fused_kda_gate)
def _kda_gate(a: SimpleNamespace) -> str | None:
    fields = "fused_kda_gate", ("channel", True, a.lower_bound), a.output_dtype
    return _left_to_torch(chosen(describe_gate, Gated(a.g, a.A_log, a.dt_bias), *fields), a.g.device)


@_reading(causal_conv1d)
def _convolution(a: SimpleNamespace) -> str | None:
    if a.backend != "triton":
        return f"backend: the call asks for {a.backend!r}"
    if a.cp_context is not None:
        return "cp_context: expected None"
    if (why := _taps_and_residual(a)) is not None:
        return why
    tensors = Convolved(_flat(a.x, a.weight), a.weight, a.bias, a.initial_state, a.cu_seqlens)
    fields = "causal_conv1d", _silu(a.activation), a.output_final_state
    return _left_to_torch(chosen(describe_convolution, tensors, *fields), a.x.device)


@_reading(causal_conv1d_update)
def _token(a: SimpleNamespace) -> str | None:
    if (why := _taps_and_residual(a)) is not None:
        return why
    rows = _flat(a.x, a.weight).reshape(-1, a.weight.shape[0])
    fields = "causal_conv1d_update", _silu(a.activation)
    return _left_to_torch(chosen(describe_token, Convolved(rows, a.weight, a.bias, a.cache), *fields), a.x.device)


def _taps_and_residual(a: SimpleNamespace) -> str | None:
    x, residual = a.x, a.residual
    if a.weight is None:
        return "weight: expected a tensor [D, W], got None"
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        return f"residual: expected {x.dtype} {list(x.shape)}, got {residual.dtype} {list(residual.shape)}"
    return None


@_reading(rms_norm)
def _norm(a: SimpleNamespace) -> str | None:
    if (why := _alone(a)) is not None:
        return why
    weight = a.x.new_empty(a.x.shape[-1]) if a.weight is None else a.weight
    return _left_to_torch(chosen(describe_norm, Normalized(a.x, weight), "rms_norm", None, a.eps), a.x.device)


@_reading(rms_norm_gated)
def _gated_norm(a: SimpleNamespace) -> str | None:
    if (why := _alone(a)) is not None:
        return why
    if a.activation not in ACTIVATIONS:
        return f"activation: expected one of {', '.join(ACTIVATIONS)}, got {a.activation!r}"
    weight = a.x.new_empty(a.x.shape[-1]) if a.weight is None else a.weight
    fields = "gated_rms_norm", ACTIVATIONS[a.activation], a.eps
    return _left_to_torch(chosen(describe_norm, Normalized(a.x, weight, a.g), *fields), a.x.device)


@_reading(l2norm)
def _l2norm(a: SimpleNamespace) -> str | None:
    weight = a.x.new_empty(a.x.shape[-1])
    return _left_to_torch(chosen(describe_norm, Normalized(a.x, weight), "l2norm", None, a.eps), a.x.device)


def _alone(a: SimpleNamespace) -> str | None:
    """Why a norm stays with fla. Ours take only the norm, since fla's kernel adds a residual without another pass."""
    if a.bias is not None:
        return "bias: expected None, got a tensor"
    if a.residual is not None or a.prenorm:
        return "residual, prenorm: expected None and False"
    return None


CHUNKED = ("chunk_size", "A_log", "dt_bias", "transpose_state_layout")
OLD = ("transpose_state_layout",)
GDN, GDN2, KDA = "ops.gated_delta_rule", "ops.gdn2", "ops.kda"
CONVOLUTION = "modules.causal_conv1d.ops"
TABLE = (
    Taken(
        chunk_gated_delta_rule,
        _rule(chunk_gated_delta_rule),
        (f"{GDN}.chunk",),
        "gated_delta_rule",
        (*CHUNKED, "use_gate_in_kernel"),
    ),
    Taken(
        fused_recurrent_gated_delta_rule,
        _rule(fused_recurrent_gated_delta_rule),
        (f"{GDN}.fused_recurrent",),
        keywords=OLD,
    ),
    Taken(chunk_gated_delta_rule_fwd, _one_pass, (f"{GDN}.chunk",)),
    Taken(chunk_gated_delta_rule_bwd, _one_pass, (f"{GDN}.chunk",)),
    Taken(fused_gdn_gate, _gdn_gate, (f"{GDN}.gate",)),
    Taken(chunk_kda, _channels(chunk_kda, 32, 64), (f"{KDA}.chunk",), "kda", CHUNKED),
    Taken(fused_recurrent_kda, _channels(fused_recurrent_kda, 64), (f"{KDA}.fused_recurrent",), keywords=OLD),
    Taken(chunk_gdn2, _channels(chunk_gdn2, 64), (f"{GDN2}.chunk",), keywords=CHUNKED),
    Taken(fused_recurrent_gdn2, _channels(fused_recurrent_gdn2, 64), (f"{GDN2}.fused_recurrent",), keywords=OLD),
    Taken(fused_kda_gate, _kda_gate, (f"{KDA}.gate",), "kda"),
    Taken(chunk_delta_rule, _rule(chunk_delta_rule), ("ops.delta_rule.chunk",), keywords=("chunk_size",)),
    Taken(fused_recurrent_delta_rule, _without_decay, ("ops.delta_rule.fused_recurrent",)),
    Taken(chunk_gated_delta_product, _rule(chunk_gated_delta_product), ("ops.gated_delta_product.chunk",)),
    Taken(chunk_comba, _rule(chunk_comba), ("ops.comba.chunk",)),
    Taken(fused_recurrent_comba, _rule(chunk_comba), ("ops.comba.fused_recurrent",)),
    Taken(chunk_simple_gla, _rule(chunk_simple_gla), ("ops.simple_gla.chunk",), keywords=("chunk_size",)),
    Taken(fused_recurrent_simple_gla, _forward_in_time, ("ops.simple_gla.fused_recurrent",), keywords=OLD),
    Taken(causal_conv1d, _convolution, (CONVOLUTION, "modules.conv.causal_conv1d")),
    Taken(causal_conv1d_update, _token, (CONVOLUTION, "modules.conv.triton.ops"), "modules"),
    Taken(rms_norm_gated, _gated_norm, ("modules.norm.fused_norm_gate", "modules.fused_norm_gate")),
    Taken(rms_norm, _norm, ("modules.norm.layernorm", "modules.layernorm")),
    Taken(l2norm, _l2norm, ("modules.norm.l2norm", "modules.l2norm")),
)
"""A string that fla's registry knows covers the function in every version; without it, the version says whether the
function itself is registered."""
