"""Serving on the CPU: the chunkwise algorithm on the slots of a pool.

Tokens are processed in parts, which end where states are needed. All sequences run together from one checkpoint to the
next. Short sequences run token by token. For batch invariance every chunk runs by itself, so that no operator's size
depends on other sequences or chunks. For a checkpoint at an offset, the tokens after the last whole chunk before it run
token by token, in a run of their own.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from flash_delta.problem import SHORT, Around, Inputs, KnownCall, Outputs, Problem, Slots
from flash_delta.reference.around import convolve_prompt, in_heads, normalize
from flash_delta.reference.chunked import forward
from flash_delta.reference.decode import zeros_of
from flash_delta.reference.slots import Use, is_slot, refuse_shared
from flash_delta.reference.step import step
from flash_delta.reference.tokens import PER_TOKEN


class Piece(NamedTuple):
    """Tokens of one sequence, counted from its start."""

    n: int
    start: int
    stop: int


class Checkpoint(NamedTuple):
    """The state after ``tokens`` tokens goes to ``slot``. The first ``chunks`` of these tokens run in chunks."""

    slot: int
    chunks: int
    tokens: int


@torch.no_grad()
def prefill(problem: Problem, x: Inputs, s: Slots, around: Around, known: KnownCall | None = None) -> Tensor:
    """``o [1, T, HV, V]``. The pools are written in place."""
    pool = s.state_pool.mT if problem.state_v_first else s.state_pool  # [slots, HV, K, V]
    stored, alive = sequences_read(problem, s)
    S = torch.zeros(problem.N, *pool.shape[1:], dtype=problem.accumulate, device=problem.device)
    S[stored] = pool[s.read_indices[stored].long()].to(S.dtype)
    starts = [0, *accumulate(problem.lengths)]
    offsets = checkpoints_at_offsets(problem, s, alive)
    refuse_shared(problem.op, [*uses_of(problem, s, stored, alive, offsets)])
    o = zeros_of(problem, s)
    windows = None if around.conv_pool is None else Windows(problem, x, s, around, stored, starts)

    def tokens_of(pieces: list[Piece]) -> tuple[Tensor, Inputs]:
        ranges = [(starts[n] + start, starts[n] + stop) for n, start, stop in pieces]
        rows = torch.cat([torch.arange(*tokens, device=problem.device) for tokens in ranges])
        tokens = {name: y[:, rows] for name in PER_TOKEN if (y := getattr(x, name)) is not None}
        if windows is not None:
            tokens |= windows.convolved(pieces)
        return rows, x._replace(**tokens, cu_seqlens=None)

    def leave(n: int, at: Checkpoint) -> None:
        _, tokens = tokens_of([Piece(n, at.chunks, at.tokens)])
        pool[at.slot] = continued(problem, tokens, S[n].to(pool.dtype).to(S.dtype)).to(pool.dtype)
        if windows is not None:
            windows.write(n, at.tokens, at.slot)

    for n, at in offsets.items():
        if at.chunks == 0:
            leave(n, at)
    ends = {at.chunks for at in offsets.values() if at.chunks % problem.chunk_size == 0}
    for run, pieces in parts(problem, alive.tolist(), ends):
        numbers = [piece.n for piece in pieces]
        rows, tokens = tokens_of(pieces)
        lengths = tuple(piece.stop - piece.start for piece in pieces)
        part = problem._replace(T=len(rows), N=len(pieces), lengths=lengths, state_v_first=False)
        out = run(part, tokens._replace(initial_state=S[numbers]))
        o[:, rows], S[numbers] = out.o, out.final_state
        if around.norm_gate is not None:
            o[0, rows] = normalize(problem, o[0, rows].to(S.dtype), around.norm_gate[0, rows], around).to(o.dtype)
        for n, stop, slot in checkpoints_at_strides(problem, s, pieces):
            pool[slot] = S[n].to(pool.dtype)
            if windows is not None:
                windows.write(n, stop, slot)
        for n, _, stop in pieces:
            if n in offsets and offsets[n].chunks == stop:
                leave(n, offsets[n])
    if s.write_indices is not None:
        pool[s.write_indices[alive].long()] = S[alive].to(pool.dtype)
        for n in alive.nonzero()[:, 0].tolist() if windows is not None else ():
            windows.write(n, problem.lengths[n], int(s.write_indices[n]))
    return o


class Windows:
    """The inputs of each sequence's convolution, after those of its initial window."""

    def __init__(self, problem: Problem, x: Inputs, s: Slots, around: Around, stored: Tensor, starts: list[int]):
        self.problem, self.around = problem, around
        self.pool, self.L = around.conv_pool[..., : problem.pools.window], problem.pools.window  # [slots, D, L]
        tokens = torch.cat([y[0].flatten(1) for y in (x.q, x.k, x.v)], 1).to(self.pool.dtype)  # [T, D]
        first = torch.zeros(problem.N, *self.pool.shape[1:], dtype=self.pool.dtype, device=problem.device)
        first[stored] = self.pool[s.read_indices[stored].long()]
        self.inputs = [torch.cat([first[n].mT, tokens[a:b]]) for n, (a, b) in enumerate(pairwise(starts))]

    def convolved(self, pieces: list[Piece]) -> dict[str, Tensor]:
        """q, k and v of these tokens, in order."""
        before = self.L - self.problem.pools.taps + 1
        y = [
            convolve_prompt(self.problem, self.inputs[n][before + start : self.L + stop], self.around)
            for n, start, stop in pieces
        ]
        return dict(zip("qkv", (heads.unsqueeze(0) for heads in in_heads(self.problem, torch.cat(y))), strict=True))

    def write(self, n: int, stop: int, slot: int) -> None:
        """Writes the window after ``stop`` tokens of sequence n to a slot."""
        self.pool[slot] = self.inputs[n][stop : stop + self.L].mT


def sequences_read(problem: Problem, s: Slots) -> tuple[Tensor, Tensor]:
    """Which sequences have a state in the pool, and which are not padding; ``[N]`` each."""
    stored = is_slot(problem, s, s.read_indices)
    alive = stored
    if s.has_initial_state is not None:
        stored, alive = stored & s.has_initial_state, stored | ~s.has_initial_state
    if s.write_indices is not None:
        alive = alive & is_slot(problem, s, s.write_indices)
    return stored & alive, alive


def checkpoints_at_offsets(problem: Problem, s: Slots, alive: Tensor) -> dict[int, Checkpoint]:
    """The checkpoints by sequence. The end of a sequence counts as the end of its last chunk."""
    if s.checkpoint_offsets is None:
        return {}
    wanted = alive & is_slot(problem, s, s.checkpoint_indices)
    found, C = {}, problem.chunk_size
    for n, offset in enumerate(s.checkpoint_offsets.tolist()):
        if wanted[n] and 0 <= offset <= problem.lengths[n]:
            chunks = offset if offset == problem.lengths[n] else offset // C * C
            found[n] = Checkpoint(int(s.checkpoint_indices[n]), chunks, offset)
    return found


def uses_of(problem: Problem, s: Slots, stored: Tensor, alive: Tensor, offsets: dict[int, Checkpoint]) -> Iterator[Use]:
    """The slots that sequences use."""
    every = problem.pools.checkpoint_every
    for n in alive.nonzero()[:, 0].tolist():
        stops = range(every, problem.lengths[n] + 1, every) if every else ()
        kept = [slot for _, _, slot in checkpoints_at_strides(problem, s, [Piece(n, 0, stop) for stop in stops])]
        kept += [offsets[n].slot] if n in offsets else []
        written = [(slot, "checkpoint_indices") for slot in kept]
        written += [] if s.write_indices is None else [(int(s.write_indices[n]), "write_indices")]
        yield Use(n, int(s.read_indices[n]) if stored[n] else None, written)


def continued(problem: Problem, tokens: Inputs, S: Tensor) -> Tensor:
    """The state after these tokens of one sequence, from the state ``S [HV, K, V]`` before them."""
    count = tokens.q.shape[1]
    if count == 0:
        return S
    alone = problem._replace(T=count, N=1, lengths=(count,), state_v_first=False)
    return step(alone, tokens._replace(initial_state=S.unsqueeze(0))).final_state[0]


def parts(
    problem: Problem, alive: list[bool], ends: set[int]
) -> Iterator[tuple[Callable[[Problem, Inputs], Outputs], list[Piece]]]:
    """Yields the pieces that run together, and the function that runs them. Padding is left out. Parts end at
    ``ends``."""
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
    every = problem.pools.checkpoint_every or max(longest, 1)
    bounds = sorted({*range(0, longest, every), *(at for at in ends if at < longest), longest})
    for start, stop in pairwise(bounds):
        yield forward, [Piece(n, start, min(stop, length)) for n, length in enumerate(lengths) if length > start]


def checkpoints_at_strides(problem: Problem, s: Slots, pieces: list[Piece]) -> Iterator[tuple[int, int, int]]:
    """Yields, for each piece that ends at a checkpoint, the sequence, its number of tokens so far, and the slot."""
    for n, _, stop in pieces if problem.pools.checkpoint_every else ():
        m, behind = divmod(stop, problem.pools.checkpoint_every)
        if behind == 0 and m <= s.checkpoint_indices.shape[1]:
            slot = int(s.checkpoint_indices[n, m - 1])
            if is_slot(problem, s, slot):
                yield n, stop, slot
