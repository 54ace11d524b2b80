"""Checks of convolutions, norms and gates. A ValueError names the argument, what was expected and what came."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from flash_delta.ops._check.options import as_bool, as_eps, as_float, refuse
from flash_delta.ops._check.rule import DTYPES, INDEX_DTYPES, check_cu_seqlens, check_kind, check_shape, read_lengths
from flash_delta.problem import ConvolutionProblem, Convolved, Gated, GateProblem, Inputs, Normalized, NormProblem
from flash_delta.problem.parts import Form, gate_of


def describe_convolution(x: Convolved, op: str, activation: str | None, output_final_state: bool) -> ConvolutionProblem:
    """Check a call and describe it."""
    B, _, D = check_shape(op, "x", x.x, "B", "T", "D")
    N = B if x.cu_seqlens is None else check_cu_seqlens(op, x.cu_seqlens, x.x, "x")
    _check_taps(op, x, D, activation)
    if x.initial_state is not None:
        check_shape(op, "initial_state", x.initial_state, N, *x.weight.shape)
    _check_tensors(op, x[:4], ("x", "weight", "bias", "initial_state"))
    return _describe(x, op, activation, N, as_bool(op, "output_final_state", output_final_state))


def describe_token(x: Convolved, op: str, activation: str | None) -> ConvolutionProblem:
    """Check a call for one token, x [N, D], and describe it."""
    N, D = check_shape(op, "x", x.x, "N", "D")
    _check_taps(op, x, D, activation)
    check_shape(op, "state", x.initial_state, N, *x.weight.shape)
    _check_tensors(op, x[:4], ("x", "weight", "bias", "state"))
    return _describe(x._replace(x=x.x.unsqueeze(1)), op, activation, N, True)


def describe_column(x: Convolved, op: str, activation: str | None) -> ConvolutionProblem:
    """Check a call for one token, x [N, D, 1], and describe it."""
    return describe_token(x._replace(x=x.x[..., 0]), op, activation)


def describe_norm(
    x: Normalized, op: str, activation: str | None, eps: float, output_dtype: torch.dtype | None = None
) -> NormProblem:
    """Check a call and describe it."""
    (D,) = check_shape(op, "weight", x.weight, "D")
    if not isinstance(x.x, Tensor) or x.x.shape[-1:] != (D,):
        got = f"shape {list(x.x.shape)}" if isinstance(x.x, Tensor) else type(x.x).__name__
        refuse(op, "x", f"a tensor [..., {D}], as wide as weight", got)
    if x.gate is not None:
        check_shape(op, "gate", x.gate, *x.x.shape)
    _check_tensors(op, x, x._fields)
    return NormProblem(op, D, _widest(x), x.x.device, activation, as_eps(op, "eps", eps), output_dtype)


def describe_gate(x: Gated, op: str, form: Form, output_dtype: torch.dtype) -> GateProblem:
    """Check a call and describe it."""
    kind, raw, bound = form
    axes = ["HV", "K"] if kind == "channel" else ["HV"]
    leading = x.g.dim() - len(axes) if isinstance(x.g, Tensor) else 1
    sizes = check_shape(op, "g", x.g, *["..."] * leading, *axes)[leading:]
    counts = x.g.numel(), sizes[0], math.prod(sizes)
    for name, t, count in zip(x._fields, x, counts, strict=True):
        if t is not None and (not isinstance(t, Tensor) or t.numel() != count):
            got = f"shape {list(t.shape)}" if isinstance(t, Tensor) else type(t).__name__
            refuse(op, name, f"a tensor of {count} elements", got)
    _check_tensors(op, x, x._fields)
    if bound is not None:
        bound = as_float(op, "lower_bound", bound, "a negative number")
        if bound >= 0:
            refuse(op, "lower_bound", "a negative number", repr(form[2]))
    elif x.A_log is None:
        without = " without lower_bound" if kind == "channel" else ""
        refuse(op, "A_log", f"a tensor of {sizes[0]} elements{without}", "None")
    if output_dtype not in DTYPES:
        refuse(op, "output_dtype", f"a dtype among {', '.join(map(str, DTYPES))}", repr(output_dtype))
    HV, K = sizes if kind == "channel" else (*sizes, 1)
    return GateProblem(op, HV, K, _widest(x), x.g.device, gate_of((kind, raw, bound), *x), output_dtype)


def check_bounds(op: str, c: Convolved) -> None:
    """Check the values of cu_seqlens on the CPU. The host does not wait for those on a GPU."""
    if c.cu_seqlens is not None and c.cu_seqlens.device.type == "cpu":
        read_lengths(op, Inputs(c.x, c.x, c.x, cu_seqlens=c.cu_seqlens), None)


def check_documents(op: str, x: Tensor, seq_idx: Tensor) -> None:
    """Check the numbers of documents [B or 1, T]. Their values are not read."""
    B, T, _ = check_shape(op, "x", x, "B", "T", "D")
    if not isinstance(seq_idx, Tensor) or seq_idx.shape not in ((B, T), (1, T)):
        got = f"shape {list(seq_idx.shape)}" if isinstance(seq_idx, Tensor) else type(seq_idx).__name__
        refuse(op, "seq_idx", f"a tensor {[B, T]} or {[1, T]}", got)
    check_kind(op, "seq_idx", seq_idx, seq_idx.device, INDEX_DTYPES)


def _describe(x: Convolved, op: str, activation: str | None, N: int, output_final_state: bool) -> ConvolutionProblem:
    (B, T, D), W = x.x.shape, x.weight.shape[1]
    return ConvolutionProblem(
        op, B, T, D, W, N, _widest(x[:4]), x.x.device, x.cu_seqlens is not None, activation, output_final_state
    )


def _widest(tensors: Iterable[Tensor | None]) -> torch.dtype:
    """float64 if one of the tensors has it, else the dtype of the first tensor."""
    dtypes = [t.dtype for t in tensors if t is not None]
    return torch.float64 if torch.float64 in dtypes else dtypes[0]


def _check_taps(op: str, c: Convolved, D: int, activation: str | None) -> None:
    _, W = check_shape(op, "weight", c.weight, D, "W")
    if W < 1:
        refuse(op, "weight", "at least one tap (axis 1)", W)
    if c.bias is not None:
        check_shape(op, "bias", c.bias, D)
    if activation not in (None, "silu"):
        refuse(op, "activation", "'silu' or None", repr(activation))


def _check_tensors(op: str, tensors: Sequence[Tensor | None], names: Sequence[str]) -> None:
    for name, t in zip(names, tensors, strict=True):
        if t is not None:
            check_kind(op, name, t, tensors[0].device, like=names[0])
