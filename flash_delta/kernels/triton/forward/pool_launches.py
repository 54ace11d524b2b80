"""Which launches of `scan` walk the sequences of a call."""

from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from flash_delta.kernels.runtime.arguments import columns, fits_tma, short
from flash_delta.kernels.runtime.calls import Call
from flash_delta.kernels.runtime.chip import Chip, Tile
from flash_delta.kernels.runtime.workspace import Channels, Factors, Solved
from flash_delta.kernels.triton.tiles import scan_tiles
from flash_delta.problem import SHORT, Inputs, Problem

ANY = 2**30
WAVES = 4  # of programs, where there are several tiles: those of a launch that is not meant take their time, too


class Walkers(NamedTuple):
    """One launch of `scan`. On a pool it is for ``least`` to ``most`` long sequences."""

    tile: Tile
    sequences: int  # that have programs
    least: int = 0
    most: int = ANY
    others: bool = False  # it walks more than ``most``, too: programs take one after the other, which is slower


def walked_at_most(p: Problem) -> tuple[int, int | None]:
    """How many sequences of a pool can be long, by the number of tokens, and how many at the most the caller says are.
    With batch invariance short ones are walked, too."""
    return (p.N, None) if p.batch_invariant else (min(p.N, p.T // (SHORT + 1)), p.max_prompts)


def pool_scans(p: Problem, chip: Chip, every: bool) -> tuple[Walkers, ...]:
    """Only the device knows how many sequences are long: all tiles are launched that `scan_tiles` may have for so many,
    and one launch finds that it is meant. With ``max_prompts`` the caller says how many there are at the most: then it
    is one launch."""
    choices = scan_tiles("scan", p, chip, every=True)
    if every:
        return tuple(Walkers(t, p.N) for t in choices)
    bound, most = walked_at_most(p)
    promised = bound if most is None else min(bound, most)
    chosen, least = [], 0
    for t in choices:
        programs = p.HV * -(-p.V // t.BV)  # of a sequence
        together = chip.processors // programs
        if together >= promised or t is choices[-1]:
            break
        if most is None and together >= max(1, least):
            chosen.append(Walkers(t, together, least, together))
            least = together + 1
    sequences = promised
    if promised == bound and len(choices) > 1:
        sequences = min(bound, -(-WAVES * chip.processors // programs))
    return (*chosen, Walkers(t, max(1, sequences), least, sequences, others=True))


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
