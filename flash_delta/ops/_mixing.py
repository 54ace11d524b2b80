"""All that a layer does between its projections, as one node of autograd.

It runs three functions of backends one after the other: the convolutions of q, k and v in one launch, the rule, and the
norm. They read the projections where these lie, and write the gradients to the same places of a tensor like it. If
there are no kernels for all three, the parts run as ops of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_delta.ops._backend import choose_backend, load_backend, load_modules
from flash_delta.ops._check.around import check_convolution, check_norm, describe_convolution, describe_norm
from flash_delta.ops._check.options import Options, cast
from flash_delta.ops._check.rule import describe
from flash_delta.ops._execute import backward, forward
from flash_delta.ops._function import plan_lengths
from flash_delta.ops._function import run as run_rule
from flash_delta.ops._known_calls import look_at, recall
from flash_delta.ops._modules import convolve, normalize
from flash_delta.ops._transforms import differentiable_once, is_traced, is_transformed
from flash_delta.problem import (
    Convolved,
    ConvolvedHeads,
    Inputs,
    KnownCall,
    Mixed,
    Normalized,
    Problem,
    needs_gradient,
)

PROJECTED = slice(1, 7)  # of Mixed: q, k, v, g, beta, z
TAPS = slice(7, 10)


class MixOptions(NamedTuple):
    """What matters about a mixer besides its tensors."""

    gate: str
    scale: float | None
    lower_bound: float | None
    neg_eigval: bool
    eps: float
    activation: str | None  # of the norm's gate
    # For each of q, k, v, g, beta and z in a packed projection: where its heads lie in a token, how many they are, how
    # wide, and how far apart. Without heads it is not there.
    places: tuple[tuple[int, int, int, int], ...]


@dataclass(slots=True, eq=False)
class KnownMix:
    """The known calls of a mixer's parts."""

    convolution: KnownCall
    rule: KnownCall
    norm: KnownCall
    needs_grad: bool


@dataclass(slots=True, eq=False)
class KnownMix:
    """The known calls of a mixer's parts."""

    parts: tuple[KnownCall, KnownCall, KnownCall] | None  # the convolutions, the rule, the norm; None: no such kernels
    needs_grad: bool


def run_mix(x: Mixed, options: MixOptions, bounds: Tensor | Sequence[int] | None, backend: str | None) -> Tensor:
    """y [B, T, HV * V]."""
    given = (backend, bounds is None, options)
    known = recall(given, x)
    if known is None:
        if is_traced(x.norm_weight) or is_transformed():
            return _run_parts(x, options, bounds, backend)
        known = (
            look_at(_look, torch.is_grad_enabled(), given, None, x) if x.norm_weight.is_cuda else _look(given, None, x)
        )
    if known.parts is None:
        return _run_parts(x, options, bounds, backend)
    tokens = x.q if x.packed is None else x.packed
    problem = plan_lengths(known.parts[1], Inputs(tokens, tokens, tokens, cu_seqlens=x.cu_seqlens), bounds)
    if known.needs_grad:
        return Mix.apply(known, problem, options.places, *x)
    return _mix(known, problem, options.places, x)[0]


def _look(given: tuple[Any, ...], _: None, x: Mixed) -> KnownMix:
    """Checks the call, and finds what runs it."""
    backend, _, options = given
    needs_grad = needs_gradient(x)
    with torch.no_grad():
        tokens, taps = _split(x, options.places), _flat_taps(x)
        q, k, v, g, beta, z = tokens
        rule = Inputs(q, k, v, g, beta, None, None, x.A_log, x.dt_bias, x.cu_seqlens)
        problem = describe(rule, cast(Options(**_rule_options(options))), None)._replace(needs_grad=needs_grad)
        for t, weight in zip(tokens[:3], taps, strict=True):
            check_convolution("mix", Convolved(t.flatten(-2), weight, None, None, x.cu_seqlens), "silu", False)
        norm = Normalized(v, x.norm_weight, z)
        of_norm = describe_norm(norm, "mix", options.activation, check_norm("mix", norm, options.eps))
        of_taps = describe_convolution(
            Convolved(v.flatten(-2), taps[2], None, None, x.cu_seqlens), "mix", "silu", False
        )
    HK = q.shape[2] * q.shape[3]
    of_taps = of_taps._replace(D=2 * HK + of_taps.D, DQ=HK)
    same = taps[0].dtype == taps[1].dtype == taps[2].dtype and taps[0].shape[1] == taps[2].shape[1] == taps[1].shape[1]
    modules = [load_modules(choose_backend(p, backend, load_modules)) for p in (of_taps, of_norm)]
    if not (same and q.numel() and v.numel() and all(hasattr(module, "convolve_heads") for module in modules)):
        return KnownMix(None, needs_grad)
    calls = (of_taps, modules[0]), (problem, load_backend(choose_backend(problem, backend))), (of_norm, modules[1])
    return KnownMix(tuple(KnownCall(p, module, needs_grad) for p, module in calls), needs_grad)


def _mix(known: KnownMix, problem: Problem, places: Sequence, x: Mixed) -> tuple[Tensor, tuple[Tensor, ...]]:
    """y, and what the backward pass needs besides x: q, k and v after their convolutions, o, and what the rule saves."""
    convolution, rule, norm = known.parts
    q, k, v, g, beta, z = open_packed(x, places)
    q, k, v = convolution.backend.convolve_heads(
        convolution.problem, ConvolvedHeads(q, k, v, *x[TAPS], x.cu_seqlens), convolution
    )
    out = forward(problem, rule, Inputs(q, k, v, g, beta, None, None, x.A_log, x.dt_bias, x.cu_seqlens))
    y = norm.backend.normalize(norm.problem, Normalized(out.o, x.norm_weight, z), norm)
    return y.view(*y.shape[:2], -1), (q, k, v, out.o, *out.saved, *out.planned)


def _mix_backward(
    known: KnownMix, problem: Problem, places: Sequence, x: Mixed, kept: tuple[Tensor, ...], dy: Tensor, needs: Mixed
) -> Mixed:
    """The gradients. ``needs``: which parameters want theirs."""
    convolution, rule, norm = known.parts
    (q, k, v, o), saved = kept[:4], kept[4:]
    tokens = open_packed(x, places)
    packed = None if x.packed is None else torch.empty_like(x.packed)
    d = Mixed(packed, *(None if t is None else torch.empty_like(t) for t in x[PROJECTED]), *(None,) * 7)
    to = open_packed(d, places)
    found = norm.backend.normalize_backward(
        norm.problem, Normalized(o, x.norm_weight, tokens[5]), dy, norm, dgate=to[5], weights=needs.norm_weight
    )
    inputs = Inputs(q, k, v, *tokens[3:5], None, None, x.A_log, x.dt_bias, x.cu_seqlens)
    of_rule = backward(problem, rule, inputs, saved, found.x, None)
    taps = convolution.backend.convolve_heads_backward(
        convolution.problem, ConvolvedHeads(*tokens[:3], *x[TAPS], x.cu_seqlens), of_rule[:3], tuple(to[:3]),
        any(needs[TAPS]), convolution,
    )  # fmt: skip
    for name, t, place in (("g", of_rule.g, to[3]), ("beta", of_rule.beta, to[4])):
        if getattr(x, name) is None:
            place.copy_(t)
        else:
            d = d._replace(**{name: t})
    if taps is not None:
        split = taps.split([len(t) for t in x[TAPS]])
        of_taps = (t.view(like.shape) for t, like in zip(split, x[TAPS], strict=True))
        d = d._replace(**dict(zip(Mixed._fields[TAPS], of_taps, strict=True)))
    return d._replace(A_log=of_rule.A_log, dt_bias=of_rule.dt_bias, norm_weight=found.weight)


class Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, known: KnownMix, problem: Problem, places: Sequence, *tensors: Tensor | None):
        y, kept = _mix(known, problem, places, Mixed(*tensors))
        ctx.op, ctx.known, ctx.problem, ctx.places = problem.op, known, problem, places
        ctx.save_for_backward(*tensors, *kept)
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx, tensors: tuple[Tensor | None, ...], dy: Tensor):
        count = len(Mixed._fields)
        x, kept, needs = Mixed(*tensors[:count]), tensors[count:], Mixed(*ctx.needs_input_grad[3:])
        return None, None, None, *_mix_backward(ctx.known, ctx.problem, ctx.places, x, kept, dy, needs)


def _run_parts(x: Mixed, options: MixOptions, bounds: Tensor | Sequence[int] | None, backend: str | None) -> Tensor:
    """The same by ops of their own, for PyTorch's own operations and for tracers."""
    q, k, v, g, beta, z = _split(x, options.places)
    tokens = [
        convolve(Convolved(t.flatten(-2), weight, None, None, x.cu_seqlens), "silu", False, backend)[0].view(t.shape)
        for t, weight in zip((q, k, v), _flat_taps(x), strict=True)
    ]
    inputs = Inputs(*tokens, g, beta, None, None, x.A_log, x.dt_bias, x.cu_seqlens)
    o, _ = run_rule(inputs, _rule_options(options), bounds, output_final_state=False, backend=backend)
    return normalize(Normalized(o, x.norm_weight, z), "mix", options.activation, options.eps, backend).flatten(-2)


def _flat_taps(x: Mixed) -> list[Tensor]:
    """The taps [D, W]."""
    return [t.squeeze(1) if t.dim() == 3 else t for t in x[TAPS]]


def open_packed(x: Mixed, places: Sequence[tuple[int, int, int, int]]) -> list[Tensor | None]:
    """q, k, v, g, beta and z. Each is one tensor of PyTorch to make, and takes a microsecond."""
    if x.packed is None:
        return list(x[PROJECTED])
    (B, T, _), (row, token, _), start = x.packed.shape, x.packed.stride(), x.packed.storage_offset()
    found = []
    for own, (offset, heads, width, pitch) in zip(x[PROJECTED], places, strict=True):
        if own is not None or not heads:
            found.append(own)
        elif width:
            found.append(x.packed.as_strided((B, T, heads, width), (row, token, pitch, 1), start + offset))
        else:
            found.append(x.packed.as_strided((B, T, heads), (row, token, pitch), start + offset))
    return found


def _split(x: Mixed, places: Sequence[tuple[int, int, int, int]]) -> list[Tensor | None]:
    """The same by PyTorch's usual operations, which autograd and compilers follow."""
    found = []
    for own, (offset, heads, width, pitch) in zip(x[PROJECTED], places, strict=True):
        if own is not None or not heads:
            found.append(own)
            continue
        size = max(width, 1)
        if pitch == size:
            t = x.packed[..., offset : offset + heads * size].unflatten(-1, (heads, size))
        else:
            t = x.packed.unflatten(-1, (heads, pitch))[..., offset : offset + size]
        found.append(t if width else t[..., 0])
    return found


def _rule_options(options: MixOptions) -> dict[str, Any]:
    return {
        "op": "mix",
        "gate": options.gate,
        "erase": "decayed",
        "scale": options.scale,
        "l2norm": True,
        "raw_gate": True,
        "lower_bound": options.lower_bound,
        "raw_beta": True,
        "neg_eigval": options.neg_eigval,
    }
