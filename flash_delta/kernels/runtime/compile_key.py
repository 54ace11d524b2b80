"""The key of everything that compiled code depends on: flags of a problem, layouts of tensors."""

from collections.abc import Sequence
from itertools import zip_longest
from math import gcd
from operator import attrgetter
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from flash_delta.problem import (
    Around,
    Compiled,
    Inputs,
    Pools,
    Problem,
    Slots,
    marked,
)

DECODE, STEP, PREFILL = ("decode",), ("step",), ("prefill",)  # kinds of calls
SERVING = (*DECODE, *STEP, *PREFILL)  # the first words of kinds of calls with a pool
TOKENS = ("q", "k", "v", "g", "beta", "norm_gate")
POOLS = {"state_pool": 3, "write_pool": 3, "conv_pool": 2, "conv_write_pool": 2}  # axes of a state, or of a window
NAMES = (*Inputs._fields, *Slots._fields, *Around._fields)  # names of a serving call's tensors


# Everything that compiled code depends on, except tensors.
Flags = NamedTuple(
    "Flags",
    [
        ("kind", tuple),
        *marked(Problem, Compiled).items(),
        ("gate", str),  # Gate.kind
        ("raw_gate", bool),
        ("bounded", bool),  # there is a Gate.bound
        *marked(Pools, Compiled).items(),
        ("reflects", bool),  # Problem.most_beta is above 1
        ("alone", bool),  # decoding with one token per row
    ],
)
_compiled, _of_pools = (attrgetter(*marked(fields, Compiled)) for fields in (Problem, Pools))
NO_POOLS = Pools()


class TensorLayout(NamedTuple):
    """The properties of a tensor that compiled code depends on."""

    dtype: torch.dtype
    aligned: bool  # its address is a multiple of 16 bytes
    strides: tuple  # the properties of strides that matter


Key = tuple[NamedTuple, tuple[TensorLayout | None, ...]]

key_numbers: dict[Key, int] = {}  # keys are numbered as they come
_numbering = Lock()  # two keys must not get the same number


def laid_out(*tensors: Tensor | None) -> tuple[tuple | None, ...]:
    """The facts about tensors that `_layout` needs."""
    return tuple([None if t is None else (t.dtype, t.stride(), t.data_ptr() % 16) for t in tensors])


def flags_of(p: Problem, kind: tuple) -> Flags:
    gate, pools = (p.gate.kind, p.gate.raw, p.gate.bound is not None), _of_pools(p.pools or NO_POOLS)
    return Flags(kind, *_compiled(p), *gate, *pools, p.most_beta > 1, kind in (DECODE, STEP) and alone(p))


def key_of(flags: NamedTuple, tensors: tuple[tuple | None, ...]) -> int:
    """The number of a key."""
    names = NAMES if flags.kind[0] in SERVING else Inputs._fields
    counted, one = (TOKENS, flags.alone) if flags.kind in (DECODE, STEP) else ((), False)
    layouts = tuple([
        None if t is None else _layout(*t, counted=name in counted, fixed=POOLS.get(name, 0), alone=one)
        for name, t in zip_longest(names[: len(tensors)], tensors)
    ])  # fmt: skip
    with _numbering:
        return key_numbers.setdefault((flags, layouts), len(key_numbers))


def _layout(
    dtype: torch.dtype, strides: tuple[int, ...], alignment: int, *, counted: bool, fixed: int, alone: bool
) -> TensorLayout:
    """The properties that Triton compiles for.

    * Of a stride: whether it is 1, whether it needs 64 bits, and its remainder by 16.
    * Of indices and of parameters, which are contiguous: no stride.
    * If tokens are ``counted``: of the first two strides only their unit, and whether they need 64 bits, counted in it.
    * Of a pool: also the last ``fixed`` strides themselves, which are constants of `decode`.
    """

    if len(strides) < 3 or not dtype.is_floating_point:
        return TensorLayout(dtype, alignment == 0, ())
    if fixed:
        return TensorLayout(dtype, alignment == 0, (*_classes(strides[:-fixed]), *strides[-fixed:]))
    if not counted:
        return TensorLayout(dtype, alignment == 0, _classes(strides))
    row, token, *others = strides
    size = unit(row, token, alone)
    counts = tuple(stride // size < 2**31 for stride in (row, token))
    return TensorLayout(dtype, alignment == 0, (size, *counts, *_classes(others)))


def _classes(strides: Sequence[int]) -> tuple[tuple[int, bool, bool], ...]:
    return tuple([(stride % 16, stride == 1, stride < 2**31) for stride in strides])


def alone(p: Problem) -> bool:
    """Whether decoding rows have one token. For them `decode` is compiled separately, without a search for more."""
    return p.T == 1 and not p.packed


def unit(row: int, token: int, one: bool) -> int:
    """The unit, up to 16 numbers, in which `decode` counts the strides of rows and tokens. The strides themselves would
    change with T, and the unit usually does not. If rows have one token (``one``), the token's stride may be anything
    and is ignored."""
    return gcd(row, 0 if one else token, 16)
