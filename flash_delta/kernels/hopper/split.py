"""How sequences are split into segments, by a model of what the kernels take on an H200 (docs/notes). Needs no Triton.

Programs come in waves of one for each multiprocessor, and a wave takes its chunks times a chunk's time. Microseconds:
"""

from functools import lru_cache

from flash_delta.problem import Problem

C = 64  # tokens of a chunk
SETUP = 8.0  # of a program until its first chunk, and after its last one
WHOLE = {1: 1.73, 2: 2.8}  # a chunk of the loop that walks whole sequences, by its groups (tiles.py)
FACTOR = 1.0  # a chunk and head of a multiprocessor
MAP, OUTPUT = 1.25, 2.15  # a chunk of half a map, and of a walk with outputs
COMPOSE = 1.9  # a segment
LAUNCHES = 8.0  # of three more kernels
WORTH = 0.9  # the share of a whole walk's time that segments may take to be chosen
MOST, FEWEST = 64, 8  # segments of a sequence; chunks of a segment
ENDLESS = 2**14  # chunks
WIDTH = 128  # of heads that are split


def split_length(p: Problem, processors: int) -> int | None:
    """Tokens of a segment; None where whole sequences are faster. A function of sizes: as if all had one length."""
    if split_endless(p, processors) is None:
        return None
    chunks = -(-p.T // (C * (p.N if p.packed else 1)))
    length = _split(processors, p.N * p.HV, chunks)
    return None if length is None else C * length


def split_endless(p: Problem, processors: int) -> int | None:
    """Of one sequence without end. None where such calls are not split at any size: then nothing is compiled for it."""
    length = _split(processors, p.HV, ENDLESS) if p.K == WIDTH else None
    return None if length is None else C * length


@lru_cache(maxsize=1024)
def _split(processors: int, states: int, chunks: int) -> int | None:
    """Chunks of a segment. Phi may fade (maps.py): the mean of no Phi that does, and of half of them."""

    def us(programs: int, length: int, chunk: float) -> float:
        return -(-programs // processors) * (SETUP + length * chunk)

    groups = 1 if 2 * states <= processors else 2
    best, split = WORTH * us(states * 2 // groups, chunks, WHOLE[groups]), None
    shared = LAUNCHES + FACTOR * states * chunks / processors
    for number in range(2, min(MOST, chunks // FEWEST) + 1):
        length = -(-chunks // number)
        halves = states * (2 * number - 3)  # of maps: of the first segment one, of the last none
        left = halves - states * (number - 2) / 2
        faded = max(1.0, left / processors) * (SETUP + length * MAP)  # where one ends early another begins
        maps = (us(halves, length, MAP) + faded) / 2
        time = shared + maps + number * COMPOSE + us(states * number, length, OUTPUT)
        if time < best:
            best, split = time, length
    return split
