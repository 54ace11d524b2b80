"""Serving on the CPU: the chunkwise algorithm on the slots of a pool.

Tokens go through it in parts, which end where states are wanted: all sequences together from one checkpoint to the
next, those of a few tokens token by token, and for batch invariance every chunk by itself, so that no operator's size
tells of other sequences or of other chunks. A checkpoint at an offset goes on from the last whole chunk before it,
token by token and by itself.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from flash_delta.problem import SHORT, Inputs, KnownCall, Outputs, Problem, Slots
from flash_delta.reference.chunked import forward
from flash_delta.reference.decode import is_slot, zeros_of
from flash_delta.reference.step import step


class Piece(NamedTuple):
    """Tokens of one sequence, counted from its start."""

    n: int
    start: int
    stop: int


class Checkpoint(NamedTuple):
    """At an offset: what is left in ``slot`` after so many tokens, ``chunks`` of which are walked in whole chunks."""

    slot: int
    chunks: int
    tokens: int


@torch.no_grad()
def prefill(problem: Problem, x: Inputs, s: Slots, known: KnownCall | None = None) -> Tensor:
    """``o [1, T, HV, V]``; the pool is written in place."""
    o = zeros_of(problem, s)
    pool = s.state_pool.mT if problem.state_v_first else s.state_pool  # [slots, HV, K, V]
    stored, alive = sequences_read(problem, s)
    S = torch.zeros(problem.N, *pool.shape[1:], dtype=problem.accumulate, device=problem.device)
    S[stored] = pool[s.read_indices[stored].long()].to(S.dtype)
    starts = [0, *accumulate(problem.lengths)]
    offsets = checkpoints_at_offsets(problem, s, alive)

    def leave(n: int, at: Checkpoint) -> None:
        here = slice(starts[n] + at.chunks, starts[n] + at.tokens)
        pool[at.slot] = continued(problem, x, here, S[n].to(pool.dtype).to(S.dtype)).to(pool.dtype)

    for n, at in offsets.items():
        if at.chunks == 0:
            leave(n, at)
    ends = {at.chunks for at in offsets.values() if at.chunks % problem.chunk_size == 0}
    for run, pieces in parts(problem, alive.tolist(), ends):
        numbers = [piece.n for piece in pieces]
        ranges = [(starts[n] + start, starts[n] + stop) for n, start, stop in pieces]
        rows = torch.cat([torch.arange(*tokens, device=problem.device) for tokens in ranges])
        lengths = tuple(piece.stop - piece.start for piece in pieces)
        part = problem._replace(T=len(rows), N=len(pieces), lengths=lengths, state_v_first=False)
        tokens = {name: getattr(x, name)[:, rows] for name in ("q", "k", "v", "g", "beta")}
        out = run(part, x._replace(**tokens, initial_state=S[numbers], cu_seqlens=None))
        o[:, rows], S[numbers] = out.o, out.final_state
        write_checkpoints(problem, s, pool, pieces, S)
        for n, _, stop in pieces:
            if n in offsets and offsets[n].chunks == stop:
                leave(n, offsets[n])
    if s.write_indices is not None:
        pool[s.write_indices[alive].long()] = S[alive].to(pool.dtype)
    return o


def sequences_read(problem: Problem, s: Slots) -> tuple[Tensor, Tensor]:
    """Which sequences have a state in the pool, and which are no padding; ``[N]`` each."""
    stored = is_slot(problem, s, s.read_indices)
    alive = stored
    if s.has_initial_state is not None:
        stored, alive = stored & s.has_initial_state, stored | ~s.has_initial_state
    if s.write_indices is not None:
        alive = alive & is_slot(problem, s, s.write_indices)
    return stored & alive, alive


def checkpoints_at_offsets(problem: Problem, s: Slots, alive: Tensor) -> dict[int, Checkpoint]:
    """By sequence. The end of a sequence is the end of its last chunk."""
    if s.checkpoint_offsets is None:
        return {}
    wanted = alive & is_slot(problem, s, s.checkpoint_indices)
    found, C = {}, problem.chunk_size
    for n, offset in enumerate(s.checkpoint_offsets.tolist()):
        if wanted[n] and 0 <= offset <= problem.lengths[n]:
            chunks = offset if offset == problem.lengths[n] else offset // C * C
            found[n] = Checkpoint(int(s.checkpoint_indices[n]), chunks, offset)
    return found


def continued(problem: Problem, x: Inputs, here: slice, S: Tensor) -> Tensor:
    """The state after the tokens ``here`` of one sequence, ``S [HV, K, V]`` being the one before them."""
    count = here.stop - here.start
    if count == 0:
        return S
    alone = problem._replace(T=count, N=1, lengths=(count,), state_v_first=False)
    tokens = {name: getattr(x, name)[:, here] for name in ("q", "k", "v", "g", "beta")}
    return step(alone, x._replace(**tokens, initial_state=S.unsqueeze(0), cu_seqlens=None)).final_state[0]


def parts(
    problem: Problem, alive: list[bool], ends: set[int]
) -> Iterator[tuple[Callable[[Problem, Inputs], Outputs], list[Piece]]]:
    """What goes together, and through what; nothing of sequences that are padding. A part ends at all of ``ends``."""
    lengths = [length if live else 0 for length, live in zip(problem.lengths, alive, strict=True)]
    if problem.batch_invariant:
        C = problem.chunk_size
        for n, length in enumerate(lengths):
            yield from ((forward, [Piece(n, at, min(at + C, length))]) for at in range(0, length, C))
        return
    short = [Piece(n, 0, length) for n, length in enumerate(lengths) if 0 < length <= SHORT]
    if short:
        yield step, short
    lengths = [length if length > SHORT else 0 for length in lengths]
    longest = max(lengths, default=0)
    every = problem.checkpoint_every or max(longest, 1)
    bounds = sorted({*range(0, longest, every), *(at for at in ends if at < longest), longest})
    for start, stop in pairwise(bounds):
        yield forward, [Piece(n, start, min(stop, length)) for n, length in enumerate(lengths) if length > start]


def write_checkpoints(problem: Problem, s: Slots, pool: Tensor, pieces: list[Piece], S: Tensor) -> None:
    """Those that come at a stride."""
    if not problem.checkpoint_every:
        return
    for n, _, stop in pieces:
        m, behind = divmod(stop, problem.checkpoint_every)
        if behind == 0 and m <= s.checkpoint_indices.shape[1]:
            slot = int(s.checkpoint_indices[n, m - 1])
            if is_slot(problem, s, slot):
                pool[slot] = S[n].to(pool.dtype)
