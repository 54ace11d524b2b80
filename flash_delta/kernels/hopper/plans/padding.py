"""Heads of other widths than 64 and 128. They run as heads of the next of these widths, with zeros in added columns.

Zeros in q and k change no product. Value columns of zeros stay zeros, and so do the added rows and columns of a state.
`widen` copies all inputs in one launch, and `narrow` copies the wanted results back. The copies belong to one call. The
backward pass makes its own copies.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flash_delta.kernels.device.chunk import steps
from flash_delta.kernels.hopper.plans.tiles import PADDING, PADDING_ROWS
from flash_delta.kernels.runtime.arguments import draft_as, launch_rule, strides
from flash_delta.kernels.runtime.plan import Draft, Layout, Making
from flash_delta.problem import Inputs, Problem

WIDTHS = (64, 128)
NO_STRIDES = (0, 0, 0, 0)


class Padded(NamedTuple):
    """Copies of the width that is run. None if a tensor does not exist."""

    q: Layout  # [B, T, H, W]
    k: Layout  # [B, T, H, W]
    v: Layout  # [B, T, HV, W]
    do: Layout | None  # [B, T, HV, W]
    initial_state: Layout | None  # [N, HV, W, W] float32
    dfinal: Layout | None  # [N, HV, W, W] float32


class PaddedResults(NamedTuple):
    """The results of kernels, in that width or without the added columns. None if a result is not wanted."""

    rows: tuple[Layout | None, Layout | None, Layout]  # dq and dk; o or dv
    state: Layout | None  # the final states, or the gradient of the initial ones


def pads(p: Problem) -> bool:
    """Whether the heads of ``p`` are padded."""
    if p.K in (*WIDTHS, 256) and p.V % p.K == 0:
        return False
    return p.gate.kind != "channel" and p.pools is None and max(p.K, p.V) <= WIDTHS[-1]


def padded(p: Problem) -> Problem:
    """The call that is run instead of ``p``. It is ``p`` itself if heads are not padded."""
    if not pads(p):
        return p
    width = WIDTHS[0] if max(p.K, p.V) <= WIDTHS[0] else WIDTHS[1]
    return p._replace(K=width, V=width)


def new_padded(made: Making, p: Problem, x: Inputs, do: Layout | None, dfinal: Layout | None) -> Padded:
    """Memory for the copies of a call."""
    wide = padded(p)
    q, v = ((p.B, p.T, heads, wide.K) for heads in (p.H, p.HV))
    names = [f"wide {name}" for name in Padded._fields]
    kinds = *((shape, p.dtype) for shape in (q, q, v, v)), *((wide.state_shape, torch.float32),) * 2
    there = True, True, True, do is not None, x.initial_state is not None, dfinal is not None
    return Padded(*(
        made.new(name, *kind) if exists else None for name, kind, exists in zip(names, kinds, there, strict=True)
    ))  # fmt: skip


def gradients_in(made: Making, copies: Padded, d: Inputs) -> Inputs:
    """Where kernels write gradients: new memory of the copies' width for tensors with columns, and else ``d``
    itself."""
    wide = {name: made.like(f"wide d{name}", getattr(copies, name)) for name in ("q", "k", "v", "initial_state")}
    return d._replace(**wide)


@triton.jit
def copy_rows(
    x, strides, to, A, B, H, TO_H, WIDTH: tl.constexpr, TO: tl.constexpr, BW: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copies x [A, B, H, WIDTH] to ``to`` [A, B, TO_H, TO], which is contiguous, if it exists. The rest is zeros."""
    if to is not None:
        row, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BW)
        line, h = row // TO_H, row % TO_H
        known = row < A * B * TO_H
        at = steps((line // B).to(tl.int64), strides, 0) + steps((line % B).to(tl.int64), strides, 1)
        at = (at + steps(h.to(tl.int64), strides, 2))[:, None] + c[None, :] * strides[3]
        tile = tl.load(x + at, mask=(known & (h < H))[:, None] & (c < WIDTH)[None, :], other=0.0)
        place = to + row.to(tl.int64)[:, None] * TO + c[None, :]
        tl.store(place, tile.to(to.dtype.element_ty), mask=known[:, None] & (c < TO)[None, :])


@triton.jit(do_not_specialize=["N", "B", "T", "H", "HV"])
def widen(
    q, k, v, do, initial, dfinal, wide_q, wide_k, wide_v, wide_do, wide_initial, wide_dfinal, N, B, T, q_strides,
    k_strides, v_strides, do_strides, initial_strides, dfinal_strides, H, HV, K: tl.constexpr, V: tl.constexpr,
    V_FIRST: tl.constexpr, TO: tl.constexpr, PLACES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks, tensors). PLACES has the program_id(1) of each tensor, or -1 if it does not exist."""
    part = tl.program_id(1)
    HEIGHT: tl.constexpr = V if V_FIRST else K
    WIDTH: tl.constexpr = K if V_FIRST else V
    if part == PLACES[0]:
        copy_rows(q, q_strides, wide_q, B, T, H, H, K, TO, TO, ROWS)
    elif part == PLACES[1]:
        copy_rows(k, k_strides, wide_k, B, T, H, H, K, TO, TO, ROWS)
    elif part == PLACES[2]:
        copy_rows(v, v_strides, wide_v, B, T, HV, HV, V, TO, TO, ROWS)
    elif part == PLACES[3]:
        copy_rows(do, do_strides, wide_do, B, T, HV, HV, V, TO, TO, ROWS)
    elif part == PLACES[4]:
        copy_rows(initial, initial_strides, wide_initial, N, HV, HEIGHT, TO, WIDTH, TO, TO, ROWS)
    else:
        copy_rows(dfinal, dfinal_strides, wide_dfinal, N, HV, HEIGHT, TO, WIDTH, TO, TO, ROWS)


@triton.jit(do_not_specialize=["N", "B", "T", "H", "HV"])
def narrow(
    wide_q, wide_k, wide_v, wide_state, q, k, v, state, N, B, T, H, HV, K: tl.constexpr, V: tl.constexpr,
    V_FIRST: tl.constexpr, FROM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks, tensors). program_id(1) is 0 for v, 1 for the states, 2 for q, 3 for k."""
    part, T64 = tl.program_id(1), T.to(tl.int64)
    HEIGHT: tl.constexpr = V if V_FIRST else K
    WIDTH: tl.constexpr = K if V_FIRST else V
    if part == 0:
        copy_rows(wide_v, (T64 * (HV * FROM), HV * FROM, FROM, 1), v, B, T, HV, HV, V, V, FROM, ROWS)
    elif part == 1:
        strides = (HV * FROM * FROM, FROM * FROM, FROM, 1)
        copy_rows(wide_state, strides, state, N, HV, HEIGHT, HEIGHT, WIDTH, WIDTH, FROM, ROWS)
    elif part == 2:
        copy_rows(wide_q, (T64 * (H * FROM), H * FROM, FROM, 1), q, B, T, H, H, K, K, FROM, ROWS)
    else:
        copy_rows(wide_k, (T64 * (H * FROM), H * FROM, FROM, 1), k, B, T, H, H, K, K, FROM, ROWS)


def run_widen(c: Draft, do: Layout | None = None, dfinal: Layout | None = None) -> tuple[Draft, Padded]:
    """Launches `widen`. Returns the draft of the call that is run instead of ``c``, and the copies."""
    p, x, copies = c.p, c.x, new_padded(c.made, c.p, c.x, do, dfinal)
    given = *x[:3], do, x.initial_state, dfinal
    there = [number for number, t in enumerate(given) if t is not None]
    places = tuple([there.index(number) if number in there else -1 for number in range(len(given))])
    scalars = p.N, p.B, p.T, *(NO_STRIDES if t is None else strides(t) for t in given)
    launch_rule(
        c, widen, (*given, *copies), (_blocks(copies), len(there), 1), PADDING, *scalars, TO=copies.q.shape[3],
        PLACES=places, ROWS=PADDING_ROWS,
    )  # fmt: skip
    inside = x._replace(q=copies.q, k=copies.k, v=copies.v, initial_state=copies.initial_state)
    return draft_as(c, padded(p), inside), copies


def run_narrow(c: Draft, found: PaddedResults, wanted: PaddedResults) -> None:
    """Launches `narrow`. ``c``: of the original call. ``wanted`` is contiguous."""
    p = c.p
    grid = _blocks((*found.rows, found.state)), 2 if found.rows[0] is None else 4, 1
    pointers = *found.rows, found.state, *wanted.rows, wanted.state
    width = found.rows[2].shape[3]
    launch_rule(c, narrow, pointers, grid, PADDING, p.N, p.B, p.T, FROM=width, ROWS=PADDING_ROWS)


def _blocks(tensors: tuple[Layout | None, ...]) -> int:
    """The number of programs for the rows of any of ``tensors``."""
    most = max(t.numel() // t.shape[-1] for t in tensors if t is not None)
    return -(-most // PADDING_ROWS)
