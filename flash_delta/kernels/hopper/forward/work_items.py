"""The loop's items of work. An item is one value head of one sequence. On a pool an earlier kernel has listed the
sequences and the slots of their states (prompt_list.py)."""

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from flash_delta.kernels.hopper.segments.bounds import extent


class Listed(NamedTuple):
    """The prompts on a pool that a launch walks: those of a list, if there are ``least`` to ``most`` of them."""

    walks: Tensor | None
    least: int
    most: int


NO_LIST = Listed(None, 0, 0)  # without a pool


@gluon.jit
def count_items(items, pool, HV: gl.constexpr):
    """The number of items of work. On a pool an earlier kernel has counted the sequences (prompt_list.py). There is no
    work if their number is outside of this launch's range."""
    if pool is None:
        return items
    else:
        walks, least, most = pool[0], pool[1], pool[2]
        gdc_wait()  # the kernel that makes the list has ended
        count = gl.load(walks)
        return gl.where((count >= least) & (count <= most), count * HV, 0)


@gluon.jit
def bounds(item, cu_seqlens, pool, T, HV: gl.constexpr, PACKED: gl.constexpr):
    """An item's sequence and value head, the sequence's first token in its batch row, and its length."""
    n, hv = item // HV, item % HV
    if pool is not None:
        n = gl.load(pool[0] + 3 * n + 1)
    start, stop = extent(n, cu_seqlens, T, PACKED)
    return n, hv, start, stop - start


@gluon.jit
def ends(item, pool, HV: gl.constexpr):
    """On a pool: the slot that an item's state is read from, and the one that it is written to. -1: there is none."""
    at = pool[0] + 3 * (item // HV) + 2
    return gl.load(at), gl.load(at + 1)
