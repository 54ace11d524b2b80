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

    tile: Any  # of the calling backend
    sequences: int  # sequences whose programs run at the same time
    least: int = 0
    most: int = ANY
    others: bool = False  # it also serves more than ``most``; then programs take several sequences, which is slower


def prompts_at_most(p: Problem) -> tuple[int, int | None]:
    """How many sequences can be prompts, given the number of tokens; and the caller's limit for them. With batch
    invariance short sequences count as prompts."""
    if p.batch_invariant or p.pools is None:
        return p.N, None
    return min(p.N, p.T // (SHORT + 1)), p.pools.max_prompts


def pool_launches(
    p: Problem, chip: Chip, tiles: Sequence[Any], programs: Callable[[Any], int], parts: int = 0
) -> tuple[PoolLaunch, ...]:
    """The launches. The last one serves all larger numbers. With ``max_prompts`` it is the only one, unless some of
    these prompts may be cut.

    Args:
        tiles: the candidates, in the order of the number of prompts that they are best for.
        programs: the number of programs per sequence with a tile.
        parts: how many parts of prompts there may be. They count as prompts.
    """
    bound, most = prompts_at_most(p)
    promised, launches, least = (bound if most is None else min(bound, most)) + parts, [], 0
    for tile in tiles:
        together = chip.processors // programs(tile)  # sequences that run at once
        if together >= promised or tile is tiles[-1]:
            break
        likely = most is None or (parts > 0 and most <= together)
        if likely and together >= max(1, least):
            launches.append(PoolLaunch(tile, together, least, together))
            least = together + 1
    return (*launches, PoolLaunch(tile, max(1, promised), least))
