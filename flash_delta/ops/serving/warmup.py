"""Everything compiled before the first request, from examples of calls."""

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_delta.ops._backend import Explain, Explanation
from flash_delta.ops._check.options import refuse
from flash_delta.ops.serving.around import Convolution
from flash_delta.ops.serving.decode import decode_gated_delta_rule, decode_kda
from flash_delta.ops.serving.gdn2 import decode_gdn2, prefill_gdn2
from flash_delta.ops.serving.int8 import Int8States, dequantize_states, quantize_states
from flash_delta.ops.serving.prefill import prefill_gated_delta_rule, prefill_kda
from flash_delta.ops.serving.ring import Ring, commit
from flash_delta.problem import Problem

OPS = (decode_gated_delta_rule, decode_gdn2, decode_kda, prefill_gated_delta_rule, prefill_gdn2, prefill_kda)
ON_STATES = (commit, dequantize_states, quantize_states)  # of all layers at once
TOKENS, POOLS, VECTORS = ("q", "k", "v", "g", "beta", "b", "w"), ("state_pool", "write_pool"), ("A_log", "dt_bias")
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
        calls: pairs of an op and the arguments of a call, by name: a serving op, `commit`, `quantize_states` or
            `dequantize_states`. Its tensors may be on "meta", and all its indices may be padding.
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
    if op in ON_STATES:
        pool = arguments.get("state_pool")
        # If it is not a tensor, the op refuses it.
        place = _place(pool.device if isinstance(pool, Tensor) else torch.device("cpu"), device)
        op(**{name: _few_states(value, place) for name, value in arguments.items()})
        return
    problem = described("warmup", op, arguments).problem
    place = _place(problem.device, device)
    for rows, T in _sizes(problem, arguments.get("convolution")):
        op(**_stand_ins(arguments, rows, T, place))


def _place(of_example: torch.device, device: torch.device | str) -> torch.device:
    """Where a call like the example runs."""
    if of_example.type != "meta":
        return of_example
    place = torch.device(device)
    if place.type == "meta" or (place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count()):
        refuse("warmup", "device", 'a device that this process has, for a call on "meta"', place)
    return place


def _few_states(value: Any, device: torch.device) -> Any:
    """Makes the same argument for two slots, pages or rows, which are padding, and for one of several layers."""
    if isinstance(value, Ring):
        layers = value.k.ndim == 5
        return Ring(*(None if t is None else _few(t, layers and t.ndim > 1, device) for t in value))
    if isinstance(value, Int8States):
        return Int8States(*(_few(t, t.ndim == 5, device) for t in value))
    return _few(value, value.ndim == 5, device) if isinstance(value, Tensor) else value


def _few(t: Tensor, layers: bool, device: torch.device) -> Tensor:
    return _like(t, (1, 2, *t.shape[2:]) if layers else (2, *t.shape[1:]), device)


@torch.no_grad()
def described(caller: str, op: Callable[..., Any], arguments: dict[str, Any]) -> Explanation:
    """Checks a call of a serving op, which does not run."""
    if op not in OPS:
        known = OPS + (ON_STATES if caller == "warmup" else ())
        refuse(caller, "op", f"one of {', '.join(o.__name__ for o in known)}", getattr(op, "__name__", repr(op)))
    return op(**arguments | {"backend": Explain(arguments.get("backend"))})


def _sizes(p: Problem, convolution: Convolution | None) -> tuple[tuple[int, int], ...]:
    """Numbers of rows and of their tokens that stand for all. Decoding one token compiles another kernel than decoding
    several, unless rows are packed. Prefill compiles for two kinds of row stride: multiples of 16, and others.
    Decoding has two rows, since calls of one token are known as the same call however it lies."""
    if not p.recurrent:
        return (1, 3), (1, 16)
    alone = p.pools.rolling and convolution.pool.shape[2] < p.pools.taps  # a window has room for one token only
    return ((2, 1),) if p.packed or alone else ((2, 1), (2, 2))


def _stand_ins(arguments: dict[str, Any], rows: int, T: int, device: torch.device) -> dict[str, Any]:
    """The arguments of a call for rows or sequences of T tokens, all of them padding. ``out`` is left out, since no
    code depends on it."""
    x = {name: value for name, value in arguments.items() if name != "out"}
    size = (rows, T) if x.get("cu_seqlens") is None else (1, rows * T)
    for name, t in x.items():
        if name in TOKENS:
            x[name] = _tokens(t, size, device)
        elif name in POOLS and t is not None:
            x[name] = _pool(t, T, 4, device)
        elif name == "cu_seqlens" and t is not None:
            x[name] = _like(t, (rows + 1,), device).copy_(torch.arange(rows + 1) * T)
        elif isinstance(t, Tensor):
            shape = t.shape if name in VECTORS else (rows, T if name in TABLES else 1)[: t.dim()]
            x[name] = _like(t, shape, device)
    convolution, norm, ring = x.get("convolution"), x.get("output_norm"), x.get("ring")
    if ring is not None:  # every page index is padding
        tables = (None if t is None else _like(t, (rows,), device) for t in ring[3:])
        x["ring"] = Ring(*(_like(t, (2, *t.shape[1:]), device) for t in ring[:3]), *tables)
    if convolution is not None:
        pool, weight, bias, target, _ = convolution
        x["convolution"] = convolution._replace(
            pool=_pool(pool, T, 3, device),
            weight=_like(weight, weight.shape, device),
            bias=None if bias is None else _like(bias, bias.shape, device),
            write_pool=None if target is None else _pool(target, T, 3, device),
        )
    if norm is not None:
        weight = _like(norm.weight, norm.weight.shape, device)
        x["output_norm"] = norm._replace(gate=_tokens(norm.gate, size, device), weight=weight)
    return x


def _tokens(t: Tensor, size: tuple[int, int], device: torch.device) -> Tensor:
    """So many rows and tokens, which lie as those of t ``[B, T, ...]``. Rows follow each other without gaps, unless
    rows of t have gaps, or a stride that is no multiple of a token's."""
    (B, T), (row, token, *others) = t.shape[:2], t.stride()
    token = token if T > 1 else row
    gaps = row != T * token if B > 1 and T > 1 else token == 0 or row % token > 0
    return _like(t, (*size, *t.shape[2:]), device, (row if gaps else size[1] * token, token, *others))


def _pool(t: Tensor, T: int, axes: int, device: torch.device) -> Tensor:
    """Two slots of a pool whose slots make it have so many ``axes``, or two rows with room for more than T tokens. They
    lie as close to each other as slots of which compiled code knows the same: how far they lie apart, modulo 16."""
    inner = (T + 1, *t.shape[2:]) if t.dim() > axes else t.shape[1:]
    apart, *strides = t.stride()
    if apart < 2**31:
        span = _span(inner, strides)
        apart = span + (apart - span) % 16
    return _like(t, (min(len(t), 2), *inner), device, (apart, *strides))


def _like(t: Tensor, size: Sequence[int], device: torch.device, strides: Sequence[int] | None = None) -> Tensor:
    """A tensor of padding: numbers are 0, and indices -1. Its strides are those of t unless given, and its address is
    as far from a multiple of 16 bytes."""
    strides, start = strides or t.stride(), t.data_ptr() % 16 // t.element_size()
    memory = torch.empty(start + _span(size, strides), dtype=t.dtype, device=device)
    return memory.fill_(0 if t.is_floating_point() else -1).as_strided(size, strides, start)


def _span(size: Sequence[int], strides: Sequence[int]) -> int:
    """How many numbers there are from a tensor's first to its last."""
    return 1 + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
