"""States at rest in int8: from slots of a pool to slots of a store, and back.

    s = amax / 127, rounded so that q s is exact        q = round(x / s)        y = q s

The equations and their bounds are those of reference/elementwise.py, with the same bits. Numbers that share a scale
are along the axis of a state that is reduced. The other axis is kept. A program has BN places of the kept axis, for one
head, one layer and one row of the call: grid (N HV KEPT / BN, layers). Strides of a tensor are those of layers, slots,
heads, the kept axis and the reduced axis. So the same code has a scale per row or per column.

Only the device knows indices. A row with an index that names no slot is padding.
"""

import triton
import triton.language as tl

from flash_delta.kernels.device.slots import load_slot
from flash_delta.kernels.runtime.chip import Chip, Tile, next_power_of_2
from flash_delta.kernels.runtime.plan import Layout, Plan, Step
from flash_delta.problem import Int8Problem, Resting


@triton.jit
def find_slots(read_indices, write_indices, n, read_row, write_row, slots, targets, null_slot):
    """The slot that row n reads, the slot that it writes, and whether the row is no padding."""
    read, live = load_slot(read_indices, n, 0, (read_row, 0), (slots, null_slot), n >= 0)
    write, live = load_slot(write_indices, n, 0, (write_row, 0), (targets, null_slot), live)
    return read, write, live


@triton.jit
def head_at(t, strides, slot, hv):
    """Where a head of a slot begins, in the layer of this program."""
    layer = tl.program_id(1).to(tl.int64)
    return t + layer * strides[0] + slot.to(tl.int64) * strides[1] + hv.to(tl.int64) * strides[2]


@triton.jit
def tile_at(t, strides, slot, hv, n, r):
    """Addresses [BN, BR] of a head's numbers."""
    return head_at(t, strides, slot, hv) + n[:, None] * strides[3] + r[None, :] * strides[4]


@triton.jit
def scales_of(x, TY: tl.constexpr):
    """The scale of each row of x, in float32 with the bits that ``TY`` has, and whether the row is finite."""
    # Bits of |x| are ordered as the numbers are, and those of infinity and NaN come last.
    most = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    finite = most < 0x7F800000
    s = tl.maximum(tl.div_rn(most.to(tl.float32, bitcast=True), 127.0), 2.0**-126)
    if TY.primitive_bitwidth == 32:
        s = (s.to(tl.int32, bitcast=True) & -128).to(tl.float32, bitcast=True)
    else:
        s = s.to(TY).to(tl.float32)
    s = tl.where(most > 0x00400000, s, 0.0)  # amax > 2^-127
    return tl.where(finite, s, float("nan")), finite


FIXED = ["slots", "targets", "null_slot", "read_row", "write_row", "HV"]
INDICES = ["read_indices", "write_indices"]


@triton.jit(do_not_specialize=FIXED, do_not_specialize_on_alignment=INDICES)
def quantize_states(
    pool, states, scale, read_indices, write_indices, slots, targets, null_slot, read_row, write_row, pool_strides,
    states_strides, scale_strides, HV, KEPT: tl.constexpr, BN: tl.constexpr, REDUCED: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (KEPT + BN - 1) // BN
    program = tl.program_id(0)
    n, r = program % BLOCKS * BN + tl.arange(0, BN), tl.arange(0, BR)
    hv, row = program // BLOCKS % HV, program // (BLOCKS * HV)
    read, write, live = find_slots(read_indices, write_indices, row, read_row, write_row, slots, targets, null_slot)
    kept = live & (n < KEPT)
    inside = kept[:, None] & (r < REDUCED)[None, :]
    x = tl.load(tile_at(pool, pool_strides, read, hv, n, r), mask=inside, other=0.0).to(tl.float32)
    s, finite = scales_of(x, scale.dtype.element_ty)
    inverse = tl.div_rn(1.0, tl.where(s > 0, s, 1.0))
    # Adding and subtracting 1.5 2^23 rounds to an integer, and ties to an even one.
    q = (tl.where(finite[:, None], x, 0.0) * inverse[:, None] + 12582912.0) - 12582912.0
    tl.store(tile_at(states, states_strides, write, hv, n, r), q.to(tl.int8), mask=inside)
    at = head_at(scale, scale_strides, write, hv) + n * scale_strides[3]
    tl.store(at, s.to(scale.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=FIXED, do_not_specialize_on_alignment=INDICES)
def dequantize_states(
    pool, states, scale, read_indices, write_indices, slots, targets, null_slot, read_row, write_row, pool_strides,
    states_strides, scale_strides, HV, KEPT: tl.constexpr, BN: tl.constexpr, REDUCED: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (KEPT + BN - 1) // BN
    program = tl.program_id(0)
    n, r = program % BLOCKS * BN + tl.arange(0, BN), tl.arange(0, BR)
    hv, row = program // BLOCKS % HV, program // (BLOCKS * HV)
    read, write, live = find_slots(read_indices, write_indices, row, read_row, write_row, slots, targets, null_slot)
    kept = live & (n < KEPT)
    inside = kept[:, None] & (r < REDUCED)[None, :]
    q = tl.load(tile_at(states, states_strides, read, hv, n, r), mask=inside, other=0)
    s = tl.load(head_at(scale, scale_strides, read, hv) + n * scale_strides[3], mask=kept, other=0.0)
    y = q.to(tl.float32) * s.to(tl.float32)[:, None]
    tl.store(tile_at(pool, pool_strides, write, hv, n, r), y.to(pool.dtype.element_ty), mask=inside)


ROWS, NUMBERS = 32, 8192  # in a tile, at most


def plan_move(p: Int8Problem, chip: Chip, x: Resting) -> Plan:
    """Rounds states of the pool to int8, or restores them."""
    kernel, source, target = quantize_states, x.state_pool, x.states
    if p.restores:
        kernel, source, target = dequantize_states, x.states, x.state_pool
    layers, _, HV, *_ = x.state_pool.shape
    kept, reduced = (p.rows, p.columns) if p.axis == -1 else (p.columns, p.rows)
    BR = next_power_of_2(reduced)
    BN = max(1, min(ROWS, NUMBERS // BR))
    programs = x.read_indices.shape[0] * HV * -(-kept // BN)
    strides = (_strides(t, p.axis) for t in (x.state_pool, x.states, x.scale))
    numbers = source.shape[1], target.shape[1], p.null_slot, x.read_indices.stride(0), x.write_indices.stride(0)
    constants = {"KEPT": kept, "BN": BN, "REDUCED": reduced, "BR": BR}
    tile = Tile(4 if BN * BR <= NUMBERS // 2 else 8, 1)
    step = Step(kernel, (programs, layers, 1), tile, (*x, *numbers, *strides, HV), constants, contracts=False)
    return Plan((step,), (), ())


def _strides(t: Layout, axis: int) -> tuple[int, ...]:
    """Strides of layers, slots, heads, and of the kept and the reduced axis."""
    *outer, row, column = t.stride()
    return (*outer, row, column) if axis == -1 else (*outer, column, row)
