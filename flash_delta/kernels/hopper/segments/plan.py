"""How sequences are split into segments, by a model of what the kernels take on an H200 (docs/notes). Needs no Triton.

Programs come in waves of one for each multiprocessor, and a wave takes its chunks times a chunk's time. Microseconds:
"""

from functools import lru_cache
from typing import NamedTuple

from flash_delta.problem import Problem

C = 64  # tokens of a chunk
SETUP = 8.0  # of a program until its first chunk, and after its last one
FACTOR = 1.0  # a chunk and head of a multiprocessor
COMPOSE = 1.9  # a segment
LAUNCHES = 8.0  # of three more kernels
MOST, FEWEST = 64, 8  # segments of a sequence; chunks of a segment
ENDLESS = 2**14  # chunks


class Times(NamedTuple):
    """What the width of heads decides."""

    whole: dict[int, float]  # a chunk of the loop that walks whole sequences, by its groups (tiles.py)
    map: float  # a chunk of half a map
    output: float  # a chunk of a walk with outputs
    worth: float  # the share of a whole walk's time that segments may take to be chosen


# Of 64 only the loop was measured: so they have to promise more.
TIMES = {64: Times({1: 1.45}, 0.95, 1.3, 0.7), 128: Times({1: 1.73, 2: 2.8}, 1.25, 2.15, 0.9)}


def split_length(p: Problem, processors: int) -> int | None:
    """Tokens of a segment; None where whole sequences are faster. A function of sizes: as if all had one length."""
    if split_endless(p, processors) is None:
        return None
    chunks = -(-p.T // (C * (p.N if p.packed else 1)))
    length = _split(processors, p.N * p.HV, chunks, p.K)
    return None if length is None else C * length


def split_endless(p: Problem, processors: int) -> int | None:
    """Of one sequence without end. None where such calls are not split at any size: then nothing is compiled for it."""
    length = _split(processors, p.HV, ENDLESS, p.K) if p.K in TIMES else None
    return None if length is None else C * length


def split_prompt(p: Problem, processors: int) -> int | None:
    """The same on a pool, where one prompt that is alone may be split, unless it leaves checkpoints."""
    return split_length(p, processors) if p.N == 1 and may_split_prompt(p, processors) else None


def may_split_prompt(p: Problem, processors: int) -> bool:
    """Whether prompts of some length are."""
    return not (p.batch_invariant or p.checkpoint_every) and split_endless(p, processors) is not None


@lru_cache(maxsize=1024)
def _split(processors: int, states: int, chunks: int, width: int) -> int | None:
    """Chunks of a segment. Phi may fade (maps.py): the mean of no Phi that does, and of half of them."""

    def us(programs: int, length: int, chunk: float) -> float:
        return -(-programs // processors) * (SETUP + length * chunk)

    times = TIMES[width]
    groups = 1 if width == 64 or 2 * states <= processors else 2
    programs = states * width // (64 * groups)
    best, split = times.worth * us(programs, chunks, times.whole[groups]), None
    shared = LAUNCHES + FACTOR * states * chunks / processors
    for number in range(2, min(MOST, chunks // FEWEST) + 1):
        length = -(-chunks // number)
        halves = states * (2 * number - 3)  # of maps: of the first segment one, of the last none
        left = halves - states * (number - 2) / 2
        faded = max(1.0, left / processors) * (SETUP + length * times.map)  # where one ends early another begins
        maps = (us(halves, length, times.map) + faded) / 2
        time = shared + maps + number * COMPOSE + us(states * number, length, times.output)
        if time < best:
            best, split = time, length
    return split
