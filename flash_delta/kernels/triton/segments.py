"""A long sequence on few heads: walked in segments, side by side.

A run of chunks maps the state it starts from, S_end = Phi S + B, exactly. Where a sequence's programs would leave most
of a chip idle it is cut into segments of equal length (tiles.plan_segments says how long), and

    `scan` without output finds (Phi, B) of all segments but the last, B of the first one from the initial state;
    `compose` gives every segment the state that it starts from, one after the other;
    `scan` walks all segments.

(Phi, B) and starts are float32, so are the products of `compose`. Nothing is cut off by its decay: Phi is multiplied
even where it has faded. Segments start at multiples of their length from a sequence's start, and a slot of segments
finds its own as a slot of chunks does (chunk.py): no plan in memory, no length on the host, nothing that a length
compiles.

Backward would take Phi^T and what dO alone sends to a segment's start, from `scan_backward` without its stores, and the
same `compose` from right to left.
"""

import triton
import triton.language as tl

from flash_delta.kernels.triton.chunk import bounds, follow
from flash_delta.kernels.triton.scan import load_state, store_state


@triton.jit(do_not_specialize=["N", "T", "length"])
def compose(
    maps, starts, cu_seqlens, initial_state, N, T, length, map_strides, start_strides, initial_strides,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr,
    OVERLAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``starts [slots, HV, V, K]`` from ``maps [slots, HV, V + K, K]``: B^T, and behind it Phi^T. Grid (V / BV, HV, N).

    It must not ``lead``: the kernels before and behind it have descriptors (chunk.follow).
    """
    d, hv, n = tl.program_id(0) * BV + tl.arange(0, BV), tl.program_id(1), tl.program_id(2)
    c = tl.arange(0, BK)
    start, stop, slot = bounds(n, cu_seqlens, N, T, length, PACKED)
    segments = (stop - start + length - 1) // length
    S = tl.zeros([BV, BK], tl.float32)
    if INITIAL:
        S = load_state(initial_state, initial_strides, n, hv, d, c, V, K)
    follow(OVERLAP)
    store_state(starts, start_strides, S, slot, hv, d, c, V, K)
    S = load_state(maps, map_strides, slot, hv, d, c, V, K, segments > 1)
    store_state(starts, start_strides, S, slot + 1, hv, d, c, V, K, segments > 1)
    for number in range(1, segments - 1):
        Phi = load_state(maps, map_strides, slot + number, hv, V + c, c, V + K, K)
        B = load_state(maps, map_strides, slot + number, hv, d, c, V, K)
        S = tl.dot(S, Phi, B, input_precision=PRECISION)
        store_state(starts, start_strides, S, slot + number + 1, hv, d, c, V, K)
