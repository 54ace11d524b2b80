"""The key of everything that compiled code depends on: flags of a problem, layouts of tensors."""

from collections.abc import Sequence
from itertools import zip_longest
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

PREFILL = ("prefill",)  # the kind of calls with a pool
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
    return Flags(kind, *_compiled(p), *gate, *pools, p.most_beta > 1)


def key_of(flags: NamedTuple, tensors: tuple[tuple | None, ...]) -> int:
    """The number of a key."""
    names = NAMES if flags.kind == PREFILL else Inputs._fields
    layouts = tuple([
        None if t is None else _layout(*t, fixed=POOLS.get(name, 0))
        for name, t in zip_longest(names[: len(tensors)], tensors)
    ])  # fmt: skip
    with _numbering:
        return key_numbers.setdefault((flags, layouts), len(key_numbers))


def _layout(dtype: torch.dtype, strides: tuple[int, ...], alignment: int, *, fixed: int) -> TensorLayout:
    """The properties that Triton compiles for.

    * Of a stride: whether it is 1, whether it needs 64 bits, and its remainder by 16.
    * Of indices and of parameters, which are contiguous: no stride.
    * Of a pool: also the last ``fixed`` strides themselves, which are constants of `decode`.
    """
    if len(strides) < 3 or not dtype.is_floating_point:
        return TensorLayout(dtype, alignment == 0, ())
    places = len(strides) - fixed
    return TensorLayout(dtype, alignment == 0, (*_classes(strides[:places]), *strides[places:]))


def _classes(strides: Sequence[int]) -> tuple[tuple[int, bool, bool], ...]:
    return tuple([(stride % 16, stride == 1, stride < 2**31) for stride in strides])
