"""The ``triton`` backend for convolution, norm and gate around the rule, forward and backward.

Gradients of parameters take two launches. Every program sums over its rows, and then ``total`` sums over programs. The
order depends only on sizes and on the chip. Only inputs are saved for the backward pass.
"""

from collections.abc import Iterable

import torch
import triton
from torch import Tensor

from flash_delta.kernels.runtime import fastcall
from flash_delta.kernels.runtime.calls import Call, make_elementwise_call, on
from flash_delta.kernels.runtime.chip import CPU
from flash_delta.kernels.runtime.launch import again, remember, run
from flash_delta.kernels.triton.elementwise.convolution import (
    count_parts,
    pitched,
    run_convolve,
    run_convolve_backward,
    run_convolve_heads,
    run_convolve_heads_backward,
    run_convolve_token,
)
from flash_delta.kernels.triton.elementwise.gate import count_gate_parts, run_decay, run_decay_backward
from flash_delta.kernels.triton.elementwise.norm import (
    count_row_parts,
    heads_of,
    run_normalize,
    run_normalize_backward,
    run_total,
)
from flash_delta.problem import (
    MOST_GATES,
    MOST_TAPS,
    WIDEST_ROW,
    ConvolutionProblem,
    Convolved,
    ConvolvedHeads,
    ElementwiseInputs,
    ElementwiseProblem,
    Gated,
    GateProblem,
    KnownCall,
    Normalized,
    NormProblem,
)

CONVOLVE, TOKEN, NORMALIZE, GATE = ("convolve",), ("convolve_token",), ("normalize",), ("gate",)  # kinds of calls
CONVOLVE_HEADS, CONVOLVE_HEADS_BACK = ("convolve_heads",), ("convolve_heads_backward",)
CONVOLVE_BACK, NORMALIZE_BACK = ("convolve_backward",), ("normalize_backward",)


def unsupported(problem: ElementwiseProblem) -> str | None:
    """Why this backend cannot run ``problem``; None if it can."""
    if problem.device.type != "cuda" and not (problem.device.type == "cpu" and triton.knobs.runtime.interpret):
        return f"it needs a GPU, the tensors are on {problem.device}"
    if problem.dtype == torch.float64:
        return "it computes in float32, the tensors are float64"
    if isinstance(problem, NormProblem) and problem.D > WIDEST_ROW:
        return f"it normalises rows of up to {WIDEST_ROW} numbers, they are {problem.D} wide"
    if isinstance(problem, GateProblem) and problem.HV * problem.K > MOST_GATES:
        return f"it computes up to {MOST_GATES:,} gates per token, here are {problem.HV * problem.K:,}"
    if isinstance(problem, ConvolutionProblem) and problem.W > MOST_TAPS:
        return f"it has up to {MOST_TAPS} taps, here are {problem.W}"
    return None


def preference(problem: ElementwiseProblem) -> tuple[int, str | None]:
    """The preference of the rule's backend."""
    return (1, None) if problem.device != CPU else (-2, None)


def convolve(p: ConvolutionProblem, x: Convolved, known: KnownCall | None = None) -> tuple[Tensor, Tensor | None]:
    """y ``[B, T, D]`` and, if the problem asks for it, the final state ``[N, D, W]``, both contiguous."""
    y = x.x.new_empty(*x.x.shape)  # a torch.Size takes 1 us more than its numbers
    final = x.x.new_empty(p.N, p.D, p.W) if p.output_final_state else None
    if again(known, (*CONVOLVE, p.output_final_state), x, made=(y, final)):
        return y, final
    if not y.numel():  # there is nothing to compute
        if final is not None:
            final.copy_(x.initial_state) if x.initial_state is not None else final.zero_()
        return y, final
    with on(p.device):
        call = make_elementwise_call(p, _aligned(x), (*CONVOLVE, p.output_final_state), known=known)
        run(call, lambda c: run_convolve(c, y, final), y, final)
        remember(call, x)
    return y, final


def convolve_backward(
    p: ConvolutionProblem, x: Convolved, dy: Tensor | None, dfinal: Tensor | None, known: KnownCall | None = None
) -> Convolved:
    given, name = (*x, dy, dfinal), _name_back(CONVOLVE_BACK, x, dy, dfinal)
    made = again(known, name, x, (dy, dfinal))
    if made is not None:
        return Convolved(*made)
    x, dy = _aligned(x), torch.zeros(x.x.shape, dtype=x.x.dtype, device=p.device) if dy is None else _unit(dy)
    d = Convolved(*_new_like(x[:4], p.device))
    if not dy.numel():
        _zero(d)
        if d.initial_state is not None and dfinal is not None:
            d.initial_state.copy_(dfinal)
        return d
    with on(p.device):
        call = make_elementwise_call(p, x, CONVOLVE_BACK, dy, dfinal, known=known, name=name)
        rows = p.W + (x.bias is not None)
        parts = torch.empty(count_parts(call), rows, p.D, dtype=torch.float32, device=p.device)

        def kernels(c: Call) -> None:
            run_convolve_backward(c, d.x, d.initial_state, parts)
            run_total(c, parts, d.weight, d.bias)

        run(call, kernels, *d[:4], spare=(parts,))
    remember(call, given)
    return d


def convolve_heads(p: ConvolutionProblem, x: ConvolvedHeads, known: KnownCall | None = None) -> tuple[Tensor, ...]:
    """q, k and v after their convolutions, contiguous."""
    y = tuple([x.q.new_empty(*t.shape) for t in x[:3]])
    if again(known, CONVOLVE_HEADS, x, made=y) or not y[0].numel():
        return y
    with on(p.device):
        x_taken = _with_unit_channels(x)
        kind = (*CONVOLVE_HEADS, pitched(x_taken[:3]))
        call = make_elementwise_call(p, x_taken, kind, known=known, name=CONVOLVE_HEADS)
        run(call, lambda c: run_convolve_heads(c, y), *y)
        remember(call, x)
    return y


def convolve_heads_backward(
    p: ConvolutionProblem, x: ConvolvedHeads, d: tuple[Tensor, ...], to: tuple[Tensor, ...], weights: bool,
    known: KnownCall | None = None,
) -> Tensor | None:  # fmt: skip
    """Writes the gradients of q, k and v to ``to``, and returns those of all weights [D, W] if these are wanted.
    ``d``: the contiguous gradients of the outputs."""
    name = (*CONVOLVE_HEADS_BACK, weights, fastcall.key(False, x, d, to))
    made = again(known, name, x, d, to)
    if made is not None:
        return made[0] if weights else None
    dweight = torch.empty(p.D, p.W, dtype=x.q_weight.dtype, device=p.device) if weights else None
    if not x.q.numel():
        return dweight.zero_() if weights else None
    with on(p.device):
        x_taken = _with_unit_channels(x)
        kind = (*CONVOLVE_HEADS_BACK, weights, pitched(x_taken[:3]), pitched(to))
        call = make_elementwise_call(p, x_taken, kind, *d, *to, known=known, name=name)
        rows = count_parts(call), p.W, p.D
        parts = torch.empty(rows, dtype=torch.float32, device=p.device) if weights else None

        def kernels(c: Call) -> None:
            run_convolve_heads_backward(c, parts)
            if weights:
                run_total(c, parts, dweight, None)

        run(call, kernels, dweight, spare=(parts,))
    remember(call, (*x, *d, *to))
    return dweight


def convolve_token(p: ConvolutionProblem, x: Convolved, known: KnownCall | None = None) -> Tensor:
    """y for one token ``x [N, D]`` or ``[N, D, 1]`` of every row. ``initial_state`` is updated in place."""
    y = x.x.new_empty(*x.x.shape)
    if again(known, TOKEN, x, made=(y,)) or not y.numel():
        return y
    token = x if x.x.dim() == 2 else x._replace(x=x.x[..., 0])
    with on(p.device):
        call = make_elementwise_call(p, _with_flat_parameters(token), TOKEN, known=known)
        run(call, lambda c: run_convolve_token(c, y), y)
        remember(call, x)
    return y


def normalize(p: NormProblem, x: Normalized, known: KnownCall | None = None) -> Tensor:
    y = x.x.new_empty(*x.x.shape)
    if again(known, NORMALIZE, x, made=(y,)) or not y.numel():
        return y
    with on(p.device):
        rows = _rows(x)
        call = make_elementwise_call(p, rows, (*NORMALIZE, heads_of(rows.gate, p.D)), known=known, name=NORMALIZE)
        run(call, lambda c: run_normalize(c, y), y)
        remember(call, x)
    return y


def normalize_backward(p: NormProblem, x: Normalized, dy: Tensor, known: KnownCall | None = None) -> Normalized:
    return normalize_backward_to(p, x, dy, None, True, known)


def normalize_backward_to(
    p: NormProblem, x: Normalized, dy: Tensor, dgate: Tensor | None, weights: bool, known: KnownCall | None = None
) -> Normalized:
    """``dgate``: where to write the gate's gradient; None: to new memory. ``weights``: whether that of the weight is
    wanted."""
    given, kind = (*x, dy, dgate), (*NORMALIZE_BACK, weights)
    name = _name_back(kind, x, dy, dgate)
    made = again(known, name, x, (dy, dgate))
    if made is not None:
        return Normalized(*made)
    d = Normalized(*_new_like(x, p.device))
    d = d._replace(weight=d.weight if weights else None, gate=d.gate if dgate is None else None)
    if not dy.numel():
        _zero(d)
        return d
    rows, to = _rows(x), None if dgate is None else _by_heads(dgate, p.D)
    if to is not None and to.shape != rows.gate.shape:  # only one of them has all rows equally far apart
        to = dgate.view(-1, *dgate.shape[-2:])
        rows = rows._replace(gate=_unit(x.gate).reshape(to.shape))
    with on(p.device):
        more = _unit(dy.reshape(-1, p.D)), to
        call = make_elementwise_call(p, rows, (*kind, heads_of(rows.gate, p.D)), *more, known=known, name=name)
        count = count_row_parts(call), 1, p.D
        parts = torch.empty(count, dtype=torch.float32, device=p.device) if weights else None

        def kernels(c: Call) -> None:
            run_normalize_backward(c, d.x, d.gate, parts)
            if weights:
                run_total(c, parts, d.weight, None)

        run(call, kernels, *d, spare=(parts,))
    remember(call, given)
    return d


def gate(p: GateProblem, x: Gated, known: KnownCall | None = None) -> Tensor:
    kind, y = (*GATE, p.gate.bound is not None), x.g.new_empty(x.g.shape, dtype=p.output_dtype)
    if again(known, kind, x, made=(y,)) or not y.numel():
        return y
    with on(p.device):
        call = make_elementwise_call(p, _heads(p, x), kind, known=known)
        run(call, lambda c: run_decay(c, y), y)
        remember(call, x)
    return y


def gate_backward(p: GateProblem, x: Gated, dy: Tensor, known: KnownCall | None = None) -> Gated:
    kind = "gate_backward", p.gate.bound is not None
    given, name = (*x, dy), _name_back(kind, x, dy)
    made = again(known, name, x, (dy,))
    if made is not None:
        return _sum_parts(x, *made)
    if not dy.numel():
        d = Gated(*_new_like(x, p.device))
        _zero(d)
        return d
    (dg,) = _new_like((x.g,), p.device)
    with on(p.device):
        call = make_elementwise_call(p, _heads(p, x), kind, dy.reshape(-1, p.HV, p.K), known=known, name=name)
        parts = torch.empty(count_gate_parts(call), 2, p.HV, p.K, dtype=torch.float32, device=p.device)
        run(call, lambda c: run_decay_backward(c, dg, parts), dg, parts)
    remember(call, given)
    return _sum_parts(x, dg, parts)


def _sum_parts(x: Gated, dg: Tensor, parts: Tensor) -> Gated:
    """The gradients of a gate's inputs. PyTorch sums over programs."""
    dA_log, ddt_bias = parts.sum(0)
    found = zip(x[1:], (dA_log.sum(-1), ddt_bias), strict=True)
    return Gated(dg, *(None if t is None else sums.view(t.shape).to(t.dtype) for t, sums in found))


def _name_back(kind: tuple, x: ElementwiseInputs, *gradients: Tensor | None) -> tuple:
    """The name under which a backward pass is known: the layouts of its tensors. Even inputs may have other layouts
    than in the forward pass, since hooks may have moved them (`torch.autograd.graph.saved_tensors_hooks`)."""
    return *kind, fastcall.key(False, x, gradients)


def _new_like(tensors: Iterable[Tensor | None], device: torch.device) -> list[Tensor | None]:
    """Contiguous memory for gradients."""
    return [None if t is None else torch.empty(t.shape, dtype=t.dtype, device=device) for t in tensors]


def _heads(p: GateProblem, x: Gated) -> Gated:
    """Rows [M, HV, K], without a copy if strides allow it, and contiguous parameters."""
    parameters = (None if t is None else t.contiguous() for t in x[1:])
    return Gated(x.g.reshape(-1, p.HV, p.K), *parameters)


def _zero(d: ElementwiseInputs) -> None:
    for t in d:
        if t is not None:
            t.zero_()


def _aligned(x: Convolved) -> Convolved:
    """Inputs with contiguous channels, as they nearly always are, and contiguous parameters and bounds."""
    return _with_flat_parameters(x._replace(x=_unit(x.x)))


def _with_flat_parameters(x: Convolved) -> Convolved:
    bias, bounds = (None if t is None else t.contiguous() for t in (x.bias, x.cu_seqlens))
    return x._replace(weight=x.weight.contiguous(), bias=bias, cu_seqlens=bounds)


def _with_unit_channels(x: ConvolvedHeads) -> ConvolvedHeads:
    """Inputs with contiguous channels in each head, and contiguous weights and bounds."""
    vectors = (None if t is None else t.contiguous() for t in x[3:])
    return ConvolvedHeads(*(_unit(t) for t in x[:3]), *vectors)


def _rows(x: Normalized) -> Normalized:
    D = x.x.shape[-1]
    gate = None if x.gate is None else _by_heads(_unit(x.gate), D)
    return Normalized(_unit(x.x.reshape(-1, D)), x.weight.contiguous(), gate)


def _by_heads(gate: Tensor, D: int) -> Tensor:
    """The gate as [tokens, groups, D of the heads of a group]. If all rows are equally far apart, each is a group. A
    copy is made only if strides do not allow it otherwise."""
    try:
        return gate.view(-1, 1, D)
    except RuntimeError:
        return gate.reshape(-1, *gate.shape[-2:]) if gate.dim() > 2 else gate.reshape(-1, 1, D)


def _unit(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()
