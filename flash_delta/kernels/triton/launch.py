"""The kernels' launchers: one function per kernel, from a problem and its tensors to a grid.

Nothing here reads a device: grids come from upper bounds (chunk.py), and what varies from call to call (N, T, strides of the
batch) is not specialised, so that a length never compiles anything.
"""

from functools import partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from flash_delta.kernels.triton.chunk import C, count_slots
from flash_delta.kernels.triton.factor import factor
from flash_delta.kernels.triton.gradients import gates, key_gradients, query_gradients
from flash_delta.kernels.triton.pairs import pairs
from flash_delta.kernels.triton.scan import scan
from flash_delta.kernels.triton.scan_backward import scan_backward
from flash_delta.kernels.triton.solve import solve
from flash_delta.kernels.triton.tiles import Tile, chip_of, precision, tile
from flash_delta.problem import Inputs, Problem


class Solved(NamedTuple):
    """What `solve` writes."""

    A: Tensor | None  # [slots, HV, C, C]; None where nothing is erased
    vectors: Tensor  # [slots, HV, 4, C]: G high, G low, b, log decay
    norms: Tensor | None  # [slots, H, 3, C]: of q, k, p; None without a norm


class Factors(NamedTuple):
    """What `factor` writes."""

    X: Tensor  # [slots, HV, C, K]
    Y: Tensor  # [slots, HV, C, C]
    rates: Tensor  # [slots, HV, 4, C]


class Residual(NamedTuple):
    """What `scan` writes for the backward pass."""

    states: Tensor  # [slots, HV, V, K]
    R: Tensor  # [slots, HV, C, V]
    U: Tensor  # [slots, HV, C, V]


class Chain(NamedTuple):
    """What `scan_backward` writes."""

    dstates: Tensor  # [slots, HV, V, K]
    dU: Tensor  # [slots, HV, C, V]


def new_solved(p: Problem) -> Solved:
    slots, new = count_slots(p), torch.empty
    return Solved(
        None if p.erase is None else new(slots, p.HV, C, C, dtype=p.dtype, device=p.device),
        new(slots, p.HV, 4, C, dtype=torch.float32, device=p.device),
        new(slots, p.H, 3, C, dtype=torch.float32, device=p.device) if p.l2norm else None,
    )


def new_factors(p: Problem) -> Factors:
    slots, new = count_slots(p), torch.empty
    return Factors(
        new(slots, p.HV, C, p.K, dtype=p.dtype, device=p.device),
        new(slots, p.HV, C, C, dtype=p.dtype, device=p.device),
        new(slots, p.HV, 4, C, dtype=torch.float32, device=p.device),
    )


def new_chain(p: Problem) -> Chain:
    slots, new = count_slots(p), torch.empty
    return Chain(
        new(slots, p.HV, p.V, p.K, dtype=p.dtype, device=p.device),
        new(slots, p.HV, C, p.V, dtype=p.dtype, device=p.device),
    )


def new_gradients(p: Problem, x: Inputs) -> Inputs:
    """Of everything but A_log and dt_bias, contiguous."""

    def like(t: Tensor | None) -> Tensor | None:
        return None if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device)

    return Inputs(like(x.q), like(x.k), like(x.v), like(x.g), like(x.beta), like(x.p), like(x.initial_state))


def new_residual(p: Problem) -> Residual:
    slots, new = count_slots(p), torch.empty
    return Residual(
        new(slots, p.HV, p.V, p.K, dtype=p.dtype, device=p.device),
        new(slots, p.HV, C, p.V, dtype=p.dtype, device=p.device),
        new(slots, p.HV, C, p.V, dtype=p.dtype, device=p.device),
    )


def run_solve(p: Problem, x: Inputs, s: Solved, t: Tile | None = None) -> None:
    keys = x.k if x.p is None else x.p
    slots, chip = count_slots(p), chip_of(p.device)
    t = t or tile("solve", p, chip)
    solve[(slots, p.H)](
        x.q, x.k, keys, x.g, x.beta, flat(x.A_log), flat(x.dt_bias), x.cu_seqlens, *s, p.N, p.T, p.beta_range,
        strides(x.q), strides(x.k), strides(keys), batch(x.g), tokens(x.g), batch(x.beta), tokens(x.beta),
        H=p.H, HV=p.HV, K=p.K, BK=block(p.K), C=C, PACKED=p.packed, GATE=p.gate == "scalar", RAW_GATE=p.raw_gate,
        HAS_BIAS=x.dt_bias is not None, HAS_BETA=x.beta is not None, RAW_BETA=p.raw_beta, NORM=p.l2norm,
        UNDECAYED=p.erase == "undecayed", ERASE=p.erase is not None, OWN_P=x.p is not None,
        PRECISION=precision(p, chip), **options(t),
    )  # fmt: skip


def run_factor(p: Problem, x: Inputs, s: Solved, f: Factors, t: Tile | None = None) -> None:
    slots, chip = count_slots(p), chip_of(p.device)
    t = t or tile("factor", p, chip)
    factor[(slots, p.H)](
        x.q, x.k, x.cu_seqlens, *s, *f, p.N, p.T, p.scale, strides(x.q), strides(x.k),
        H=p.H, HV=p.HV, K=p.K, BK=block(p.K), C=C, PACKED=p.packed, GATE=p.gate == "scalar", NORM=p.l2norm,
        UNDECAYED=p.erase == "undecayed", ERASE=p.erase is not None, PRECISION=precision(p, chip), **options(t),
    )  # fmt: skip


def run_scan(
    p: Problem, x: Inputs, A: Tensor | None, f: Factors, o: Tensor | None, final: Tensor | None, r: Residual | None,
    t: Tile | None = None,
) -> None:  # fmt: skip
    """With ``o`` and ``final``, stage output; with ``r``, what the backward pass needs."""
    keys, chip = x.k if x.p is None else x.p, chip_of(p.device)
    t = t or tile("scan", p, chip)
    BV = min(t.BV, block(p.V))
    scan[(triton.cdiv(p.V, BV), p.HV, p.N + p.packed)](
        x.q, keys, x.v, x.cu_seqlens, A, *f, x.initial_state, o, final, *(r or (None,) * 3), p.N, p.T,
        strides(x.q), strides(keys), strides(x.v),
        states(p, x.initial_state), states(p, final),
        H=p.H, HV=p.HV, K=p.K, BK=block(p.K), V=p.V, BV=BV, C=C, PACKED=p.packed, ERASE=p.erase is not None,
        INITIAL=x.initial_state is not None, OUTPUT=o is not None, SAVE=r is not None,
        TMA=t.tma and fits_tma(x.q, keys, x.v), PRECISION=precision(p, chip),
        **options(t),
    )  # fmt: skip


def run_scan_backward(
    p: Problem, x: Inputs, f: Factors, do: Tensor, dfinal: Tensor | None, chain: Chain,
    dinitial: Tensor | None, t: Tile | None = None,
) -> None:  # fmt: skip
    keys, chip = x.k if x.p is None else x.p, chip_of(p.device)
    t = t or tile("scan_backward", p, chip)
    BV = min(t.BV, block(p.V))
    scan_backward[(triton.cdiv(p.V, BV), p.HV, p.N)](
        x.q, keys, do, x.cu_seqlens, *f, dfinal, *chain, dinitial, p.N, p.T,
        strides(x.q), strides(keys), strides(do),
        states(p, dfinal), states(p, dinitial),
        H=p.H, HV=p.HV, K=p.K, BK=block(p.K), V=p.V, BV=BV, C=C, PACKED=p.packed, ERASE=p.erase is not None,
        FINAL=dfinal is not None, INITIAL=dinitial is not None,
        TMA=t.tma and fits_tma(x.q, keys, do), PRECISION=precision(p, chip),
        **options(t),
    )  # fmt: skip


def run_gradients(
    p: Problem, x: Inputs, s: Solved, f: Factors, r: Residual, chain: Chain, do: Tensor, d: Inputs
) -> tuple[Tensor | None, Tensor | None]:
    """Fills ``d``; returns the gradients of A_log and dt_bias, a row of heads per slot."""
    keys = x.k if x.p is None else x.p
    slots, chip = count_slots(p), chip_of(p.device)
    new = partial(torch.empty, device=p.device)
    dPD, taken = (new(slots, p.HV, C, C, dtype=p.dtype) for _ in range(2))
    parts = new(slots, p.HV, 4, C, dtype=torch.float32) if p.gate == "scalar" else None
    common = {
        "H": p.H, "HV": p.HV, "K": p.K, "V": p.V, "C": C, "PACKED": p.packed, "GATE": p.gate == "scalar", "NORM": p.l2norm,
        "PRECISION": precision(p, chip),
    }  # fmt: skip
    undecayed = p.erase == "undecayed"
    t = tile("pairs", p, chip)
    pairs[(slots, p.HV)](
        x.q, x.k, keys, do, r.R, r.U, chain.dU, s.vectors, s.norms, x.cu_seqlens, d.v, d.beta, dPD, taken, parts,
        p.N, p.T, p.scale, p.beta_range, strides(x.q), strides(x.k), strides(keys), strides(do),
        BK=min(t.BV, block(p.K)), BV=min(t.BV, block(p.V)), HAS_BETA=x.beta is not None, RAW_BETA=p.raw_beta,
        UNDECAYED=undecayed, ERASE=p.erase is not None, OWN_P=x.p is not None, **common, **options(t),
    )  # fmt: skip
    t = tile("query_gradients", p, chip)
    query_gradients[(slots, p.H)](
        x.q, x.k, do, r.states, dPD, s.norms, f.rates, x.cu_seqlens, d.q, parts, p.N, p.T,
        strides(x.q), strides(x.k), strides(do), BK=block(p.K), BV=min(t.BV, block(p.V)), **common, **options(t),
    )  # fmt: skip
    t = tile("key_gradients", p, chip)
    key_gradients[(slots, p.H)](
        x.q, x.k, keys, r.U, chain.dU, r.states, chain.dstates, dPD, taken, s.vectors, s.norms, f.rates, x.cu_seqlens,
        d.k, d.p, parts, p.N, p.T, strides(x.q), strides(x.k), strides(keys), BK=block(p.K), BV=min(t.BV, block(p.V)),
        ERASE=p.erase is not None, OWN_P=x.p is not None, **common, **options(t),
    )  # fmt: skip
    if p.gate == "none":
        return None, None
    dA_log = new(slots, p.HV, dtype=torch.float32) if x.A_log is not None else None
    ddt_bias = new(slots, p.HV, dtype=torch.float32) if x.dt_bias is not None else None
    gates[(slots, p.HV)](
        x.g, flat(x.A_log), flat(x.dt_bias), s.vectors, parts, x.cu_seqlens, d.g, dA_log, ddt_bias, p.N, p.T, batch(x.g),
        tokens(x.g), HV=p.HV, C=C, PACKED=p.packed, RAW_GATE=p.raw_gate, HAS_BIAS=x.dt_bias is not None,
        UNDECAYED=undecayed, ERASE=p.erase is not None, **options(tile("gates", p, chip)),
    )  # fmt: skip
    return dA_log, ddt_bias


def options(t: Tile) -> dict[str, int | bool]:
    """What Triton takes beside a kernel's arguments; AMD's compiler does not know ``maxnreg``."""
    chosen = {"num_warps": t.warps, "num_stages": t.stages, "enable_fp_fusion": True}
    return chosen if t.registers is None else chosen | {"maxnreg": t.registers}


def block(width: int) -> int:
    """The tile of a head's width: a power of two that products can take."""
    return max(16, triton.next_power_of_2(width))


def flat(t: Tensor | None) -> Tensor | None:
    """A parameter per head, its elements side by side."""
    return None if t is None else t.contiguous()


def strides(t: Tensor | None) -> tuple[int, ...]:
    """(batch, token, head, channel). Specialised: which are multiples of 16 decides how wide loads are, and with usual
    heads all are, whatever T."""
    return (0, 0, 0, 0) if t is None else t.stride()


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
