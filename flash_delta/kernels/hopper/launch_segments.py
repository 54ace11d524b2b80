"""The launchers of a walk in segments (walk.py), as launch.py has those of one kernel that walks sequences."""

from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flash_delta.kernels.hopper import layouts
from flash_delta.kernels.hopper.again import Plan, launch
from flash_delta.kernels.hopper.factor import factor
from flash_delta.kernels.hopper.launch import WIDTH, ragged, states, token_stride
from flash_delta.kernels.hopper.maps import compose, find_maps
from flash_delta.kernels.hopper.split import split_endless
from flash_delta.kernels.hopper.tiles import COMPOSE, FACTOR, MAPS, MEMBERS, WALK
from flash_delta.kernels.hopper.walk import walk
from flash_delta.kernels.triton import launcher
from flash_delta.kernels.triton.chunk import C, count_slots
from flash_delta.kernels.triton.launcher import Call
from flash_delta.problem import Problem

HALF = WIDTH // 2  # value columns of a warp group


class Walk(NamedTuple):
    """How sequences are split, and what the kernels hand each other for it."""

    length: int  # tokens of a segment
    A: Tensor  # [slots of chunks, HV, C, C]
    B: Tensor  # transposed, [slots of segments, HV, V, K] float32
    Phi: Tensor  # transposed, in two parts, [slots of segments, HV, 2, K, K] bfloat16
    starts: Tensor  # [slots of segments, HV, V, K] float32


def new_walk(p: Problem, length: int) -> Walk:
    chunks, segments = count_slots(p), count_slots(p, length)
    A = torch.empty(chunks, p.HV, C, C, dtype=p.dtype, device=p.device)
    B, starts = (torch.empty(segments, p.HV, WIDTH, WIDTH, dtype=torch.float32, device=p.device) for _ in range(2))
    return Walk(
        length, A, B, torch.empty(segments, p.HV, 2, WIDTH, WIDTH, dtype=torch.bfloat16, device=p.device), starts
    )


def run_walk(c: Call, o: Tensor, final: Tensor, rates: Tensor, w: Walk) -> None:
    """What `launch.run_loop` does."""
    run_factor(c, rates, w)
    run_maps(c, rates, w)
    run_compose(c, w)
    run_segments(c, o, final, rates, w)


def compile_walk(c: Call, o: Tensor, final: Tensor, rates: Tensor) -> None:
    """All that calls of other sizes may launch."""
    length = split_endless(c.p, c.shape.chip.processors)
    if length is not None:
        run_walk(c, o, final, rates, new_walk(c.p._replace(N=1, T=1), length))


def run_factor(c: Call, rates: Tensor, w: Walk) -> None:
    p, x = c.p, c.x
    group = p.HV // p.H
    members = gcd(group, MEMBERS)
    arguments = (
        ragged(x.k, WIDTH), lines(rates), squares(w.A), x.cu_seqlens, p.N, p.T, token_stride(x.k), (x.k.stride(2),),
        p.HV, group, members,
    )  # fmt: skip
    plan = Plan((count_slots(p), p.HV // members), arguments, {"PACKED": p.packed})
    launch(c, factor, lambda: [plan], {"num_warps": 4, "enable_fp_fusion": True, "launch_pdl": True, **FACTOR})


def run_maps(c: Call, rates: Tensor, w: Walk) -> None:
    p, x = c.p, c.x
    initial = w.B if x.initial_state is None else x.initial_state
    arguments = (
        ragged(x.k, WIDTH), ragged(x.v, HALF), lines(rates), squares(w.A), states(p, initial), rows(w.B), parts(w.Phi),
        x.cu_seqlens, w.length, p.N, p.T, token_stride(x.k), token_stride(x.v), (x.k.stride(2), x.v.stride(2)),
        p.HV // p.H, p.HV,
    )  # fmt: skip
    constants = {"INITIAL": x.initial_state is not None, "V_FIRST": p.state_v_first, "PACKED": p.packed, **MAPS}
    plan = Plan((count_slots(p, w.length), p.HV, 2), arguments, constants)
    launch(c, find_maps, lambda: [plan], {"num_warps": 4, "enable_fp_fusion": True, "launch_pdl": True})


def run_compose(c: Call, w: Walk) -> None:
    p, initial = c.p, c.x.initial_state
    key, value = (3, 2) if p.state_v_first else (2, 3)
    strides = (0,) * 4 if initial is None else tuple(initial.stride(axis) for axis in (0, 1, key, value))
    constants = {
        "K": WIDTH, "V": WIDTH, "BV": COMPOSE.BV, "PACKED": p.packed, "INITIAL": initial is not None,
        "OVERLAP": p.device.type != "cpu",
    }  # fmt: skip
    plan = launcher.Plan(
        (WIDTH // COMPOSE.BV, p.HV, p.N), COMPOSE, (p.N, p.T, w.length, p.HV, strides), constants,
        follows=p.device.type != "cpu",
    )  # fmt: skip
    launcher.launch(c, compose, (w.B, w.Phi, w.starts, c.x.cu_seqlens, initial), lambda: [plan])


def run_segments(c: Call, o: Tensor, final: Tensor, rates: Tensor, w: Walk) -> None:
    p, x = c.p, c.x
    tokens = (x.q, x.k, x.v)
    arguments = (
        ragged(x.q, WIDTH), ragged(x.k, WIDTH), ragged(x.v, HALF), lines(rates), squares(w.A), ragged(o, HALF),
        rows(w.starts),
        states(p, final), x.cu_seqlens, w.length, p.N, p.T, *(token_stride(t) for t in tokens),
        tuple(t.stride(2) for t in tokens), p.HV // p.H, p.HV,
    )  # fmt: skip
    constants = {"V_FIRST": p.state_v_first, "PACKED": p.packed, **WALK}
    plan = Plan((count_slots(p, w.length), p.HV), arguments, constants)
    launch(c, walk, lambda: [plan], {"num_warps": 4, "enable_fp_fusion": True, "launch_pdl": True})


def lines(rates: Tensor) -> TensorDescriptor:
    """Describes rates, four vectors a row."""
    return TensorDescriptor.from_tensor(rates, [1, 4 * C], layouts.LINES.value)


def squares(t: Tensor) -> TensorDescriptor:
    """Describes the matrices of chunks."""
    return TensorDescriptor(t, [t.numel() // C, C], [C, 1], [C, C], layouts.TILE.value)


def rows(t: Tensor) -> TensorDescriptor:
    """Describes transposed states, row by row."""
    return TensorDescriptor(t, [t.numel() // WIDTH, WIDTH], [WIDTH, 1], [64, 32], layouts.STATE.value)


def parts(t: Tensor) -> TensorDescriptor:
    """Describes Phi, row by row."""
    return TensorDescriptor(t, [t.numel() // WIDTH, WIDTH], [WIDTH, 1], [64, 64], layouts.TILE.value)
