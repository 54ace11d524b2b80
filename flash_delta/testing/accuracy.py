"""Judges results by their relative L2 error against the recurrence in float64, per output and per gradient."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flash_delta.reference.activation import (
    NORM_EPS,
    naive_gdn_gate,
    naive_kda_gate,
    naive_kda_lowerbound_gate,
)
from flash_delta.reference.recurrent import recurrent
from flash_delta.testing.cases import OF_UPDATES, Member

# The allowed error of the torch backend against float64 arithmetic on the same inputs. For float64 it proves that the
# mathematics is right. For float32 it is about twice the worst error in `flash-delta check --full`. For 16 bits it is
# one rounding of the result.
ALLOWED = {torch.float64: 1e-10, torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.baddbmm, torch.ops.aten.baddbmm_)
TENSORS = ("q", "k", "v", "g", "beta", "p", "b", "w", "initial_state", "A_log", "dt_bias")

PIECE = 2**26  # numbers that are compared at a time, since the comparison needs wider copies

Results = dict[str, Tensor]  # "o", "final_state" and "dq", "dk", ... for every input


def relative_error(got: Tensor, want: Tensor, scale: float | None = None) -> float:
    """``|got - want| / (|want| + 1e-30)`` in float64. If ``want`` is zeros, only zeros pass, or numbers below
    1e-32. ``scale`` takes the place of ``|want|``."""
    if got.shape != want.shape:
        return float("inf")
    error, length = 0.0, 0.0
    for a, b in zip(*(t.detach().flatten().split(PIECE) for t in (got, want)), strict=True):
        wide = b.double()
        error += float((a.to(wide) - wide).square().sum())
        length += float(wide.square().sum())
    error = math.sqrt(error) / ((math.sqrt(length) if scale is None else scale) + 1e-30)
    return float("inf") if math.isnan(error) else error


class products_in(TorchDispatchMode):
    """Inside of this context, operands of matrix products are first rounded to ``dtype``, as for tensor cores.

    The torch backend then rounds as much as every kernel in ``dtype`` must. Its error shows what a case allows.
    """

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.overloadpacket in PRODUCTS:
            first = len(args) - 2  # a tensor that is added to the product comes before the operands, and is not rounded
            args = (*args[:first], *(t.to(self.dtype).to(t.dtype) for t in args[first:]))
        return op(*args, **(kwargs or {}))


def allowed(reference_error: float, dtype: torch.dtype, part: float = 1.0) -> float:
    """The allowed error of a kernel's result: twice the error of the torch backend with its products in ``dtype``.

    A quarter of the torch backend's own allowed error is added, because errors of small tensors scatter. ``part``: the
    result's norm as a part of that by which the errors are divided.
    """
    return 2 * reference_error + part * ALLOWED[dtype] / 4


def assert_accurate(name: str, got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """The only comparison with the truth in tests and benchmarks. NaN never passes."""
    error = relative_error(got, want)
    assert error <= ALLOWED[dtype], f"{name}: relative L2 error {error:.2e}, allowed {ALLOWED[dtype]:.2e}"


def run(member: Member, inputs: dict[str, Any], backend: str | None = None) -> Results:
    """Outputs and all gradients of the public op."""
    o, final_state = member.op(**inputs, backend=backend)
    return with_gradients(o, final_state, inputs, o.dtype)


@torch.no_grad()
def infer(member: Member, inputs: dict[str, Any], backend: str | None = None) -> Results:
    """The outputs of a call without gradients."""
    o, final_state = member.op(**inputs, backend=backend)
    return {"o": o, "final_state": final_state}


def truth(member: Member, inputs: dict[str, Any]) -> Results:
    """The results of `run` from the recurrence in float64, by autograd, on the same (rounded) inputs."""
    x = {n: inputs[n].detach().double().cpu().requires_grad_() for n in tensors_of(inputs)}
    o, final_state = recurrence(member, x, inputs)
    return with_gradients(o, final_state, x, inputs["v"].dtype)


def tensors_of(inputs: dict[str, Any]) -> list[str]:
    """The names of the inputs that have gradients."""
    return [name for name in TENSORS if inputs.get(name) is not None]


def recurrence(
    member: Member,
    x: dict[str, Tensor],
    options: dict[str, Any],
    rule: Callable[..., tuple[Tensor, Tensor]] = recurrent,
) -> tuple[Tensor, Tensor]:
    """Call the recurrence with the arguments of ``member.op``. Activations are computed by their definitions.
    ``rule``: a function that computes what `recurrent` does."""
    x = dict(x)
    A_log, dt_bias, state = (x.pop(name, None) for name in ("A_log", "dt_bias", "initial_state"))
    bounds, T = options.get("cu_seqlens"), x["q"].shape[1]
    bounds = None if bounds is None else bounds.tolist()
    if bounds is not None:  # leave out guard rows, since autograd turns their 0 * NaN into NaN
        x = {n: t[:, : bounds[-1] * (member.updates if n in OF_UPDATES else 1)] for n, t in x.items()}
    v_first = options.get("state_v_first", False)
    if options.get("use_qk_l2norm_in_kernel"):
        for name in x.keys() & {"q", "k", "p"}:
            x[name] = x[name] * torch.rsqrt(x[name].square().sum(-1, keepdim=True) + NORM_EPS)
    if options.get("use_beta_sigmoid_in_kernel"):
        for name in x.keys() & {"beta", "b", "w"}:
            x[name] = torch.sigmoid(x[name]) * (2 if options.get("allow_neg_eigval") and name != "w" else 1)
    if member.channel_strength:
        w, b = x.pop("w"), x.pop("b")
        x |= {"v": w * x["v"], "p": b * x["k"].repeat_interleave(b.shape[2] // x["k"].shape[2], 2)}
    if options.get("use_gate_in_kernel"):
        bound, dtype = options.get("lower_bound"), x["g"].dtype
        if member.gate == "scalar":
            x["g"] = naive_gdn_gate(x["g"], A_log, dt_bias, dtype)
        elif bound is None:
            x["g"] = naive_kda_gate(x["g"], A_log, dt_bias, dtype)
        else:
            x["g"] = naive_kda_lowerbound_gate(x["g"], A_log, dt_bias, bound, dtype)
    elif options.get("lower_bound") is not None:
        x["g"] = x["g"].clamp(min=options["lower_bound"])
    if member.updates > 1:  # a token of its own for each update: the first one decays, the last one is read
        rows = {"q": member.updates - 1, "g": 0}
        for name in x.keys() & rows.keys():
            y = x[name].new_zeros(len(x[name]), x["k"].shape[1], *x[name].shape[2:])
            y[:, rows[name] :: member.updates] = x[name]
            x[name] = y
        bounds = None if bounds is None else [member.updates * bound for bound in bounds]
    o, final_state = rule(
        **x,
        scale=options.get("scale"),
        erase=("undecayed" if member.erase_keys else "decayed") if member.delta else None,
        initial_state=state.mT if v_first and state is not None else state,
        cu_seqlens=bounds,
    )
    o = o[:, member.updates - 1 :: member.updates]
    o = torch.nn.functional.pad(o, (0, 0, 0, 0, 0, T - o.shape[1]))
    return o, final_state.mT if v_first else final_state


def with_gradients(o: Tensor, final_state: Tensor, x: dict[str, Any], dtype: torch.dtype) -> Results:
    """Add the gradients of <o, do> + <final_state, dS>. do is rounded to ``dtype``, so that the loss is always the
    same."""
    gen = torch.Generator().manual_seed(1)
    do = torch.randn(o.shape, generator=gen, dtype=torch.float64).to(dtype)
    dS = torch.randn(final_state.shape, generator=gen, dtype=torch.float32)
    outputs = [(y, dy.to(y.device, y.dtype)) for y, dy in ((o, do), (final_state, dS)) if y.requires_grad]
    names = tensors_of(x)
    if outputs:
        ys, dys = zip(*outputs, strict=True)
        gradients = torch.autograd.grad(ys, [x[n] for n in names], dys, allow_unused=True, materialize_grads=True)
    else:  # no tokens, so the recurrence did not use its inputs
        gradients = [torch.zeros_like(x[n]) for n in names]
    results = {"o": o.detach(), "final_state": final_state.detach()}
    return results | {f"d{name}": d for name, d in zip(names, gradients, strict=True)}
