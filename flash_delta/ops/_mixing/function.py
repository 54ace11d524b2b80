"""A mixer as one node of autograd.

It runs three functions of backends one after the other: the convolutions of q, k and v in one launch, the rule, and the
norm. They read the projections where these lie, and write the gradients to the same places of a tensor like it. If
there are no kernels for all three, the parts run as ops of their own.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flash_delta.backend import is_seen_through
from flash_delta.ops._backend import wished
from flash_delta.ops._elementwise import compute
from flash_delta.ops._function import plan_lengths
from flash_delta.ops._function import run as run_rule
from flash_delta.ops._known_calls import look_at, recall
from flash_delta.ops._mixing.parts import (
    OP,
    PROJECTED,
    KnownMix,
    MixOptions,
    Places,
    describe_rule,
    find_parts,
    inputs_of,
    mix_backward,
    mix_forward,
    rule_options,
    split,
    taps_of,
)
from flash_delta.ops._operators.elementwise import CONVOLUTION, NORM
from flash_delta.ops._operators.mix import mix_operator
from flash_delta.ops._transforms import differentiable_once, is_traced, is_transformed
from flash_delta.problem import MOST_TAPS, WIDEST_ROW, Convolved, Inputs, Mixed, Normalized, Problem, needs_gradient


def run_mix(x: Mixed, options: MixOptions, bounds: Tensor | Sequence[int] | None, backend: str | None) -> Tensor:
    """y [B, T, HV * V]."""
    given = (backend, bounds is None, options)
    known = recall(given, x)
    if known is None:
        if is_traced(x.norm_weight):
            return _run_traced(x, options, bounds, backend)
        if is_transformed():
            return _run_parts(x, options, bounds, backend)
        known = (
            look_at(_look, torch.is_grad_enabled(), given, None, x) if x.norm_weight.is_cuda else _look(given, None, x)
        )
    if known.parts is None:
        return _run_parts(x, options, bounds, backend)
    problem = plan_lengths(known.parts[1], Inputs(*[x.first] * 3, cu_seqlens=x.cu_seqlens), bounds)
    if known.needs_grad:
        return Mix.apply(known, problem, options.places, *x)
    return mix_forward(known, problem, options.places, x)[0]


def _run_traced(x: Mixed, options: MixOptions, bounds: Tensor | Sequence[int] | None, backend: str | None) -> Tensor:
    """Calls the operator, or the parts where a tracer can follow these or where kernels would not take all of them."""
    t, wish = x.first, wished(backend)
    kernels = not is_seen_through(wish) if wish is not None else t.device.type == "cuda" and t.dtype != torch.float64
    problem = describe_rule(x, options, split(x[PROJECTED], options.places), bounds)
    taps = taps_of(x, problem.H * problem.K)
    same = all(w.dtype == taps[0].dtype and w.shape[-1] == taps[0].shape[-1] <= MOST_TAPS for w in taps)
    if not kernels or not same or x.norm_weight.numel() > WIDEST_ROW:
        return _run_parts(x, options, bounds, backend)
    gate, *rest, places = options
    fields = (*gate, *rest, [n for place in places for n in place])
    return mix_operator(*x, problem.lengths, *fields, needs_gradient(x), wish)[0]


def _look(given: tuple[Any, ...], _: None, x: Mixed) -> KnownMix:
    """Checks the call, and finds what runs it."""
    return find_parts(x, given[2], given[0], needs_gradient(x))


class Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, known: KnownMix, problem: Problem, places: Places, *tensors: Tensor | None):
        y, kept, planned = mix_forward(known, problem, places, Mixed(*tensors))
        ctx.op, ctx.known, ctx.problem, ctx.places = problem.op, known, problem, places
        ctx.save_for_backward(*tensors, *kept, *planned)
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx, tensors: tuple[Tensor | None, ...], dy: Tensor):
        count = len(Mixed._fields)
        x, kept, needs = Mixed(*tensors[:count]), tensors[count:], Mixed(*ctx.needs_input_grad[3:])
        return None, None, None, *mix_backward(ctx.known, ctx.problem, ctx.places, x, kept, dy, needs)


def _run_parts(x: Mixed, options: MixOptions, bounds: Tensor | Sequence[int] | None, backend: str | None) -> Tensor:
    """Runs convolution, rule and norm by ops of their own, for PyTorch's own operations and for tracers."""
    q, k, v, g, beta, z = split(x[PROJECTED], options.places)
    tokens, fields = [], ("causal_conv1d", "silu", False)
    for t, weight in zip((q, k, v), taps_of(x, q.shape[2] * q.shape[3]), strict=True):
        y, _ = compute(CONVOLUTION, Convolved(t.flatten(-2), weight, None, None, x.cu_seqlens), fields, backend)
        tokens.append(y.view(t.shape))
    o, _ = run_rule(
        inputs_of(x, (*tokens, g, beta)), rule_options(options), bounds, output_final_state=False, backend=backend
    )
    return compute(NORM, Normalized(o, x.norm_weight, z), (OP, options.activation, options.eps), backend).flatten(-2)
