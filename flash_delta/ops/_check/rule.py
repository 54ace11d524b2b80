"""Checks every argument of an op, once, and makes a :class:`Problem` of the call."""

import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flash_delta.ops._check.options import Options, as_bool, refuse
from flash_delta.ops._transforms import is_traced, refuse_transforms
from flash_delta.problem import Form, Inputs, Problem, gate_of, needs_gradient, strength_dtype

# The options that become fields of a Problem without a change.
SAME = sorted({*Options._fields} & {*Problem._fields} - {"gate", "scale", "pools"})
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)


def describe(x: Inputs, options: Options, cu_seqlens_cpu: Tensor | Sequence[int] | None) -> Problem:
    """Check a call and describe it. Raises ValueError naming the argument, what was expected and what came.

    ``options`` must have gone through `cast`.
    """
    op, gate, kind, erase, scale = options.op, options.gate, options.gate[0], options.erase, options.scale
    B, tokens, H, K = check_shape(op, "q", x.q, "B", "T", "H", "K")
    T = options.steps * tokens
    check_shape(op, "k", x.k, B, T, H, K)
    _, _, HV, V = check_shape(op, "v", x.v, B, T, "HV", "V")
    for name, t in (("q", x.q), ("v", x.v)):
        if 0 in t.shape[2:]:
            refuse(op, name, "at least one head and one channel (axes 2 and 3)", "shape " + str(list(t.shape)))
    if HV % H:
        refuse(op, "v", f"a number of heads (axis 2) that is a multiple of q's {H} heads", HV)
    if x.p is not None:
        check_shape(op, "p", x.p, B, T, H, K)
    if options.channel_strength:
        check_shape(op, "b", x.b, B, T, HV, K)
        check_shape(op, "w", x.w, B, T, HV, V)
    elif x.beta is not None or not (options.optional_beta or erase is None):
        check_shape(op, "beta", x.beta, B, T, HV)
    if kind != "none":
        check_shape(op, "g", x.g, *((B, T, HV, K) if kind == "channel" else (B, tokens, HV)))
    _check_dtypes_and_devices(op, x)
    refuse_transforms(op, x._fields, x)
    _check_gate(op, x, gate, HV)
    strength = x.b if options.channel_strength else x.beta
    if options.raw_beta and strength is None:
        refuse(op, "beta", f"{wanted((B, T, HV))} with use_beta_sigmoid_in_kernel=True", "None")
    if options.neg_eigval and strength is None:
        refuse(op, "allow_neg_eigval", "None or False without beta, which is then 1", "True")
    N = B if x.cu_seqlens is None else check_cu_seqlens(op, x.cu_seqlens, x.q, "q")
    if is_traced(x.q):  # there are no values yet, and B may be a symbol; the operator reads them when it runs
        if x.cu_seqlens is None:
            refuse_unless_none(op, "cu_seqlens_cpu", cu_seqlens_cpu, "there is no cu_seqlens")
        lengths = None if cu_seqlens_cpu is None else torch.as_tensor(cu_seqlens_cpu)
    else:
        lengths = read_lengths(op, x, cu_seqlens_cpu)
    if x.initial_state is not None:
        check_shape(op, "initial_state", x.initial_state, N, HV, *((V, K) if options.state_v_first else (K, V)))
    return Problem(
        B=B, T=T, H=H, HV=HV, K=K, V=V, N=N, dtype=x.q.dtype, device=x.q.device, packed=x.cu_seqlens is not None,
        scale=K**-0.5 if scale is None else scale, gate=gate_of(gate, x.g, x.A_log, x.dt_bias),
        beta_range=2.0 if options.raw_beta and options.neg_eigval else 1.0, most_beta=_most_beta(strength, options),
        erase_keys=x.p is not None, strength_dtype=strength_dtype(x), lengths=lengths, needs_grad=needs_gradient(x),
        **{name: getattr(options, name) for name in SAME},
    )  # fmt: skip


def _most_beta(strength: Tensor | None, options: Options) -> float:
    """How large beta, or b, can be. Of one that is given, only the caller can say it."""
    unknown = options.neg_eigval is None and strength is not None and not options.raw_beta
    return 2.0 if options.neg_eigval or unknown else 1.0


def refuse_unless_none(op: str, name: str, value: Any, why: str) -> None:
    if value is not None:
        refuse(op, name, f"None ({why})", type(value).__name__)


def wanted(shape: tuple[int | str, ...]) -> str:
    sizes = [f"{size}" for size in shape]  # torch.compile does not trace str() of a size
    return f"a tensor [{', '.join(sizes)}]"


def check_shape(op: str, name: str, x: Tensor | None, *expected: int | str) -> torch.Size:
    """Refuse anything except a tensor with these axes. A letter stands for any size."""
    if not isinstance(x, Tensor):
        refuse(op, name, wanted(expected), "None" if x is None else type(x).__name__)
    sizes = x.shape
    if sizes == expected:
        return sizes
    if len(expected) != len(sizes):
        refuse(op, name, wanted(expected), f"shape {list(sizes)}")
    for e, size in zip(expected, sizes, strict=True):
        if e != size and not isinstance(e, str):
            refuse(op, name, wanted(expected), f"shape {list(sizes)}")
    return sizes


def check_kind(
    op: str, name: str, t: Tensor, device: torch.device, dtypes: Sequence[torch.dtype] = DTYPES, like: str = "q"
) -> None:
    """Refuse a tensor of another dtype or on another device than that of the argument ``like``, and any DTensor."""
    if hasattr(t, "to_local"):  # importing DTensor takes longer than importing this library
        refuse(op, name, "a tensor of this rank alone (its to_local() or full_tensor())", f"a {type(t).__name__}")
    if t.dtype not in dtypes:
        one_of = ("a dtype among ", ", ") if dtypes is DTYPES else ("dtype ", " or ")
        refuse(op, name, one_of[0] + one_of[1].join(map(str, dtypes)), t.dtype)
    if t.device != device:
        refuse(op, name, f"a tensor on {device} like {like}", f"one on {t.device}")


def check_cu_seqlens(op: str, cu_seqlens: Tensor, x: Tensor, name: str) -> int:
    """Check bounds. Returns N, the number of sequences in the packed row ``x``, which is the argument ``name``."""
    (count,) = check_shape(op, "cu_seqlens", cu_seqlens, "N + 1")
    check_kind(op, "cu_seqlens", cu_seqlens, x.device, INDEX_DTYPES, name)
    if count == 0:
        refuse(op, "cu_seqlens", "at least one bound, which is 0", "an empty tensor")
    if len(x) != 1:
        refuse(op, name, "batch size 1 with cu_seqlens: pack the sequences into one row", f"batch size {len(x)}")
    return count - 1


def state_layout(op: str, state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    """The value of ``state_v_first``. Older callers name it ``transpose_state_layout``."""
    if transpose_state_layout is None:
        return state_v_first
    if state_v_first:
        refuse(op, "transpose_state_layout", "None with state_v_first=True, its new name", transpose_state_layout)
    if not torch.compiler.is_compiling():
        said = f"{op}: transpose_state_layout is the old name of state_v_first"
        warnings.warn(said, DeprecationWarning, stacklevel=3)
    return as_bool(op, "transpose_state_layout", transpose_state_layout)


def refuse_head_first(op: str, head_first: bool) -> None:
    """Refuse fla's older layout [B, H, T, ...]. Errors about shapes would name the wrong argument."""
    if head_first:
        refuse(op, "head_first", "False (tensors are [B, T, H, ...]: pass x.transpose(1, 2))", True)


def _check_dtypes_and_devices(op: str, x: Inputs) -> None:
    dtype, device = x.q.dtype, x.q.device
    for name, t in zip(x._fields, x, strict=True):
        if t is None:
            continue
        if not isinstance(t, Tensor):
            refuse(op, name, "a tensor or None", type(t).__name__)
        if name != "cu_seqlens":
            check_kind(op, name, t, device)
        if t.dtype is not dtype and name in ("k", "v", "p"):
            refuse(op, name, f"{dtype} like q", t.dtype)


def _check_gate(op: str, x: Inputs, gate: Form, heads: int) -> None:
    kind, raw, bound = gate
    if raw and x.A_log is None and bound is None:
        refuse(op, "A_log", f"a tensor of {heads} elements with use_gate_in_kernel=True", "None")
    biases = heads * x.q.shape[3] if kind == "channel" else heads
    for name, t, count in (("A_log", x.A_log, heads), ("dt_bias", x.dt_bias, biases)):
        if not raw:
            refuse_unless_none(op, name, t, "g is the log decay itself without use_gate_in_kernel=True")
        elif t is not None and t.numel() != count:
            refuse(op, name, f"a tensor of {count} elements", f"shape {list(t.shape)}")


def read_lengths(
    op: str, x: Inputs, cu_seqlens_cpu: Tensor | Sequence[int] | None, wait: bool = False
) -> tuple[int, ...] | None:
    """The sequences' lengths. If only the device has them: None, or with ``wait`` the host waits for them."""
    B, T = x.k.shape[:2]
    if x.cu_seqlens is None:
        refuse_unless_none(op, "cu_seqlens_cpu", cu_seqlens_cpu, "there is no cu_seqlens")
        return (T,) * B
    count, bounds = x.cu_seqlens.numel(), None
    if cu_seqlens_cpu is not None:
        bounds = _bounds(op, "cu_seqlens_cpu", cu_seqlens_cpu, count, T)
    if wait or x.cu_seqlens.device.type == "cpu":
        given, bounds = bounds, _bounds(op, "cu_seqlens", x.cu_seqlens.cpu(), count, T)
        if given not in (None, bounds):
            refuse(op, "cu_seqlens_cpu", f"the values of cu_seqlens, {bounds}", given)
    return None if bounds is None else tuple(b - a for a, b in pairwise(bounds))


def _bounds(op: str, name: str, x: Tensor | Sequence[int], count: int, T: int) -> list[int]:
    if isinstance(x, Tensor) and x.device.type != "cpu":
        refuse(op, name, "a tensor on the CPU", f"one on {x.device}")
    bounds = x.tolist() if isinstance(x, Tensor) else list(x)
    if len(bounds) != count:
        refuse(op, name, f"{count} bounds", len(bounds))
    if bounds[0] != 0:
        refuse(op, name, "0 as the first bound", bounds[0])
    if any(b < a for a, b in pairwise(bounds)):
        refuse(op, name, "bounds that do not decrease", bounds)
    if bounds[-1] > T:
        refuse(op, name, f"bounds up to T = {T}", bounds[-1])
    return bounds
