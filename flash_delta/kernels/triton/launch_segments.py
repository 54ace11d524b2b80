"""The launchers of a walk in segments (segments.py), as launch.py has those of all else."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flash_delta.kernels.triton.chunk import count_slots
from flash_delta.kernels.triton.launch import columns, every, fits_tma, outside, plan, states, strides, walked
from flash_delta.kernels.triton.launcher import Call, Plan, launch
from flash_delta.kernels.triton.scan import scan
from flash_delta.kernels.triton.segments import compose
from flash_delta.kernels.triton.tiles import Segments, Tile, plan_endless, precision, segment_tiles
from flash_delta.kernels.triton.workspace import Channels, Factors, Solved
from flash_delta.problem import Problem

NOTHING = (None,) * 7  # no states saved, and no slots of a pool
PART = 32  # chunks after which a map is looked at: with 8 a pipeline that runs dry took 10 % (docs/notes)


class Walk(NamedTuple):
    """How sequences are split, and what the kernels hand each other for it."""

    split: Segments
    maps: Tensor  # [slots, HV, V + K, K] float32: B^T, and behind it Phi^T
    starts: Tensor  # [slots, HV, V, K] float32


def new_walk(p: Problem, split: Segments) -> Walk:
    slots = count_slots(p, split.length)
    maps, starts = (
        torch.empty(slots, p.HV, rows, p.K, dtype=torch.float32, device=p.device) for rows in (p.V + p.K, p.V)
    )
    return Walk(split, maps, starts)


def run_walk(c: Call, ch: Channels, s: Solved, f: Factors, o: Tensor, final: Tensor, w: Walk) -> None:
    """What `run_scan` does, for a call that saves nothing, on states that are no pool's."""
    run_maps(c, ch, s, f, w)
    run_compose(c, w)
    run_segments(c, ch, s, f, o, final, w)


def compile_walk(c: Call, ch: Channels, s: Solved, f: Factors, o: Tensor, final: Tensor) -> None:
    """All that calls of other sizes may launch."""
    split = plan_endless(c.p, c.shape.chip)
    if split is not None:
        run_walk(c, ch, s, f, o, final, new_walk(c.p._replace(N=1, T=0), split))


def run_maps(c: Call, ch: Channels, s: Solved, f: Factors, w: Walk) -> None:
    p, initial = c.p, c.x.initial_state

    def plans() -> Iterator[Plan]:
        t = w.split.maps
        yield _scan_plan(c, w, t, p.V + p.K, states(p, initial), by_value(w.maps), initial is not None, output=False)

    launch(c, scan, (*walked(c, ch, s, f), initial, None, w.maps, *NOTHING), plans)


def run_compose(c: Call, w: Walk) -> None:
    p, x, t = c.p, c.x, w.split.compose

    def plans() -> Iterator[Plan]:
        yield plan(
            c, compose, (-(-p.V // columns(p, t)), p.HV, p.N), t,
            p.N, p.T, w.split.length, by_value(w.maps), by_value(w.starts), states(p, x.initial_state),
            INITIAL=x.initial_state is not None, PRECISION=precision(torch.float32, c.shape.chip), follows=True,
        )  # fmt: skip

    launch(c, compose, (w.maps, w.starts, x.cu_seqlens, x.initial_state), plans)


def run_segments(c: Call, ch: Channels, s: Solved, f: Factors, o: Tensor, final: Tensor, w: Walk) -> None:
    p = c.p

    def plans() -> Iterator[Plan]:
        for t in segment_tiles(p, c.shape.chip) if every(c) else (w.split.scan,):
            yield _scan_plan(c, w, t, p.V, (0,) * 4, states(p, final), initial=False, output=True)

    launch(c, scan, (*walked(c, ch, s, f), w.starts, o, final, *NOTHING), plans)


def _scan_plan(
    c: Call, w: Walk, t: Tile, width: int, start: tuple[int, ...], end: tuple[int, ...], initial: bool, output: bool
) -> Plan:
    """Of a scan of segments, ``width`` columns; ``start``, ``end``: strides of the states that it reads and writes."""
    p, x = c.p, c.x
    grid = -(-width // columns(p, t)), p.HV, count_slots(p, w.split.length)
    return plan(
        c, scan, grid, t,
        p.N, p.T, w.split.length, *(0,) * 5, PART, *(0,) * 5, strides(x.q), strides(c.keys), strides(x.v), start, end,
        INITIAL=initial, POOL=False, SEGMENTS=True, OUTPUT=output, SAVE=False,
        TMA=t.tma and fits_tma(x.v, *outside(p, x)), follows=True,
    )  # fmt: skip


def by_value(t: Tensor) -> tuple[int, ...]:
    """Strides of (slot, head, key, value) of states that lie as a scan keeps them."""
    return t.mT.stride()
