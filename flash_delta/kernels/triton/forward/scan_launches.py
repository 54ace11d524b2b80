"""Decides which launches of `scan` scan the sequences of a call."""

from collections.abc import Iterable
from math import prod
from typing import Any

from flash_delta.kernels.runtime.arguments import columns, fits_tma, short, unit
from flash_delta.kernels.runtime.chip import MOST_PROGRAMS, Chip, Tile
from flash_delta.kernels.runtime.plan import Draft, Layout
from flash_delta.kernels.runtime.pool_launches import PoolLaunch, pool_launches, prompts_at_most
from flash_delta.kernels.runtime.workspace import Channels, Factors, Solved
from flash_delta.kernels.triton.tiles import scan_tiles
from flash_delta.problem import Inputs, Problem

WAVES = 4  # most waves of programs if there are several tiles, since programs that exit also take time


def crowded(p: Problem) -> str | None:
    """Why the grids of a scan have no room for all heads or sequences; None if they have. Backward they have two
    programs for each sequence, and forward one more for the tokens after the last sequence. A prefill may have any
    number of sequences, since a program can take several of them."""
    if p.HV > MOST_PROGRAMS:
        return f"it scans up to {MOST_PROGRAMS:,} heads side by side, there are {p.HV:,}"
    most, when = (MOST_PROGRAMS // 2, "with gradients ") if p.needs_grad else (MOST_PROGRAMS - 1, "")
    if most < p.N and (p.pools is None or p.batch_invariant):
        return f"{when}it scans up to {most:,} sequences side by side, there are {p.N:,}"
    return None


def pool_scans(p: Problem, chip: Chip, every: bool) -> tuple[PoolLaunch, ...]:
    """The launches on a pool. ``every``: all tiles that any number of prompts may choose, or those of this call."""
    choices = scan_tiles("scan", p, chip, every=True)
    if every:
        return tuple(PoolLaunch(t, p.N) for t in choices)

    def programs(t: Tile) -> int:
        return p.HV * -(-p.V // t.BV)

    *launches, last = pool_launches(p, chip, choices, programs)
    bound, most = prompts_at_most(p)
    sequences = bound if most is None else min(bound, most)
    if sequences == bound and len(choices) > 1:
        sequences = min(bound, -(-WAVES * chip.processors // programs(last.tile)))
    sequences = min(sequences, MOST_PROGRAMS - 1)
    return (*launches, last._replace(sequences=max(1, sequences), most=sequences, others=True))


def scan_launches(kernel: str, p: Problem, chip: Chip, every: bool, *choice: Tile) -> tuple[PoolLaunch, ...]:
    """The launches of a scan. On a pool they are for as many long sequences as there may be."""
    if short(p) and not choice:
        return pool_scans(p, chip, every)
    return tuple(PoolLaunch(t, p.N) for t in choice or scan_tiles(kernel, p, chip, every))


def scan_grid(p: Problem, w: PoolLaunch) -> tuple[int, int, int]:
    return -(-p.V // columns(p, w.tile)), p.HV, w.sequences + p.packed


def scratch_bytes(p: Problem, x: Inputs, chip: Chip) -> int:
    """The bytes for descriptors of `run_scan` in a call without gradients: 128 for each descriptor of a program."""
    channel, most = p.gate.kind == "channel", 0
    for w in scan_launches("scan", p, chip, every=False):
        if w.tile.tma and wide((x.v, *outside(p, x))):
            # X, Y, A for U; v, o; the tensors that read and erase. With AHEAD the kernel loads Y into registers.
            given, keys = fits_tma(p, x.v, *outside(p, x)), 1 + (p.erase is not None)
            count = 2 + 2 * given + keys * (given or channel)
            count += channel * (p.erase is not None) - (channel and columns(p, w.tile) == 128)
            count *= 1 + (short(p) > 0)  # a program's own sequence, and the loop over other sequences
            most = max(most, 128 * count * prod(scan_grid(p, w)))  # a launch's descriptors are free when it is launched
    return most


def has_logits(c: Draft) -> bool:
    """Whether a scan loads w beside v, as logits."""
    return c.x.w is not None and c.p.raw_beta


def copies(c: Draft, t: Tile, *values: Layout | None) -> dict[str, bool]:
    """Whether the copy engine moves tensors of the workspace, and tensors of the caller: keys and ``values``.

    If rows have to be loaded number by number, it moves nothing: addresses of such loads leave it too few registers.
    """
    given = (*(y for y in values if y is not None), *outside(c.p, c.x))
    return {"TMA": t.tma and wide(given), "GIVEN_TMA": t.tma and fits_tma(c.p, *given)}


def wide(given: Iterable[Layout]) -> bool:
    """Whether 8 bytes of 16-bit rows can be loaded at once."""
    return all(unit(t) >= 4 for t in given)


def scan_operands(c: Draft, ch: Channels, s: Solved, f: Factors) -> tuple[Any, ...]:
    """The tensors that a scan reads for every chunk."""
    return (*readers(c, ch), c.x.v, c.x.w, c.x.cu_seqlens, s.A, *maps(ch, f), ch.gamma)


def readers(c: Draft, ch: Channels) -> tuple[Any, Any]:
    """The tensors that read and erase, as arguments of the scans."""
    return (c.x.q, c.keys) if c.p.gate.kind != "channel" else (ch.Qg, ch.Kg)


def maps(ch: Channels, f: Factors) -> tuple[Any, Any, Any]:
    """The tensors that scans apply to R or, with a decay per channel, to U; and the rates."""
    return tuple(f) if ch.P is None else (ch.Kd, ch.P, ch.rates)


def outside(p: Problem, x: Inputs) -> tuple[Layout, ...]:
    """The tensors of ``readers`` that come from the caller."""
    return (x.q, x.k if x.p is None else x.p) if p.gate.kind != "channel" else ()
