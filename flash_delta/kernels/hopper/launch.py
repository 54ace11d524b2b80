"""One launcher per kernel: its grid, arguments and constants. What varies from call to call is not specialised."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flash_delta.kernels.hopper import layouts
from flash_delta.kernels.hopper.again import Descriptor, Plan
from flash_delta.kernels.hopper.again import launch as launch_described
from flash_delta.kernels.hopper.loop import forward_loop
from flash_delta.kernels.hopper.rates import rates
from flash_delta.kernels.hopper.tiles import RATES, RATES_OF_ROWS, Tile, pool_loops, tiles
from flash_delta.kernels.triton import launcher
from flash_delta.kernels.triton.chunk import C, count_slots
from flash_delta.kernels.triton.launch import short, table
from flash_delta.kernels.triton.launcher import Call, launch
from flash_delta.kernels.triton.tiles import next_power_of_2
from flash_delta.kernels.triton.workspace import Residual, Solved
from flash_delta.problem import Inputs, Problem, Slots

NO_SLOTS = Slots(None, None)


def new_rates(p: Problem) -> Tensor:
    """What `rates` writes, four vectors a row."""
    return torch.empty(count_slots(p) * p.HV * 2, 4 * C, dtype=torch.float32, device=p.device)


def new_walks(p: Problem) -> Tensor:
    """What `rates` says of the sequences that the loop walks on a pool (walks.py)."""
    numbers = -(-(1 + 3 * p.N) // 64) * 64  # whole lines of memory, as `launcher.run` rounds them
    return torch.empty(numbers, dtype=torch.int32, device=p.device)


def run_rates(
    c: Call, o: Tensor, out: Tensor, s: Solved | None = None, walks: Tensor | None = None, slots: Slots = NO_SLOTS
) -> None:
    """With ``s``, what the backward pass needs, too; with ``walks``, for states in ``slots``."""
    p, x = c.p, c.x
    tables = (slots.read_indices, slots.write_indices, slots.has_initial_state)
    heads = p.HV // p.H if p.l2norm else max(n for n in (1, 2, 4) if p.HV % n == 0)
    scalars = (
        p.N, p.T, 0 if walks is None else len(slots.state_pool), *(table(t)[0] for t in tables),
        p.scale, p.beta_range, x.q.stride(), x.k.stride(), *row_and_others(x.g), *row_and_others(x.beta)
    )  # fmt: skip
    constants = {
        # Never one column: Triton 3.6 has no scan for a layout with more warps than columns.
        "H": p.H, "HV": p.HV, "K": p.K, "V": p.V, "C": C, "HEADS": heads, "BH": max(2, next_power_of_2(heads)),
        "PACKED": p.packed, "GATE": x.g is not None, "RAW_GATE": p.raw_gate, "HAS_BIAS": x.dt_bias is not None,
        "HAS_BETA": x.beta is not None, "RAW_BETA": p.raw_beta, "NORM": p.l2norm, "OVERLAP": p.device.type != "cpu",
        "SHORT": short(p),
    }  # fmt: skip
    grid, tile = (count_slots(p), p.HV // heads, 1), RATES_OF_ROWS if p.l2norm or p.V > 128 else RATES
    kept = (None, None) if s is None else (s.vectors, s.norms)
    pointers = (x.q, x.k, x.g, x.beta, x.A_log, x.dt_bias, x.cu_seqlens, o, out, *kept, walks, *tables)
    launch(c, rates, pointers, lambda: [launcher.Plan(grid, tile, scalars, constants, follows=False)])


def run_pool_loops(c: Call, o: Tensor, rates: Tensor, walks: Tensor, slots: Slots, *choice: Tile) -> None:
    """The loop on a pool of states: a launch for every tile that the number of prompts may choose."""
    p, x, table_of = c.p, c.x, slots.checkpoint_indices
    tokens = (x.q, x.k, x.v)
    columns = 0 if table_of is None else table_of.shape[1]
    where = (len(slots.state_pool), columns, min(p.checkpoint_every, p.T + C), *table(table_of))

    states, apart = pool(p, slots.state_pool), (*map(token_stride, tokens), tuple(t.stride(2) for t in tokens))
    q, k, rows, described = ragged(x.q, p.K), ragged(x.k, p.K), lines(rates), ragged(o, 64)

    def plans() -> Iterator[Plan]:
        for w in pool_loops(p, c.shape.chip, *choice, every=c.compiling is not None):
            arguments = (
                q, k, ragged(x.v, 64 * w.tile.groups), described, rows, None, None, None, None, states, states,
                x.cu_seqlens, walks, table_of, 0, p.T, w.least, w.most, *where, *apart, p.HV // p.H,
            )  # fmt: skip
            yield loop_plan(c, w.tile, w.sequences, arguments, INITIAL=True, KEEP=False, SAVE=False)

    launch_described(c, forward_loop, plans, {"num_warps": 4, "enable_fp_fusion": True, "launch_pdl": True})


def run_loop(
    c: Call, o: Tensor, final: Tensor, out: Tensor, A: Tensor | None, *choice: Tile, residual: Residual | None = None
) -> None:
    """At most one program per multiprocessor and block of value columns; a program walks several states. ``A`` and
    ``residual``: for the backward pass."""
    p, x = c.p, c.x
    initial = final if x.initial_state is None else x.initial_state
    tokens = (x.q, x.k, x.v)

    def plans() -> Iterator[Plan]:
        for t in choice or tiles(p, c.shape.chip, every=c.compiling is not None, saving=residual is not None):
            arguments = (
                *boxes(x, o, 64 * t.groups), lines(out),
                None if A is None else squares(A), *saved(residual), states(p, initial), states(p, final),
                x.cu_seqlens, None, None, p.N * p.HV, p.T, *(0,) * 7,
                *(token_stride(t) for t in tokens), tuple(t.stride(2) for t in tokens), p.HV // p.H,
            )  # fmt: skip
            flags = {"INITIAL": x.initial_state is not None, "KEEP": A is not None, "SAVE": residual is not None}
            yield loop_plan(c, t, p.N, arguments, **flags)

    launch_described(c, forward_loop, plans, {"num_warps": 4, "enable_fp_fusion": True, "launch_pdl": True})


def loop_plan(
    c: Call, t: Tile, sequences: int, arguments: tuple[Any, ...], *, INITIAL: bool, KEEP: bool, SAVE: bool
) -> Plan:
    p = c.p
    constants = {
        "HV": p.HV, "WIDTH": p.K, "INITIAL": INITIAL, "V_FIRST": p.state_v_first, "PACKED": p.packed, "KEEP": KEEP,
        "SAVE": SAVE, "GROUPS": t.groups, "FACTORS": t.factors, "NS": t.slots, "NV": t.values, "NX": t.maps,
        "NO": t.outputs, "REGISTERS": t.registers,
    }  # fmt: skip
    return Plan((min(sequences * p.HV, c.shape.chip.processors), p.V // (64 * t.groups)), arguments, constants)


def boxes(x: Inputs, o: Tensor, columns: int) -> tuple[Descriptor, ...]:
    """Describe q, k, v with as many value columns, and o."""
    width = x.q.shape[-1]
    return ragged(x.q, width), ragged(x.k, width), ragged(x.v, columns), ragged(o, 64)


def row_and_others(t: Tensor | None) -> tuple[int, tuple[int, int]]:
    """Strides of g or beta: that of a batch row, which depends on T, and those of (token, head)."""
    return (0, (0, 0)) if t is None else (t.stride(0), t.stride()[1:])


def token_stride(t: Tensor) -> int:
    """Tokens from one batch row to the next."""
    return t.stride(0) // t.stride(1)


def ragged(t: Tensor, width: int) -> Descriptor:
    """Describes all heads' tokens so that the copy engine clips at the end of any sequence: zeros come from behind it,
    and nothing goes there.

    It clips at the end of axis 2, which stands at 2^30. Of a sequence that ends before row e the row e - i is
    ``[2^30, e, 2^30 - i]``: the strides of the first and the third axis add up to 2^34 numbers of 2 bytes, and 2^30
    times that is 0 modulo 2^64 (the trick of ``triton.tools.ragged_tma``).
    """
    _, token, head, _ = t.stride()
    shape = [0x7FFF0000, 0x7FFF0000, layouts.RAGGED.value, (t.shape[2] - 1) * head + t.shape[3]]
    return Descriptor(t, shape, [2**34 - token, token, token, 1], [1, 1, C, width], layouts.BOX.value)


def lines(rates: Tensor) -> Descriptor:
    """Describes rates, four vectors a row."""
    return Descriptor(rates, rates.shape, rates.stride(), [1, 4 * C], layouts.LINES.value)


def squares(t: Tensor) -> Descriptor:
    """Describes the matrices of chunks."""
    return blocks(t, C)


def saved(r: Residual | None, keys: int = C) -> tuple[Descriptor | None, ...]:
    """Describe what the backward pass gets of chunks; of a state ``keys`` columns at a time."""
    return (None, None, None) if r is None else (blocks(r.states, keys), blocks(r.R, C), blocks(r.U, C))


def blocks(t: Tensor, columns: int) -> Descriptor:
    width = t.shape[-1]
    return Descriptor(t, [t.numel() // width, width], [width, 1], [C, columns], layouts.TILE.value)


def pool(p: Problem, t: Tensor) -> Descriptor:
    """Describes a pool of states, slot by slot and row by row; a slot may have gaps behind it."""
    rows, width = (64, 32) if p.state_v_first else (32, 64)
    layout = layouts.ROW_STATE
    if t.dtype != torch.float32:
        layout = layouts.ROW_HALF if p.state_v_first else layouts.ROW_TILE
    slots, HV, *head = t.shape
    slot = t.stride(0) if slots > 1 else t.numel()
    return Descriptor(t, [slots, HV * head[0], head[1]], [slot, head[1], 1], [1, rows, width], layout.value)


def states(p: Problem, t: Tensor) -> Descriptor:
    """Describes states, row by row."""
    box = [64, 32] if p.state_v_first else [32, 64]
    return Descriptor(t, [p.N * p.HV * p.K, p.V], [p.V, 1], box, layouts.STATE.value)
