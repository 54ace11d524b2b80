"""The launchers of a walk in segments (walk.py), as launch.py has those of one kernel that walks sequences."""

from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from flash_delta.kernels.hopper import layouts
from flash_delta.kernels.hopper.again import Descriptor, Plan, launch
from flash_delta.kernels.hopper.factor import factor
from flash_delta.kernels.hopper.hand_over import hand_over
from flash_delta.kernels.hopper.launch import lines, ragged, saved, squares, states, token_stride
from flash_delta.kernels.hopper.maps import compose, find_maps
from flash_delta.kernels.hopper.split import split_endless
from flash_delta.kernels.hopper.tiles import COMPOSE, FACTOR, HAND_OVER, MAPS, MEMBERS, WALKS
from flash_delta.kernels.hopper.walk import walk
from flash_delta.kernels.triton import launcher
from flash_delta.kernels.triton.chunk import C, count_slots
from flash_delta.kernels.triton.launch import short, table
from flash_delta.kernels.triton.launcher import Call
from flash_delta.kernels.triton.workspace import Residual
from flash_delta.problem import Problem, Slots

HALF = 64  # value columns of a warp group


class Prompt(NamedTuple):
    """What a prompt has instead of slots, while it is walked in segments (hand_over.py)."""

    first: Tensor  # its state, float32, as the pool has states
    last: Tensor
    span: Tensor  # its bounds, like ``cu_seqlens``; 64 numbers, a whole line of memory


class Walk(NamedTuple):
    """How sequences are split, and what the kernels hand each other for it; if they are not, only A."""

    length: int  # tokens of a segment; of sequences that are not split, more than any has
    A: Tensor  # [slots of chunks, HV, C, C]; for the backward pass without diag(b), and saved
    B: Tensor | None  # transposed, [slots of segments, HV, V, K] float32
    Phi: Tensor | None  # transposed, in two parts, [slots of segments, HV, 2, K, K] bfloat16
    starts: Tensor | None  # [slots of segments, HV, V, K] float32


def new_walk(p: Problem, length: int, A: Tensor | None = None) -> Walk:
    segments, A = count_slots(p, length), new_inverses(p) if A is None else A
    B, starts = (torch.empty(segments, p.HV, p.V, p.K, dtype=torch.float32, device=p.device) for _ in range(2))
    return Walk(length, A, B, torch.empty(segments, p.HV, 2, p.K, p.K, dtype=torch.bfloat16, device=p.device), starts)


def new_whole_walk(p: Problem, A: Tensor | None = None) -> Walk:
    return Walk((p.T // C + 1) * C, new_inverses(p) if A is None else A, None, None, None)


def new_inverses(p: Problem) -> Tensor:
    return torch.empty(count_slots(p), p.HV, C, C, dtype=p.dtype, device=p.device)


def new_prompt(p: Problem) -> Prompt:
    states = (torch.empty(1, *p.state_shape[1:], dtype=torch.float32, device=p.device) for _ in range(2))
    return Prompt(*states, torch.empty(64, dtype=torch.int32, device=p.device))


def run_prompt(c: Call, o: Tensor, rates: Tensor, w: Walk, prompt: Prompt) -> None:
    """Between `run_hand_over` there and back."""
    x = c.x._replace(initial_state=prompt.first, cu_seqlens=prompt.span)
    run_walk(c._replace(p=c.p._replace(N=1), x=x), o, prompt.last, rates, w)


def run_hand_over(c: Call, prompt: Prompt, slots: Slots, *, back: bool) -> None:
    p, pool = c.p, slots.state_pool
    tables = (slots.read_indices, slots.write_indices, slots.has_initial_state)
    scalars = (p.T, len(pool), pool.stride(0), *(table(t)[0] for t in tables))
    overlap = p.device.type != "cpu"
    constants = {"SHORT": short(p), "BACK": back, "BLOCK": HAND_OVER.BV, "OVERLAP": overlap}
    grid = (p.HV * p.K * p.V // HAND_OVER.BV, 1, 1)
    pointers = (pool, prompt.last if back else prompt.first, prompt.span, c.x.cu_seqlens, *tables)
    plan = launcher.Plan(grid, HAND_OVER, scalars, constants, follows=back and overlap)
    launcher.launch(c, hand_over, pointers, lambda: [plan])


def run_walk(c: Call, o: Tensor, final: Tensor, rates: Tensor, w: Walk, residual: Residual | None = None) -> None:
    """What `launch.run_loop` does."""
    run_factor(c, rates, w)
    if w.starts is not None:
        run_maps(c, rates, w)
        run_compose(c, w)
    run_segments(c, o, final, rates, w, residual)


def compile_walk(c: Call, o: Tensor, final: Tensor, rates: Tensor, residual: Residual | None) -> None:
    """All that calls of other sizes may launch."""
    length = split_endless(c.p, c.shape.chip.processors)
    if length is not None:
        run_walk(c, o, final, rates, new_walk(c.p._replace(N=1, T=1), length), residual)


def run_factor(c: Call, rates: Tensor, w: Walk) -> None:
    p, x = c.p, c.x
    group = p.HV // p.H
    members = gcd(group, MEMBERS)
    arguments = (
        ragged(x.k, p.K), lines(rates), squares(w.A), x.cu_seqlens, p.N, p.T, token_stride(x.k), (x.k.stride(2),),
        p.HV, group, members,
    )  # fmt: skip
    plan = Plan((count_slots(p), p.HV // members), arguments, {"WIDTH": p.K, "PACKED": p.packed, "KEEP": p.needs_grad})
    launch(c, factor, lambda: [plan], {"num_warps": 4, "enable_fp_fusion": True, "launch_pdl": True, **FACTOR})


def run_maps(c: Call, rates: Tensor, w: Walk) -> None:
    p, x = c.p, c.x
    initial = w.B if x.initial_state is None else x.initial_state
    arguments = (
        ragged(x.k, p.K), ragged(x.v, HALF), lines(rates), squares(w.A), states(p, initial), rows(w.B), parts(w.Phi),
        x.cu_seqlens, w.length, p.N, p.T, token_stride(x.k), token_stride(x.v), (x.k.stride(2), x.v.stride(2)),
        p.HV // p.H, p.HV,
    )  # fmt: skip
    constants = {
        "WIDTH": p.K, "INITIAL": x.initial_state is not None, "V_FIRST": p.state_v_first, "PACKED": p.packed,
        "KEEP": p.needs_grad, **MAPS[p.K],
    }  # fmt: skip
    plan = Plan((count_slots(p, w.length), p.HV, 2), arguments, constants)
    launch(c, find_maps, lambda: [plan], {"num_warps": 4, "enable_fp_fusion": True, "launch_pdl": True})


def run_compose(c: Call, w: Walk) -> None:
    p, initial = c.p, c.x.initial_state
    key, value = (3, 2) if p.state_v_first else (2, 3)
    strides = (0,) * 4 if initial is None else tuple(initial.stride(axis) for axis in (0, 1, key, value))
    constants = {
        "K": p.K, "V": p.V, "BV": COMPOSE.BV, "PACKED": p.packed, "INITIAL": initial is not None,
        "OVERLAP": p.device.type != "cpu",
    }  # fmt: skip
    plan = launcher.Plan(
        (p.V // COMPOSE.BV, p.HV, p.N), COMPOSE, (p.N, p.T, w.length, p.HV, strides), constants,
        follows=p.device.type != "cpu",
    )  # fmt: skip
    launcher.launch(c, compose, (w.B, w.Phi, w.starts, c.x.cu_seqlens, initial), lambda: [plan])


def run_segments(c: Call, o: Tensor, final: Tensor, rates: Tensor, w: Walk, residual: Residual | None) -> None:
    p, x = c.p, c.x
    tokens, groups = (x.q, x.k, x.v), 2 if p.K == 128 else 1
    starts = final if x.initial_state is None else x.initial_state
    starts = states(p, starts) if w.starts is None else rows(w.starts)
    arguments = (
        ragged(x.q, p.K), ragged(x.k, p.K), ragged(x.v, HALF), lines(rates), squares(w.A), ragged(o, HALF),
        *saved(residual, p.K if w.starts is None else C), starts, states(p, final), x.cu_seqlens, w.length, p.N, p.T,
        *(token_stride(t) for t in tokens),
        tuple(t.stride(2) for t in tokens), p.HV // p.H, p.HV,
    )  # fmt: skip
    constants = {
        "WIDTH": p.K, "GROUPS": groups, "INITIAL": w.starts is not None or x.initial_state is not None,
        "START_V_FIRST": w.starts is not None or p.state_v_first, "V_FIRST": p.state_v_first, "PACKED": p.packed,
        "KEEP": p.needs_grad, "SAVE": residual is not None, **WALKS[p.K],
    }  # fmt: skip
    plan = Plan((count_slots(p, w.length), p.HV, p.V // (HALF * groups)), arguments, constants)
    launch(c, walk, lambda: [plan], {"num_warps": 4, "enable_fp_fusion": True, "launch_pdl": True})


def rows(t: Tensor) -> Descriptor:
    """Describes transposed states, row by row."""
    width = t.shape[-1]
    return Descriptor(t, [t.numel() // width, width], [width, 1], [64, 32], layouts.STATE.value)


def parts(t: Tensor) -> Descriptor:
    """Describes Phi, row by row."""
    return squares(t)
