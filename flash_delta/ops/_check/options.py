"""Casts scalar options, so that the rest of the library gets Python's own float, int, bool or None.

Kernels are compiled for the types of their numbers, and calls are looked up by values. So 1 and 1.0 have to become the
same number.
"""

from numbers import Integral, Real
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, get_origin, get_type_hints

import torch
from torch import Tensor

from flash_delta.problem import Form

LOWEST_BOUND = -5.0  # kernels for bounded gates compute e^(15 * 5), 15 tokens at this bound, which fits float32
BOUNDS = f"a number in [{LOWEST_BOUND:g}, 0)"
CHUNK_SIZES = (16, 32, 64)
NULLS = "a number of at least 0 or None (an index below 0 is padding in any case)"
MULTIPLES = "a positive multiple of 64 or None"
ACTIVATIONS = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}  # of gated norms
CHUNKS = f"one of {', '.join(map(str, CHUNK_SIZES))}"


class PoolOptions(NamedTuple):
    """The options that only serving ops have. They are the first fields of Pools, where numbers stand for None."""

    eps: float | None
    activation: str | None
    rolling: bool
    null_slot: int | None
    checkpoint_every: int | None
    max_prompts: int | None


class Options(NamedTuple):
    """The options of an op: all arguments except tensors. A flag is annotated with the name that callers use."""

    op: str
    gate: Form
    erase: Literal["decayed", "undecayed"] | None
    optional_beta: bool = False
    channel_strength: bool = False
    scale: float | None = None
    chunk_size: int = 64
    recurrent: bool = False
    l2norm: Annotated[bool, "use_qk_l2norm_in_kernel"] = False
    raw_beta: Annotated[bool, "use_beta_sigmoid_in_kernel"] = False
    neg_eigval: bool | None = None
    state_v_first: Annotated[bool, "state_v_first"] = False
    keep_states: Annotated[bool, "return_intermediate_states"] = False
    disable_recompute: Annotated[bool, "disable_recompute"] = False
    batch_invariant: Annotated[bool, "batch_invariant"] = False
    pools: tuple[Any, ...] | None = None  # of a serving op: the fields of PoolOptions
    steps: int = 1


_hints = get_type_hints(Options, include_extras=True)
FLAGS = {name: hint.__metadata__[0] for name, hint in _hints.items() if get_origin(hint) is Annotated}


def refuse(op: str, name: str, expected: Any, got: Any) -> NoReturn:
    raise ValueError(f"{op}: {name}: expected {expected}, got {got}")


def cast(options: Options) -> Options:
    """Returns the options with Python's own numbers. Raises ValueError if a value is not a number or out of range."""
    op, scale, doubled, (kind, raw, bound) = options.op, options.scale, options.neg_eigval, options.gate
    if isinstance(scale, Tensor):  # the host would have to fetch its value, and its gradient would be lost
        refuse(op, "scale", "a number or None (o is proportional to it: multiply o by a tensor)", "a tensor")
    size = as_int(op, "chunk_size", options.chunk_size, CHUNKS, CHUNK_SIZES[0])
    if size not in CHUNK_SIZES:
        refuse(op, "chunk_size", CHUNKS, size)
    return options._replace(
        scale=None if scale is None else as_float(op, "scale", scale, "a number or None"),
        chunk_size=size,
        gate=(kind, as_bool(op, "use_gate_in_kernel", raw), None if bound is None else as_lower_bound(op, bound)),
        neg_eigval=None if doubled is None else as_bool(op, "allow_neg_eigval", doubled),
        pools=None if options.pools is None else _cast_pools(op, *options.pools),
        **{field: as_bool(op, name, getattr(options, field)) for field, name in FLAGS.items()},
    )


def _cast_pools(op: str, eps: Any, activation: Any, rolling: Any, null: Any, every: Any, most: Any) -> tuple[Any, ...]:
    return (
        None if eps is None else as_eps(op, "output_norm.eps", eps),
        activation,
        as_bool(op, "convolution.rolling", rolling),
        None if null is None else as_int(op, "null_slot", null, NULLS, 0),
        None if every is None else as_int(op, "checkpoint_every", every, MULTIPLES, 64, step=64),
        None if most is None else as_int(op, "max_prompts", most, "a number of at least 0 or None", 0),
    )


def as_float(op: str, name: str, value: Any, expected: str = "a number", lowest: float | None = None) -> float:
    """The value as a finite float of at least ``lowest``."""
    largest = torch.finfo(torch.float32).max  # kernels take float32; torch.compile would make a global float a symbol
    is_one = _is_a(value, (Real, torch.SymFloat, torch.SymInt)) and -largest <= value <= largest
    if not is_one or (lowest is not None and value < lowest):
        refuse(op, name, expected, repr(value))
    return float(value)


def as_lower_bound(op: str, value: Any) -> float:
    bound = as_float(op, "lower_bound", value, BOUNDS, LOWEST_BOUND)
    if bound >= 0:
        refuse(op, "lower_bound", BOUNDS, repr(value))
    return bound


def promised_bound(op: str, safe_gate: bool, raw: bool, bound: float | None) -> float | None:
    """The least log decay that the caller promises with ``safe_gate``, or else the bound itself."""
    if not as_bool(op, "safe_gate", safe_gate) or bound is not None:
        return bound
    if raw:
        refuse(op, "lower_bound", f"{BOUNDS} with safe_gate and use_gate_in_kernel", "None")
    return LOWEST_BOUND


def as_eps(op: str, name: str, value: Any) -> float:
    return as_float(op, name, value, "a number of at least 0", 0.0)


def as_int(op: str, name: str, value: Any, expected: str, lowest: int, step: int = 1) -> int:
    """The value as an int: a multiple of ``step``, at least ``lowest``, and small enough for kernels."""
    is_one = _is_a(value, (Integral, torch.SymInt)) and lowest <= value < 2**31 and value % step == 0
    if not is_one:
        refuse(op, name, expected, repr(value))
    return int(value)


def as_size(op: str, name: str, value: Any) -> int:
    """The size of an axis as an int."""
    return as_int(op, name, value, "a whole number from 1 to 2^31 - 1", 1)


def as_bool(op: str, name: str, value: Any) -> bool:
    """The value as a bool. It may be a numpy bool, 0 or 1. Strings are refused, since "False" would be true."""
    if isinstance(value, bool):
        return value
    number = value.item() if hasattr(value, "item") and not isinstance(value, Tensor) else value
    if not isinstance(number, Integral) or number not in (0, 1):
        refuse(op, name, "True or False", repr(value))
    return bool(number)


def _is_a(value: Any, numbers: tuple[type, ...]) -> bool:
    """Whether the value is one of these numbers. A bool, which is an int in Python, is not."""
    return isinstance(value, numbers) and not isinstance(value, bool)
