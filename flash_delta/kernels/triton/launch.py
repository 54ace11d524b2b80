"""One launcher per kernel: its grid, arguments and constants.

Nothing here reads a device: grids come from upper bounds (chunk.py), and what varies from call to call (N, T, the
strides of g's and beta's batch rows) is not specialised, so that a length never compiles anything.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from flash_delta.kernels.triton.chunk import C
from flash_delta.kernels.triton.factor import factor
from flash_delta.kernels.triton.gradients import gates, key_gradients, query_gradients
from flash_delta.kernels.triton.launcher import Call, launch
from flash_delta.kernels.triton.pairs import pairs
from flash_delta.kernels.triton.scan import scan
from flash_delta.kernels.triton.scan_backward import scan_backward
from flash_delta.kernels.triton.solve import solve
from flash_delta.kernels.triton.tiles import Tile, heads_per_program, precision, scan_tiles, tile
from flash_delta.kernels.triton.workspace import Chain, Factors, Residual, Scores, Solved
from flash_delta.problem import Inputs, Problem


def new_gradients(x: Inputs) -> Inputs:
    """Of everything but A_log and dt_bias, contiguous."""

    def like(t: Tensor | None) -> Tensor | None:
        return None if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device)

    return Inputs(like(x.q), like(x.k), like(x.v), like(x.g), like(x.beta), like(x.p), like(x.initial_state))


def run_solve(c: Call, s: Solved, t: Tile | None = None) -> None:
    p, x = c.p, c.x
    heads = heads_per_program("solve", p, c.chip, c.slots)
    args = (
        x.q, x.k, c.keys, x.g, x.beta, flat(x.A_log), flat(x.dt_bias), x.cu_seqlens, *s, p.N, p.T, heads, p.beta_range,
        strides(x.q), strides(x.k), strides(c.keys), batch(x.g), tokens(x.g), batch(x.beta), tokens(x.beta),
    )  # fmt: skip
    launch(c, solve, (c.slots, p.HV // heads, 1), args, t or tile("solve", p, c.chip), lambda: {
        "H": p.H, "HV": p.HV, "K": p.K, "BK": block(p.K), "C": C, "PACKED": p.packed, "GATE": p.gate == "scalar",
        "RAW_GATE": p.raw_gate, "HAS_BIAS": x.dt_bias is not None, "HAS_BETA": x.beta is not None,
        "RAW_BETA": p.raw_beta, "NORM": p.l2norm, "UNDECAYED": p.erase == "undecayed", "ERASE": p.erase is not None,
        "OWN_P": x.p is not None, "PRECISION": precision(p, c.chip),
    })  # fmt: skip


def run_factor(c: Call, s: Solved, f: Factors, t: Tile | None = None) -> None:
    p, x = c.p, c.x
    heads = heads_per_program("factor", p, c.chip, c.slots)
    args = (x.q, x.k, x.cu_seqlens, *s, *f, p.N, p.T, heads, p.scale, strides(x.q), strides(x.k))
    launch(c, factor, (c.slots, p.HV // heads, 1), args, t or tile("factor", p, c.chip), lambda: {
        "H": p.H, "HV": p.HV, "K": p.K, "BK": block(p.K), "C": C, "PACKED": p.packed, "GATE": p.gate == "scalar",
        "NORM": p.l2norm, "UNDECAYED": p.erase == "undecayed", "ERASE": p.erase is not None,
        "PRECISION": precision(p, c.chip),
    })  # fmt: skip


def run_scan(
    c: Call, s: Solved, f: Factors, o: Tensor | None, final: Tensor | None, r: Residual | None, *choice: Tile
) -> None:
    """With ``o`` and ``final``, stage output; with ``r``, what the backward pass needs."""
    p, x = c.p, c.x
    args = (
        x.q, c.keys, x.v, x.cu_seqlens, s.A, *f, x.initial_state, o, final, *(r or (None,) * 3), p.N, p.T,
        strides(x.q), strides(c.keys), strides(x.v), states(p, x.initial_state), states(p, final),
    )  # fmt: skip
    kernel = "scan" if o is None or r is None else "scan_kept"
    for t in choice or scan_tiles(kernel, p, c.chip, c.compiling is not None):
        BV = min(t.BV, block(p.V))
        launch(c, scan, (triton.cdiv(p.V, BV), p.HV, p.N + p.packed), args, t, lambda BV=BV, t=t: {
            "H": p.H, "HV": p.HV, "K": p.K, "BK": block(p.K), "V": p.V, "BV": BV, "C": C, "PACKED": p.packed,
            "ERASE": p.erase is not None, "INITIAL": x.initial_state is not None, "OUTPUT": o is not None,
            "SAVE": r is not None, "TMA": t.tma and fits_tma(x.q, c.keys, x.v), "PRECISION": precision(p, c.chip),
        })  # fmt: skip


def run_scan_backward(
    c: Call, f: Factors, do: Tensor, dfinal: Tensor | None, chain: Chain, dinitial: Tensor | None, *choice: Tile
) -> None:
    p, x = c.p, c.x
    args = (
        x.q, c.keys, do, x.cu_seqlens, *f, dfinal, *chain, dinitial, p.N, p.T,
        strides(x.q), strides(c.keys), strides(do), states(p, dfinal), states(p, dinitial),
    )  # fmt: skip
    for t in choice or scan_tiles("scan_backward", p, c.chip, c.compiling is not None):
        BV = min(t.BV, block(p.V))
        launch(c, scan_backward, (triton.cdiv(p.V, BV), p.HV, p.N), args, t, lambda BV=BV, t=t: {
            "H": p.H, "HV": p.HV, "K": p.K, "BK": block(p.K), "V": p.V, "BV": BV, "C": C, "PACKED": p.packed,
            "ERASE": p.erase is not None, "FINAL": dfinal is not None, "INITIAL": dinitial is not None,
            "TMA": t.tma and fits_tma(x.q, c.keys, do), "PRECISION": precision(p, c.chip),
        })  # fmt: skip


def run_pairs(
    c: Call, s: Solved, r: Residual, chain: Chain, do: Tensor, d: Inputs, scores: Scores, t: Tile | None = None
) -> None:
    p, x = c.p, c.x
    t = t or tile("pairs", p, c.chip)
    args = (
        x.q, x.k, c.keys, do, r.R, r.U, chain.dU, s.vectors, s.norms, x.cu_seqlens, d.v, d.beta, *scores, p.N,
        p.T, p.scale, p.beta_range, strides(x.q), strides(x.k), strides(c.keys), strides(do),
    )  # fmt: skip
    launch(c, pairs, (c.slots, p.HV, 1), args, t, lambda: _widths(c, t) | {"BK": min(t.BV, block(p.K))} | {
        "C": C, "PACKED": p.packed, "GATE": p.gate == "scalar", "HAS_BETA": x.beta is not None, "RAW_BETA": p.raw_beta,
        "NORM": p.l2norm, "UNDECAYED": p.erase == "undecayed", "ERASE": p.erase is not None, "OWN_P": x.p is not None,
        "PRECISION": precision(p, c.chip),
    })  # fmt: skip


def run_query_gradients(
    c: Call, s: Solved, f: Factors, r: Residual, do: Tensor, dq: Tensor, scores: Scores, t: Tile | None = None
) -> None:
    p, x = c.p, c.x
    t = t or tile("query_gradients", p, c.chip)
    args = (
        x.q, x.k, do, r.states, scores.queries, s.norms, f.rates, x.cu_seqlens, dq, scores.parts, p.N, p.T,
        strides(x.q), strides(x.k), strides(do),
    )  # fmt: skip
    launch(c, query_gradients, (c.slots, p.H, 1), args, t, lambda: _widths(c, t) | {
        "C": C, "PACKED": p.packed, "GATE": p.gate == "scalar", "NORM": p.l2norm, "PRECISION": precision(p, c.chip),
    })  # fmt: skip


def run_key_gradients(
    c: Call, s: Solved, f: Factors, r: Residual, chain: Chain, d: Inputs, scores: Scores, t: Tile | None = None
) -> None:
    p, x = c.p, c.x
    t = t or tile("key_gradients", p, c.chip)
    args = (
        x.q, x.k, c.keys, r.U, chain.dU, r.states, chain.dstates, scores.queries, scores.keys, s.vectors, s.norms,
        f.rates, x.cu_seqlens, d.k, d.p, scores.parts, p.N, p.T, strides(x.q), strides(x.k), strides(c.keys),
    )  # fmt: skip
    launch(c, key_gradients, (c.slots, p.H, 1), args, t, lambda: _widths(c, t) | {
        "C": C, "PACKED": p.packed, "GATE": p.gate == "scalar", "NORM": p.l2norm, "ERASE": p.erase is not None,
        "OWN_P": x.p is not None, "PRECISION": precision(p, c.chip),
    })  # fmt: skip


def run_gates(
    c: Call,
    s: Solved,
    scores: Scores,
    dg: Tensor,
    dA_log: Tensor | None,
    ddt_bias: Tensor | None,
    t: Tile | None = None,
) -> None:
    """dg; and of A_log and dt_bias ``[slots, HV]``, to be summed."""
    p, x = c.p, c.x
    args = (
        x.g, flat(x.A_log), flat(x.dt_bias), s.vectors, scores.parts, x.cu_seqlens, dg, dA_log, ddt_bias, p.N, p.T,
        batch(x.g), tokens(x.g),
    )  # fmt: skip
    launch(c, gates, (c.slots, p.HV, 1), args, t or tile("gates", p, c.chip), lambda: {
        "HV": p.HV, "C": C, "PACKED": p.packed, "RAW_GATE": p.raw_gate, "HAS_BIAS": x.dt_bias is not None,
        "UNDECAYED": p.erase == "undecayed", "ERASE": p.erase is not None,
    })  # fmt: skip


def _widths(c: Call, t: Tile) -> dict[str, Any]:
    p = c.p
    return {"H": p.H, "HV": p.HV, "K": p.K, "BK": block(p.K), "V": p.V, "BV": min(t.BV, block(p.V))}


def block(width: int) -> int:
    """The tile of a head's width: a power of two that products can take."""
    return max(16, triton.next_power_of_2(width))


def flat(t: Tensor | None) -> Tensor | None:
    """A parameter per head, its elements side by side."""
    return None if t is None else t.contiguous()


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
    return (0, 0, 0, 0) if t is None else (t.mT if p.state_v_first else t).stride()


def fits_tma(*tensors: Tensor) -> bool:
    """Whether descriptors can describe the heads of these tensors."""
    return all(
        t.element_size() == 2 and t.stride(3) == 1 and not any(s % 8 for s in t.stride()[:3]) and t.data_ptr() % 16 == 0
        for t in tensors
    )
