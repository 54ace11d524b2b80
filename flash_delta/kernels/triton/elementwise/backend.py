"""The ``triton`` backend for convolution, norm and gate around the rule, forward and backward, and states at rest.

Gradients of parameters take two launches. Every program sums over its rows, and then ``total`` sums over programs. The
order depends only on sizes and on the chip. Only inputs are saved for the backward pass.
"""

import torch
import triton
from torch import Tensor

from flash_delta.kernels.runtime.chip import CPU
from flash_delta.kernels.runtime.run import run
from flash_delta.kernels.triton.elementwise.convolution_plans import (
    ConvolutionGradients,
    ConvolvedGradients,
    Destination,
    plan_convolve,
    plan_convolve_backward,
    plan_convolve_heads,
    plan_convolve_heads_backward,
    plan_convolve_heads_backward_without_weights,
    plan_convolve_token,
)
from flash_delta.kernels.triton.elementwise.gate import GateGradient, plan_gate, plan_gate_backward
from flash_delta.kernels.triton.elementwise.int8 import plan_move
from flash_delta.kernels.triton.elementwise.norm import (
    NormGradient,
    plan_norm,
    plan_norm_backward,
    plan_norm_backward_without_weight,
)
from flash_delta.problem import (
    MOST_GATES,
    MOST_TAPS,
    WIDEST_ROW,
    ConvolutionProblem,
    Convolved,
    ConvolvedHeads,
    ElementwiseProblem,
    Gated,
    GateProblem,
    Int8Problem,
    KnownCall,
    Normalized,
    NormProblem,
    Resting,
)


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
    if isinstance(problem, Int8Problem) and max(problem.rows, problem.columns) > WIDEST_ROW:
        widest = max(problem.rows, problem.columns)
        return f"it rounds states of up to {WIDEST_ROW} rows and columns, they have {widest}"
    return None


def preference(problem: ElementwiseProblem) -> tuple[int, str | None]:
    """The preference of the rule's backend."""
    return (1, None) if problem.device != CPU else (-2, None)


def convolve(p: ConvolutionProblem, x: Convolved, known: KnownCall | None = None) -> tuple[Tensor, Tensor | None]:
    """y ``[B, T, D]`` and, if the problem asks for it, the final state ``[N, D, W]``, both contiguous."""
    return run(plan_convolve, p, x, known=known)


def convolve_backward(
    p: ConvolutionProblem, x: Convolved, dy: Tensor | None, dfinal: Tensor | None, known: KnownCall | None = None
) -> Convolved:
    return Convolved(*run(plan_convolve_backward, p, x, after=(ConvolutionGradients(dy, dfinal),), known=known))


def convolve_heads(p: ConvolutionProblem, x: ConvolvedHeads, known: KnownCall | None = None) -> tuple[Tensor, ...]:
    """q, k and v after their convolutions, contiguous."""
    return run(plan_convolve_heads, p, x, known=known)


def convolve_heads_backward(
    p: ConvolutionProblem, x: ConvolvedHeads, d: tuple[Tensor, ...], to: tuple[Tensor, ...], weights: bool,
    known: KnownCall | None = None,
) -> Tensor | None:  # fmt: skip
    """Writes the gradients of q, k and v to ``to``, and returns those of all weights [D, W] if these are wanted.
    ``d``: the contiguous gradients of the outputs."""
    plan = plan_convolve_heads_backward if weights else plan_convolve_heads_backward_without_weights
    return run(plan, p, x, after=(ConvolvedGradients._make(d), Destination._make(to)), known=known)[0]


def convolve_token(p: ConvolutionProblem, x: Convolved, known: KnownCall | None = None) -> Tensor:
    """y for one token ``x [N, D]`` or ``[N, D, 1]`` of every row. ``initial_state`` is updated in place."""
    return run(plan_convolve_token, p, x, known=known)[0]


def normalize(p: NormProblem, x: Normalized, known: KnownCall | None = None) -> Tensor:
    return run(plan_norm, p, x, known=known)[0]


def normalize_backward(p: NormProblem, x: Normalized, dy: Tensor, known: KnownCall | None = None) -> Normalized:
    return normalize_backward_to(p, x, dy, None, True, known)


def normalize_backward_to(
    p: NormProblem, x: Normalized, dy: Tensor, dgate: Tensor | None, weights: bool, known: KnownCall | None = None
) -> Normalized:
    """``dgate``: where to write the gate's gradient; None: to new memory. ``weights``: whether that of the weight is
    wanted."""
    plan = plan_norm_backward if weights else plan_norm_backward_without_weight
    return Normalized(*run(plan, p, x, after=(NormGradient(dy, dgate),), known=known))


def gate(p: GateProblem, x: Gated, known: KnownCall | None = None) -> Tensor:
    return run(plan_gate, p, x, known=known)[0]


def gate_backward(p: GateProblem, x: Gated, dy: Tensor, known: KnownCall | None = None) -> Gated:
    """The gradients. PyTorch sums over programs."""
    dg, parts = run(plan_gate_backward, p, x, after=(GateGradient(dy),), known=known)
    dA_log, ddt_bias = parts.sum(0)
    found = zip(x[1:], (dA_log.sum(-1), ddt_bias), strict=True)
    return Gated(dg, *(None if t is None else sums.view(t.shape).to(t.dtype) for t, sums in found))


def move_states(p: Int8Problem, x: Resting, known: KnownCall | None = None) -> None:
    """Rounds states of the pool to int8, or restores them."""
    run(plan_move, p, x, known=known)
