"""Scans a long sequence on few heads in segments, all at the same time.

A run of chunks maps the state that it starts from exactly: S_end = Phi S + B. If a sequence's programs would leave most
of a chip idle, the sequence is cut into segments of equal length, which tiles.plan_segments decides:

    `scan` without output computes (Phi, B) of all segments except the last; the first B is from the initial state;
    `compose` computes the state that every segment starts from, one after the other;
    `scan` scans all segments.

(Phi, B), the first states and the products of `compose` are float32. Nothing is left out because of its decay: Phi is
multiplied even where it is nearly 0. Segments start at multiples of their length from a sequence's start. A program
finds the segment of its slot as it finds a chunk (chunk.py). So there is no plan in memory and no length on the host,
and a new length compiles nothing.

The backward pass does the same from right to left (backward/segments.py).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flash_delta.kernels.device.chunk import bounds, count_slots, follow
from flash_delta.kernels.runtime.arguments import columns, launch_rule, states, strides, strides_if
from flash_delta.kernels.runtime.chip import Tile, precision
from flash_delta.kernels.runtime.plan import Draft, Layout, Making
from flash_delta.kernels.runtime.workspace import Channels, Factors, Solved
from flash_delta.kernels.triton.forward.scan import load_state, scan, store_state
from flash_delta.kernels.triton.forward.scan_launches import copies, has_logits, scan_operands
from flash_delta.kernels.triton.tiles import Segments, plan_endless, segment_tiles
from flash_delta.problem import Problem


@triton.jit(do_not_specialize=["N", "T", "length"])
def compose(
    values, maps, starts, cu_seqlens, initial_state, N, T, length, value_strides, map_strides, start_strides,
    initial_strides,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr,
    BACK: tl.constexpr, OVERLAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes ``starts [slots, HV, V, K]`` from ``values``, which are B^T, and from ``maps [slots, HV, V + K, K]``, in
    which Phi^T comes after V rows. Grid (V / BV, HV, N).

    BACK: right to left, with Phi. ``initial_state`` is then the gradient at the end of a sequence's last segment, and
    ``values`` are the gradients that leave a segment on its left.

    It must not ``lead``: the kernels before and after it have descriptors (chunk.follow).
    """
    d, hv, n = tl.program_id(0) * BV + tl.arange(0, BV), tl.program_id(1), tl.program_id(2)
    c = tl.arange(0, BK)
    start, stop, slot = bounds(n, cu_seqlens, N, T, length, PACKED)
    segments = (stop - start + length - 1) // length
    step = 1
    if BACK:
        slot, step = slot + tl.maximum(segments - 1, 0), -1
    S = tl.zeros([BV, BK], tl.float32)
    if INITIAL:
        S = load_state(initial_state, initial_strides, n, hv, d, c, V, K)
    follow(OVERLAP)
    store_state(starts, start_strides, S, slot, hv, d, c, V, K)
    S = load_state(values, value_strides, slot, hv, d, c, V, K, segments > 1)
    store_state(starts, start_strides, S, slot + step, hv, d, c, V, K, segments > 1)
    for number in range(1, segments - 1):
        at = slot + step * number
        if BACK:
            turned = (map_strides[0], map_strides[1], map_strides[3], map_strides[2])
            Phi = load_state(maps, turned, at, hv, c, V + c, K, V + K)
        else:
            Phi = load_state(maps, map_strides, at, hv, V + c, c, V + K, K)
        B = load_state(values, value_strides, at, hv, d, c, V, K)
        S = tl.dot(S, Phi, B, input_precision=PRECISION)
        store_state(starts, start_strides, S, at + step, hv, d, c, V, K)


NOTHING = (None,) * 8  # no states saved, and no slots of a pool
PART = 32  # chunks between two checks whether a map is zero; with 8, restarts of the pipeline took 10 % (docs/notes)


class SegmentedScan(NamedTuple):
    """How sequences are split, and the tensors that the kernels pass to each other."""

    split: Segments
    maps: Any  # [slots, HV, V + K, K] float32: B^T, and after it Phi^T
    starts: Any  # [slots, HV, V, K] float32


def new_segmented_scan(p: Problem, split: Segments | None, made: Making) -> SegmentedScan | None:
    """The memory of a scan in segments. None if sequences are not split."""
    if split is None:
        return None
    maps, starts = (new_states(p, split, rows, made, name) for rows, name in ((p.V + p.K, "maps"), (p.V, "starts")))
    return SegmentedScan(split, maps, starts)


def new_states(p: Problem, split: Segments, rows: int, made: Making, name: str) -> Layout:
    """Memory for a matrix of every segment [slots, HV, rows, K]."""
    return made.new(name, (count_slots(p, split.length), p.HV, rows, p.K), torch.float32)


def run_segmented_scan(
    c: Draft, ch: Channels, s: Solved, f: Factors, o: Layout, final: Layout, w: SegmentedScan | None
) -> None:
    """Does the same as `run_scan`, for a call that saves nothing and has no pool. Without ``w`` it does nothing.

    A draft for every size gets all that calls of other sizes may launch, for any ``w``.
    """
    if c.every:
        w = new_segmented_scan(c.p._replace(N=1, T=0), plan_endless(c.p, c.chip), c.made)
    if w is not None:
        run_maps(c, ch, s, f, w)
        run_compose(c, w)
        run_segments(c, ch, s, f, o, final, w)


def run_maps(c: Draft, ch: Channels, s: Solved, f: Factors, w: SegmentedScan, *, follows: bool = True) -> None:
    initial = c.x.initial_state
    pointers = (*scan_operands(c, ch, s, f), initial, None, w.maps, *NOTHING)
    _run_scan(c, w, pointers, w.split.maps, initial, by_value(w.maps), output=False, follows=follows)


def run_compose(c: Draft, w: SegmentedScan) -> None:
    compose_states(c, w, w.maps, w.starts, c.x.initial_state, back=False)


def compose_states(
    c: Draft, w: SegmentedScan, values: Layout, starts: Layout, initial: Layout | None, *, back: bool
) -> None:
    p, t = c.p, w.split.compose
    pointers = values, w.maps, starts, c.x.cu_seqlens, initial
    launch_rule(
        c, compose, pointers, (-(-p.V // columns(p, t)), p.HV, p.N), t,
        p.N, p.T, w.split.length, *map(by_value, (values, w.maps, starts)), states(p, initial),
        INITIAL=initial is not None, BACK=back, PRECISION=precision(torch.float32, c.chip), follows=True,
    )  # fmt: skip


def run_segments(c: Draft, ch: Channels, s: Solved, f: Factors, o: Layout, final: Layout, w: SegmentedScan) -> None:
    pointers = (*scan_operands(c, ch, s, f), w.starts, o, final, *NOTHING)
    for t in segment_tiles(c.p, c.chip) if c.every else (w.split.scan,):
        _run_scan(c, w, pointers, t, None, states(c.p, final), output=True, follows=True)


def _run_scan(
    c: Draft, w: SegmentedScan, pointers: tuple, t: Tile, initial: Layout | None, final: tuple[int, ...], *,
    output: bool, follows: bool,
) -> None:  # fmt: skip
    """Launches a scan of segments. For maps it starts from ``initial``. For outputs it starts from the states of
    `compose`. ``final``: strides of the states that it writes."""
    p, x = c.p, c.x
    width = p.V if output else p.V + p.K
    launch_rule(
        c, scan, pointers, (-(-width // columns(p, t)), p.HV, count_slots(p, w.split.length)), t,
        p.N, p.T, w.split.length, *(0,) * 6, PART, *(0,) * 5, strides(x.q), strides(c.keys), strides(x.v),
        strides_if(x.w), states(p, initial), final, INITIAL=initial is not None, POOL=0, SEGMENTS=True, OUTPUT=output,
        SAVE=False, RAW_W=has_logits(c), **copies(c, t, x.v, x.w), follows=follows,
    )  # fmt: skip


def by_value(t: Any) -> tuple[int, ...]:
    """Strides of (slot, head, key, value) of states in the layout of a scan."""
    slot, head, value, key = t.stride()
    return slot, head, key, value
