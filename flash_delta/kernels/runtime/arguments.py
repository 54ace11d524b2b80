"""The arguments that launchers give to kernels: constants, widths of tiles, strides."""

from math import gcd
from typing import Any

import torch
import triton.language as tl

from flash_delta.kernels.device.chunk import C
from flash_delta.kernels.runtime.chip import Chip, Tile, next_power_of_2, overlaps, precision
from flash_delta.kernels.runtime.plan import EVERY, Draft, Layout, Making, Step
from flash_delta.problem import SHORT, Inputs, Problem, Slots

LONG = 2**30  # in tokens, more than any sequence has
# Numbers that kernels take between their other numbers and their constants. So no number of heads compiles kernels, and
# only their ratio may, which is GROUP as a constant, and ``group`` where it may be a number, too. The few kernels that
# are slower with numbers name them as constants.
HEADS = "H", "HV", "group"
PER_TOKEN = ["g_token", "g_head", "beta_token", "beta_head"]  # strides of single numbers, whose alignment never matters


def draft_of(p: Problem, chip: Chip, x: Inputs, choice: Any = None, made: Making | None = None) -> Draft:
    """A draft without steps. ``x``: layouts. Parameters per head and bounds are contiguous in it, as they nearly always
    are: kernels take no strides of these."""
    made = Making() if made is None else made
    x = x._replace(A_log=made.whole(x.A_log), dt_bias=made.whole(x.dt_bias), cu_seqlens=made.whole(x.cu_seqlens))
    return Draft(p, x, chip, choice is EVERY, _of_problem(p, chip, x), made, [])


def draft_as(c: Draft, p: Problem, x: Inputs) -> Draft:
    """Returns the draft for launches of another problem. ``x`` has contiguous vectors, as in ``c``."""
    return c._replace(p=p, x=x, constants=_of_problem(p, c.chip, x))


def launch_rule(
    c: Draft,
    kernel: Any,
    pointers: tuple[Any, ...],
    grid: tuple[int, int, int],
    t: Tile,
    *scalars: Any,
    follows: bool = False,
    contracts: bool = True,
    **own: Any,
) -> None:
    """Plans a launch with the problem's numbers and constants that the kernel has parameters for. ``own``: constants of
    this launch."""
    arguments, constants = (*pointers, *scalars), {"BV": columns(c.p, t), **c.constants, **own}
    used = {name: constants[name] for name in kernel.arg_names[len(arguments) :] if name in constants}
    constant = kernel.fn.__annotations__
    arguments += tuple([used.pop(name) for name in [*used] if name in HEADS and name not in constant])
    c.steps.append(Step(kernel, grid, t, arguments, used, follows and constants["OVERLAP"], contracts))


def state_unit(p: Problem) -> float:
    """The number by which gradients of states in memory are divided, with a decay per channel: the scale without its
    sign. So no kernel has to multiply gradients of o by the scale and round them for the next product. It is 1 in
    float16, in which quotients may be too large, and for unusual scales."""
    usual = p.dtype != torch.float16 and 2.0**-20 < abs(p.scale) < 2.0**20
    return abs(p.scale) if usual else 1.0


def _of_problem(p: Problem, chip: Chip, x: Inputs) -> dict[str, Any]:
    return {
        "H": p.H, "HV": p.HV, "group": p.HV // p.H, "GROUP": p.HV // p.H, "K": p.K, "BK": block(p.K), "V": p.V, "C": C,
        "PACKED": p.packed, "HAS_BETA": x.beta is not None, "RAW_BETA": p.raw_beta, "NORM": p.l2norm,
        "ERASE": p.erase is not None, "UNDECAYED": p.erase == "undecayed", "OWN_P": x.p is not None,
        "STRENGTH": p.channel_strength,
        "PRECISION": precision(p.dtype, chip), "OVERLAP": overlaps(p, chip), "SHORT": short(p), "WIDTH": p.K,
        "V_FIRST": p.state_v_first, "REFLECTS": p.most_beta > 1, "STEPS": p.steps, **p.gate.constants(),
    }  # fmt: skip


def short(p: Problem) -> int:
    """The most tokens of a packed sequence that `decode` runs; 0 if it runs none."""
    if not p.packed or p.pools is None or p.batch_invariant or p.pools.most_tokens:
        return 0
    return LONG if p.recurrent else SHORT


def columns(p: Problem, t: Tile) -> int:
    """The number of value columns of a tile."""
    return min(t.BV, block(p.V))


def block(width: int) -> int:
    """The width of the tile for a head's width: a power of two that products can take."""
    return max(16, next_power_of_2(width))


def strides_if(t: Layout | None) -> tuple[Any, ...] | None:
    """Returns `strides`, or None without a tensor."""
    return None if t is None else strides(t)


UNITS = {unit: tl.constexpr(unit) for unit in (1, 2, 4, 8, 16)}


def strides(t: Layout) -> tuple[Any, ...]:
    """Strides of (batch, token, head, channel), and the `unit` of the first three.

    The unit decides how wide loads are. With usual heads it is 16 for every T. It causes no more compilations than
    strides do, since Triton compiles for their remainders by 16.
    """
    return *t.stride(), UNITS[unit(t)]


def unit(t: Layout) -> int:
    """The largest power of 2, up to 16, that divides the strides of batch, token and head. It is 1 if channels have
    gaps, or if the address is no multiple of 16 bytes."""
    *rows, channel = t.stride()
    return gcd(*rows, 16) if channel == 1 and t.offset == 0 else 1


def batch(t: Layout | None) -> int:
    """The batch stride of g or beta. Kernels are not specialised for it: it depends on T, and no length may compile."""
    return 0 if t is None else t.stride(0)


def tokens(t: Layout | None) -> tuple[int, ...]:
    """The other strides of g or beta: (token, head)."""
    return (0, 0) if t is None else t.stride()[1:]


def states(p: Problem, t: Layout | None) -> tuple[int, ...]:
    """Strides of (sequence, head, key, value) in either layout, also of a pool with an axis of tokens."""
    if t is None:
        return 0, 0, 0, 0
    sequence, *_, head, rows, columns = t.stride()
    matrix = rows, columns
    return sequence, head, *(reversed(matrix) if p.state_v_first else matrix)


def table(t: Layout | None) -> tuple[int, int]:
    """Strides of (row, column) of indices. Without columns all tokens have the same index."""
    return (0, 0) if t is None else (*t.stride(), 0)[:2]


def count_checkpoints(s: Slots) -> int:
    """The number of checkpoints that a sequence can leave."""
    if s.checkpoint_indices is None:
        return 0
    return s.checkpoint_indices.shape[1] if s.checkpoint_offsets is None else 1


def checkpoint_table(indices: Layout | None, offsets: Layout | None) -> tuple[int, int]:
    """Strides of (row, column) of a call's checkpoints. With offsets there is only one column. The second stride is
    then that of the offsets, so kernels need no further parameter."""
    return table(indices) if offsets is None else (indices.stride(0), offsets.stride(0))


def fits_tma(p: Problem, *tensors: Layout) -> bool:
    """Whether descriptors can describe the heads of these tensors, and of the output, which has no gaps."""
    described = (
        t.dtype.itemsize == 2 and t.stride(3) == 1 and not any(s % 8 for s in t.stride()[:3]) and t.offset == 0
        for t in tensors
    )
    return p.K % 8 == 0 and p.V % 8 == 0 and all(described)
