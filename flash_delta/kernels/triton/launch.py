"""One launcher per kernel: its grid, arguments and constants.

Nothing here reads a device: grids come from upper bounds (chunk.py), and what varies from call to call (N, T, the
strides of g's and beta's batch rows) is not specialised, so that a length never compiles anything.
"""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from flash_delta.kernels.triton.channel import channel
from flash_delta.kernels.triton.channel_gradients import channel_gradients
from flash_delta.kernels.triton.chunk import C, count_slots
from flash_delta.kernels.triton.factor import factor
from flash_delta.kernels.triton.gradients import gates, key_gradients, query_gradients
from flash_delta.kernels.triton.halved_gradients import halved_gradients
from flash_delta.kernels.triton.key_head_gradients import key_head_gradients
from flash_delta.kernels.triton.launcher import Call, Plan, launch
from flash_delta.kernels.triton.pairs import pairs
from flash_delta.kernels.triton.scan import scan
from flash_delta.kernels.triton.scan_backward import scan_backward
from flash_delta.kernels.triton.solve import solve
from flash_delta.kernels.triton.tiles import (
    HEADS,
    WARP,
    Chip,
    Tile,
    next_power_of_2,
    overlaps,
    precision,
    scan_tiles,
    tile,
)
from flash_delta.kernels.triton.walkers import Walkers, pool_scans
from flash_delta.kernels.triton.workspace import Chain, Channels, Factors, HeadGradients, Residual, Scores, Solved
from flash_delta.problem import SHORT, Inputs, Problem, Slots

LONG = 2**30  # tokens: more than any sequence has


def new_gradients(x: Inputs) -> Inputs:
    """Of everything but A_log and dt_bias, contiguous."""

    def like(t: Tensor | None) -> Tensor | None:
        return None if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device)

    return Inputs(like(x.q), like(x.k), like(x.v), like(x.g), like(x.beta), like(x.p), like(x.initial_state))


def run_channel(c: Call, s: Solved, ch: Channels) -> None:
    """The strengths and norms in ``s``, too, which `solve` writes where there is no decay per channel."""
    p, x = c.p, c.x

    def plans() -> Iterator[Plan]:
        yield plan(
            c, channel, (count_slots(p) * p.HV, 1, 1), tile("channel", p, c.shape.chip),
            p.N, p.T, p.scale, p.lower_bound or 0.0, p.beta_range, strides(x.q), strides(x.k), strides(x.g),
            batch(x.beta), tokens(x.beta),
        )  # fmt: skip

    pointers = (x.q, x.k, x.g, x.beta, x.A_log, x.dt_bias, x.cu_seqlens, *ch, s.vectors, s.norms)
    launch(c, channel, pointers, plans)


def run_solve(c: Call, ch: Channels, s: Solved) -> None:
    p, x = c.p, c.x

    def plans() -> Iterator[Plan]:
        yield plan(
            c, solve, (count_slots(p), p.H, 1), WARP,
            p.N, p.T, p.beta_range, strides(x.q), strides(x.k), strides(c.keys), batch(x.g), tokens(x.g),
            batch(x.beta), tokens(x.beta), follows=p.gate == "channel",
        )  # fmt: skip

    pointers = (x.q, x.k, c.keys, x.g, x.beta, x.A_log, x.dt_bias, x.cu_seqlens, ch.L, *s)
    launch(c, solve, pointers, plans)


def run_factor(c: Call, s: Solved, f: Factors, t: Tile | None = None, *, follows: bool = True) -> None:
    """``follows``: the launch before it was this call's."""
    p, x = c.p, c.x

    def plans() -> Iterator[Plan]:
        yield plan(
            c, factor, (count_slots(p), p.H, 1), t or tile("factor", p, c.shape.chip),
            p.N, p.T, p.scale, strides(x.q), strides(x.k), follows=follows,
        )  # fmt: skip

    launch(c, factor, (x.q, x.k, x.cu_seqlens, *s, *f), plans)


def run_scan(
    c: Call, ch: Channels, s: Solved, f: Factors, o: Tensor, final: Tensor | None, r: Residual | None, *choice: Tile,
    slots: Slots | None = None,
) -> None:  # fmt: skip
    """Stage output, too; with ``r``, what the backward pass needs. With ``slots`` states are theirs."""
    p, x, kernel = c.p, c.x, "scan" if r is None else "scan_kept"
    initial, indices, counts = x.initial_state, (None,) * 4, (0, 0, 0)
    if slots is not None:
        initial = final = slots.state_pool
        indices = (slots.read_indices, slots.write_indices, slots.has_initial_state, slots.checkpoint_indices)
        counts = (len(final), 0 if indices[3] is None else indices[3].shape[1], min(p.checkpoint_every, p.T + C) // C)

    def plans() -> Iterator[Plan]:
        for w in walks(kernel, p, c.shape.chip, every(c), *choice):
            t = w.tile
            yield plan(
                c, scan, scan_grid(p, w), t,
                p.N, p.T, 0, w.least, w.most, int(w.others), *counts, *(table(t)[0] for t in indices[:3]),
                *table(indices[3]), strides(x.q), strides(c.keys), strides(x.v), states(p, initial), states(p, final),
                INITIAL=initial is not None, POOL=slots is not None, SEGMENTS=False, OUTPUT=True,
                SAVE=r is not None, TMA=t.tma and fits_tma(x.v, *outside(p, x)), follows=True,
            )  # fmt: skip

    launch(c, scan, (*walked(c, ch, s, f), initial, o, final, *(r or (None,) * 3), *indices), plans)


def walks(kernel: str, p: Problem, chip: Chip, every: bool, *choice: Tile) -> tuple[Walkers, ...]:
    """The launches of a scan; on a pool, for as many long sequences as there may be."""
    if short(p) and not choice:
        return pool_scans(p, chip, every)
    return tuple(Walkers(t, p.N) for t in choice or scan_tiles(kernel, p, chip, every))


def scan_grid(p: Problem, w: Walkers) -> tuple[int, int, int]:
    return -(-p.V // columns(p, w.tile)), p.HV, w.sequences + p.packed


def scratch_bytes(p: Problem, x: Inputs, chip: Chip) -> int:
    """What `run_scan` takes for descriptors in a call without gradients: 128 bytes for each that a program makes."""
    channel, most = p.gate == "channel", 0
    for w in walks("scan", p, chip, every=False):
        if w.tile.tma and fits_tma(x.v, *outside(p, x)):
            # X, v, what reads, Y, o; what erases; A to solve for U. Y comes in registers where the kernel says AHEAD.
            count = 5 + (p.erase is not None) * (1 + channel) - (channel and columns(p, w.tile) == 128)
            count *= 1 + (short(p) > 0)  # a program's own sequence, and the loop over what others there are
            most = max(most, 128 * count * prod(scan_grid(p, w)))  # a launch's are free when it is launched
    return most


def run_scan_backward(
    c: Call, ch: Channels, s: Solved, f: Factors, r: Residual, do: Tensor, dfinal: Tensor | None, chain: Chain,
    dinitial: Tensor | None, *choice: Tile, recompute: bool,
) -> None:  # fmt: skip
    """``recompute``: writes ``r``, too, in programs of their own."""
    p, x = c.p, c.x

    def plans() -> Iterator[Plan]:
        for t in choice or scan_tiles("scan_both" if recompute else "scan_backward", p, c.shape.chip, every(c)):
            yield plan(
                c, scan_backward, (-(-p.V // columns(p, t)), p.HV, p.N * (1 + recompute)), t,
                p.N, p.T, strides(x.q), strides(c.keys), strides(x.v), strides(do), states(p, x.initial_state),
                states(p, dfinal), states(p, dinitial),
                FINAL=dfinal is not None, INITIAL=x.initial_state is not None, RECOMPUTE=recompute,
                TMA=t.tma and fits_tma(x.v, do, *outside(p, x)), follows=recompute,
            )  # fmt: skip

    read = (*readers(c, ch), x.v, do, x.cu_seqlens, s.A, *maps(ch, f), ch.gamma, x.initial_state, dfinal)
    pointers = (*read, *r, *chain, dinitial)
    launch(c, scan_backward, pointers, plans)


def run_pairs(
    c: Call, ch: Channels, s: Solved, r: Residual, chain: Chain, do: Tensor, d: Inputs, scores: Scores,
    heads: HeadGradients, t: Tile | None = None,
) -> None:  # fmt: skip
    p, x = c.p, c.x

    def plans() -> Iterator[Plan]:
        with_states = heads.written is not None
        chosen = t or tile("channel_pairs" if with_states else "pairs", p, c.shape.chip)
        # Steps of loops over K. Of states 64 at least: narrower wgmma read wrong addresses (Triton 3.6; docs/notes).
        BK = min(chosen.BV, max(64, block(p.K))) if with_states else min(chosen.BV, block(p.K))
        yield plan(
            c, pairs, (count_slots(p), p.HV, 1), chosen,
            p.N, p.T, p.scale, p.beta_range, strides(x.q), strides(x.k), strides(c.keys), strides(do),
            BK=BK, STATES=with_states, follows=True,
        )  # fmt: skip

    read = (
        x.q, x.k, c.keys, do, r.R, r.U, chain.dU, ch.L, r.states, chain.dstates, s.vectors, s.norms, x.cu_seqlens
    )  # fmt: skip
    launch(c, pairs, (*read, d.v, d.beta, *scores, *heads[:4]), plans)


def run_query_gradients(
    c: Call, s: Solved, f: Factors, r: Residual, do: Tensor, dq: Tensor, scores: Scores, t: Tile | None = None
) -> None:
    p, x = c.p, c.x

    def plans() -> Iterator[Plan]:
        yield plan(
            c, query_gradients, (count_slots(p), p.H, 1), t or tile("query_gradients", p, c.shape.chip),
            p.N, p.T, strides(x.q), strides(x.k), strides(do), follows=True,
        )  # fmt: skip

    pointers = (x.q, x.k, do, r.states, scores.queries, s.norms, f.rates, x.cu_seqlens, dq, scores.parts)
    launch(c, query_gradients, pointers, plans)


def run_key_gradients(
    c: Call, s: Solved, f: Factors, r: Residual, chain: Chain, d: Inputs, scores: Scores, t: Tile | None = None
) -> None:
    p, x = c.p, c.x

    def plans() -> Iterator[Plan]:
        yield plan(
            c, key_gradients, (count_slots(p), p.H, 1), t or tile("key_gradients", p, c.shape.chip),
            p.N, p.T, strides(x.q), strides(x.k), strides(c.keys), follows=True,
        )  # fmt: skip

    pointers = (
        x.q, x.k, c.keys, r.U, chain.dU, r.states, chain.dstates, scores.queries, scores.keys, s.vectors, s.norms,
        f.rates, x.cu_seqlens, d.k, d.p, scores.parts,
    )  # fmt: skip
    launch(c, key_gradients, pointers, plans)


def run_gates(c: Call, s: Solved, scores: Scores, dg: Tensor, dA_log: Tensor | None, ddt_bias: Tensor | None) -> None:
    """dg; and of A_log and dt_bias ``[slots, HV]``, to be summed."""
    p, x = c.p, c.x

    def plans() -> Iterator[Plan]:
        yield plan(c, gates, (count_slots(p), p.HV, 1), WARP, p.N, p.T, batch(x.g), tokens(x.g), follows=True)

    pointers = (
        x.g, x.A_log, x.dt_bias, s.vectors, scores.parts, x.cu_seqlens, dg, dA_log, ddt_bias
    )  # fmt: skip
    launch(c, gates, pointers, plans)


def run_channel_gradients(
    c: Call, scores: Scores, heads: HeadGradients, dg: Tensor, dA_log: Tensor | None, ddt_bias: Tensor | None,
    t: Tile | None = None,
) -> None:  # fmt: skip
    """dg; dq and dk of every value head; and of A_log and dt_bias ``[slots, HV, K]``, to be summed. For bfloat16."""
    p, x = c.p, c.x

    def plans() -> Iterator[Plan]:
        chosen = t or tile("channel_gradients", p, c.shape.chip)
        W = min(chosen.BV, block(p.K))  # channels of one program
        yield plan(
            c, channel_gradients, (count_slots(p) * -(-p.K // W), p.HV, 1), chosen,
            p.N, p.T, p.lower_bound or 0.0, strides(x.q), strides(x.k), strides(x.g), W=W, follows=True,
        )  # fmt: skip

    pointers = (
        x.q, x.k, x.g, x.A_log, x.dt_bias, scores.queries, scores.keys, x.cu_seqlens, *heads, dg, dA_log, ddt_bias
    )  # fmt: skip
    launch(c, channel_gradients, pointers, plans)


def needs_halving(p: Problem) -> bool:
    """Whether there may be channels that `channel_gradients` leaves to `halved_gradients`."""
    return p.dtype != torch.bfloat16 or p.lower_bound is None


def run_halved_gradients(
    c: Call, s: Solved, r: Residual, chain: Chain, do: Tensor, scores: Scores, heads: HeadGradients, dg: Tensor,
    dA_log: Tensor | None, ddt_bias: Tensor | None, t: Tile | None = None,
) -> None:  # fmt: skip
    """What `channel_gradients` says; behind it, only what it could not say."""
    p, x = c.p, c.x

    def plans() -> Iterator[Plan]:
        chosen = t or tile("halved_gradients", p, c.shape.chip)
        W = min(chosen.BV, block(p.K))  # channels of one program, and all value columns
        yield plan(
            c, halved_gradients, (count_slots(p) * -(-p.K // W), p.HV, 1), chosen,
            p.N, p.T, p.scale, p.lower_bound or 0.0, strides(x.q), strides(x.k), strides(x.g), strides(do),
            W=W, BV=block(p.V), follows=True,
        )  # fmt: skip

    pointers = (
        x.q, x.k, x.g, x.A_log, x.dt_bias, do, r.U, chain.dU, r.states, chain.dstates, scores.queries, scores.keys,
        s.vectors, s.norms, x.cu_seqlens, heads.fallen, heads.dq, heads.dk, dg, dA_log, ddt_bias,
    )  # fmt: skip
    launch(c, halved_gradients, pointers, plans)


def run_key_head_gradients(c: Call, s: Solved, heads: HeadGradients, d: Inputs) -> None:
    p, x = c.p, c.x

    def plans() -> Iterator[Plan]:
        yield plan(
            c, key_head_gradients, (count_slots(p), p.H, 1), HEADS, p.N, p.T, strides(x.q), strides(x.k), follows=True
        )  # fmt: skip

    launch(c, key_head_gradients, (x.q, x.k, s.norms, x.cu_seqlens, heads.dq, heads.dk, d.q, d.k), plans)


def plan(
    c: Call, kernel: Any, grid: tuple[int, int, int], t: Tile, *scalars: Any, follows: bool = False, **own: Any
) -> Plan:
    """With the constants that the kernel names; ``own``: those that are the launch's, not the problem's."""
    overlap = overlaps(c.p, c.shape.chip)
    given = id(kernel), c.shape.key, c.shape.chip, t, *own.values()
    used = _constants.get(given)
    if used is None:
        used = _constants[given] = _constants_of(c, kernel, t, own)
    return Plan(grid, t, scalars, used, follows and overlap)


_constants: dict[tuple, dict[str, Any]] = {}  # as many as there are compiled kernels


def _constants_of(c: Call, kernel: Any, t: Tile, own: dict[str, Any]) -> dict[str, Any]:
    p, x = c.p, c.x
    constants = {
        "H": p.H, "HV": p.HV, "K": p.K, "BK": block(p.K), "V": p.V, "BV": columns(p, t), "C": C, "PACKED": p.packed,
        "GATE": p.gate == "scalar", "CHANNEL": p.gate == "channel", "RAW_GATE": p.raw_gate,
        "BOUNDED": p.lower_bound is not None, "HAS_A": x.A_log is not None, "HAS_BIAS": x.dt_bias is not None,
        "HAS_BETA": x.beta is not None, "RAW_BETA": p.raw_beta, "NORM": p.l2norm, "ERASE": p.erase is not None,
        "UNDECAYED": p.erase == "undecayed", "OWN_P": x.p is not None, "PRECISION": precision(p.dtype, c.shape.chip),
        "OVERLAP": overlaps(p, c.shape.chip), "SHORT": short(p),
    } | own  # fmt: skip
    return {name: constants[name] for name in kernel.arg_names if name in constants}


def short(p: Problem) -> int:
    """Tokens of packed sequences that `decode` runs; 0 where rows are no packed sequences, or it runs none."""
    if not p.packed or p.pool is None or p.batch_invariant:
        return 0
    return LONG if p.recurrent else SHORT


def walked(c: Call, ch: Channels, s: Solved, f: Factors) -> tuple[Any, ...]:
    """What a scan reads of every chunk."""
    return (*readers(c, ch), c.x.v, c.x.cu_seqlens, s.A, *maps(ch, f), ch.gamma)


def readers(c: Call, ch: Channels) -> tuple[Any, Any]:
    """What reads and what erases, as the scans take it."""
    return (c.x.q, c.keys) if c.p.gate != "channel" else (ch.Qg, ch.Kg)


def maps(ch: Channels, f: Factors) -> tuple[Any, Any, Any]:
    """What the scans apply to R or, with a decay per channel, to U; and the rates."""
    return tuple(f) if ch.P is None else (ch.Kd, ch.P, ch.rates)


def outside(p: Problem, x: Inputs) -> tuple[Tensor, ...]:
    """Those of ``readers`` that the caller laid out."""
    return (x.q, x.k if x.p is None else x.p) if p.gate != "channel" else ()


def every(c: Call) -> bool:
    """Whether all tiles are wanted that other sizes may choose."""
    return c.compiling is not None


def columns(p: Problem, t: Tile) -> int:
    """Value columns of a tile."""
    return min(t.BV, block(p.V))


def block(width: int) -> int:
    """The tile of a head's width: a power of two that products can take."""
    return max(16, next_power_of_2(width))


def strides(t: Tensor) -> tuple[int, ...]:
    """(batch, token, head, channel). Specialised: which are multiples of 16 decides how wide loads are, and with usual
    heads all are, whatever T."""
    return t.stride()


def batch(t: Tensor | None) -> int:
    """The stride of g's or beta's batch rows, T * HV and not specialised: a length must not compile anything."""
    return 0 if t is None else t.stride(0)


def tokens(t: Tensor | None) -> tuple[int, ...]:
    """The other strides of g or beta: (token, head)."""
    return (0, 0) if t is None else t.stride()[1:]


def states(p: Problem, t: Tensor | None) -> tuple[int, ...]:
    """Strides of (sequence, head, key, value) in either layout."""
    if t is None:
        return 0, 0, 0, 0
    sequence, head, *matrix = t.stride()
    return sequence, head, *(reversed(matrix) if p.state_v_first else matrix)


def table(t: Tensor | None) -> tuple[int, int]:
    """Strides of (row, column) of indices; without columns all tokens have the same."""
    return (0, 0) if t is None else (*t.stride(), 0)[:2]


def fits_tma(*tensors: Tensor) -> bool:
    """Whether descriptors can describe the heads of these tensors."""
    return all(
        t.element_size() == 2 and t.stride(3) == 1 and not any(s % 8 for s in t.stride()[:3]) and t.data_ptr() % 16 == 0
        for t in tensors
    )
