"""Which launches serve a pool of states, when only the device knows how many sequences are prompts.

The best tile depends on that number. So there is one launch for each tile that some number of prompts would choose. On
the device, the launch whose range contains the number does the work, and the others exit.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flash_delta.kernels.runtime.chip import Chip
from flash_delta.problem import SHORT, Problem

ANY = 2**30


class PoolLaunch(NamedTuple):
    """One launch, for ``least`` to ``most`` prompts."""

    tile: Any  # of the backend that asks
    sequences: int  # that have programs at once
    least: int = 0
    most: int = ANY
    others: bool = False  # it also serves more than ``most``: a program takes several, which is slower


def prompts_at_most(p: Problem) -> tuple[int, int | None]:
    """How many sequences can be prompts, by the number of tokens; and how many there are at most, as the caller says.
    With batch invariance short sequences count as well."""
    return (p.N, None) if p.batch_invariant else (min(p.N, p.T // (SHORT + 1)), p.max_prompts)


def pool_launches(
    p: Problem, chip: Chip, tiles: Sequence[Any], programs: Callable[[Any], int]
) -> tuple[PoolLaunch, ...]:
    """The last launch serves all larger numbers. With ``max_prompts`` it is the only one.

    Args:
        tiles: the candidates; each next one suits more prompts.
        programs: how many programs a sequence has with a tile.
    """
    bound, most = prompts_at_most(p)
    promised, launches, least = bound if most is None else min(bound, most), [], 0
    for tile in tiles:
        together = chip.processors // programs(tile)  # sequences that run at once
        if together >= promised or tile is tiles[-1]:
            break
        if most is None and together >= max(1, least):
            launches.append(PoolLaunch(tile, together, least, together))
            least = together + 1
    return (*launches, PoolLaunch(tile, max(1, promised), least))
