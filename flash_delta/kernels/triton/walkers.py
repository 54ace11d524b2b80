"""Which launches of `scan` walk the sequences of a call."""

from typing import NamedTuple

from flash_delta.kernels.triton.tiles import Chip, Tile, scan_tiles
from flash_delta.problem import SHORT, Problem

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
