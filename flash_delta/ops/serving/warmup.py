"""Everything compiled before the first request, from examples of calls."""

import gc
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from flash_delta.ops._backend import Explain
from flash_delta.ops._check.options import refuse
from flash_delta.ops.serving.around import Convolution
from flash_delta.ops.serving.decode import decode_gated_delta_rule, decode_kda
from flash_delta.ops.serving.prefill import prefill_gated_delta_rule, prefill_kda
from flash_delta.problem import Problem

OPS = (decode_gated_delta_rule, decode_kda, prefill_gated_delta_rule, prefill_kda)
TOKENS, POOLS, VECTORS = ("q", "k", "v", "g", "beta"), {"state_pool": 4, "write_pool": 4}, ("A_log", "dt_bias")
TABLES = ("write_indices", "parent_idx")  # tensors that may have a column for each token


def warmup(
    calls: Iterable[tuple[Callable[..., Any], dict[str, Any]]], device: torch.device | str = "cuda"
) -> list[float]:
    """Compile everything that calls like the examples can need, for any B, T, N, number of slots, and values.

    A later call is like an example if it has the same op, options and optional arguments, and if its tensors have the
    same dtypes and widths and lie in the same way: as slices of a projection with as many outputs, in pools with the
    same gaps, from addresses that are multiples of 16 bytes or not. ``scale`` may differ. Tables of indices may have
    any number of columns. Give an example for each way in which the server calls, with several rows and tokens where
    it can have several: an axis of size 1 does not show how a tensor lies.

    The examples' tensors are neither read nor written. Small tensors of padding stand in for them. Their memory is free
    again when the function returns. Run it in every process, outside of the capture of a CUDA graph. It creates a CUDA
    context. :func:`flash_delta.forbid_compilation` then shows whether you forgot something.

    At its end it calls ``gc.freeze()``, because a full garbage collection visits every object of every library and
    stops requests for some 100 ms. After ``gc.freeze()`` Python still frees objects to which nothing refers, except
    cycles that existed before. ``gc.unfreeze()`` undoes it.

    Args:
        calls: pairs of a serving op and the arguments of a call, by name. Its tensors may be on "meta", and all its
            indices may be padding.
        device: where the server will call, for examples on "meta". Other examples are for the device of their tensors.

    Returns:
        Seconds for each example. The time is near zero if Triton has the kernels on disk, or if an earlier example has
        compiled them.

    Raises:
        ValueError: naming the argument of ``warmup`` or of the op, what was expected and what came.
        TypeError: if arguments are missing, or if the op does not have them.

    Example:
        >>> import torch
        >>> from flash_delta import decode_kda
        >>> from flash_delta.ops.serving import warmup
        >>> q = k = v = g = torch.empty(2, 1, 4, 64, device="meta")
        >>> beta, pool = q[..., 0], torch.empty(8, 4, 64, 64, device="meta")
        >>> rows = torch.empty(2, dtype=torch.int32, device="meta")
        >>> call = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "state_pool": pool, "read_indices": rows}
        >>> call |= {"write_indices": rows, "state_v_first": True}
        >>> seconds = warmup([(decode_kda, call)], device="cpu")  # nothing to compile there
        >>> len(seconds)
        1
    """
    seconds = []
    for op, arguments in calls:
        start = time.perf_counter()
        compile_call(op, arguments, device)
        seconds.append(time.perf_counter() - start)
    gc.collect()
    gc.freeze()
    return seconds


@torch.no_grad()
def compile_call(op: Callable[..., Any], arguments: dict[str, Any], device: torch.device | str = "cuda") -> None:
    """Runs calls like this one, on padding of all lengths for which other code is compiled."""
    problem = described("warmup", op, arguments)
    place = problem.device
    if place.type == "meta":
        place = torch.device(device)
        if place.type == "meta" or (place.type == "cuda" and not torch.cuda.is_available()):
            refuse("warmup", "device", 'a device that this process has, for a call on "meta"', place)
    for T in _lengths(problem, arguments.get("convolution")):
        op(**_stand_ins(arguments, T, place))


@torch.no_grad()
def described(caller: str, op: Callable[..., Any], arguments: dict[str, Any]) -> Problem:
    """Checks a call of a serving op, which does not run."""
    if op not in OPS:
        refuse(caller, "op", f"one of {', '.join(o.__name__ for o in OPS)}", getattr(op, "__name__", repr(op)))
    return op(**arguments | {"backend": Explain(arguments.get("backend"))}).problem


def _lengths(p: Problem, convolution: Convolution | None) -> tuple[int, ...]:
    """Lengths that stand for all. Decoding one token compiles another kernel than decoding several, unless rows are
    packed. Prefill compiles for three kinds of row stride: one, multiples of 16, and others."""
    if not p.recurrent:
        return 1, 3, 16
    alone = p.rolling and convolution.pool.shape[2] < p.taps  # a window has room for one token only
    return (1,) if p.packed or alone else (1, 2)


def _stand_ins(arguments: dict[str, Any], T: int, device: torch.device) -> dict[str, Any]:
    """The arguments of a call for one row or sequence of T tokens, which is padding. ``out`` is left out, since no code
    depends on it."""
    x = {name: value for name, value in arguments.items() if name != "out"}
    for name, t in x.items():
        if name in TOKENS:
            x[name] = _tokens(t, T, device)
        elif name in POOLS and t is not None:
            x[name] = _pool(t, T, 4, device)
        elif name == "cu_seqlens" and t is not None:
            x[name] = _like(t, (2,), device)
            x[name][0], x[name][1] = 0, T
        elif isinstance(t, Tensor):
            size = t.shape if name in VECTORS else (1, T if name in TABLES else 1)[: t.dim()]
            x[name] = _like(t, size, device)
    convolution, norm = x.get("convolution"), x.get("output_norm")
    if convolution is not None:
        x["convolution"] = _convolution(convolution, T, device)
    if norm is not None:
        weight = _like(norm.weight, norm.weight.shape, device)
        x["output_norm"] = norm._replace(gate=_tokens(norm.gate, T, device), weight=weight)
    return x


def _convolution(given: Convolution, T: int, device: torch.device) -> Convolution:
    pool, weight, bias, target, rolling = given
    return Convolution(
        _pool(pool, T, 3, device),
        _like(weight, weight.shape, device),
        None if bias is None else _like(bias, bias.shape, device),
        None if target is None else _pool(target, T, 3, device),
        rolling,
    )


def _tokens(t: Tensor, T: int, device: torch.device) -> Tensor:
    """One row of T tokens, which lie as those of t ``[B, T, ...]``. Rows follow each other without gaps, unless rows of
    t have gaps, or strides that are no multiples of a token's."""
    (B, length), (row, token, *others) = t.shape[:2], t.stride()
    token = token if length > 1 else row
    gaps = row != length * token if B > 1 and length > 1 else token == 0 or row % token > 0
    return _like(t, (1, T, *t.shape[2:]), device, (row if gaps else T * token, token, *others))


def _pool(t: Tensor, T: int, axes: int, device: torch.device) -> Tensor:
    """One slot, or one row with room for T tokens, of a pool whose slots make it have so many ``axes``. Kernels see how
    far slots lie apart in one slot, unless the copy engine cannot take the stride: it has to look at two."""
    slots = 2 if len(t) > 1 and t.stride(0) * t.element_size() % 16 else 1
    return _like(t, (slots, T, *t.shape[2:]) if t.dim() > axes else (slots, *t.shape[1:]), device)


def _like(t: Tensor, size: tuple[int, ...], device: torch.device, strides: tuple[int, ...] | None = None) -> Tensor:
    """A tensor of padding: numbers are 0, and indices -1. Its strides are those of t unless given, and its address is
    as far from a multiple of 16 bytes."""
    strides, start = strides or t.stride(), t.data_ptr() % 16 // t.element_size()
    end = start + 1 + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
    memory = torch.empty(end, dtype=t.dtype, device=device).fill_(0 if t.is_floating_point() else -1)
    return memory.as_strided(size, strides, start)
