"""Which rank holds which tokens of a packed row that is cut into fragments. Plain integers, the same on every rank.

A rank's tokens are those of its fragments, one after the other. A piece is the part of a sequence in one fragment. It
is a row of the ops on that rank. The pieces of a sequence, in order, are its chain. An empty sequence is one piece. It
belongs to the fragment that holds the token at its place, or to the last fragment if it is at the very end.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

Fragment = tuple[int, int]  # the first token in the row, and the one after the last


class Piece(NamedTuple):
    """Some of a sequence's tokens, on one rank."""

    sequence: int
    place: int  # its place in the chain
    rank: int
    start: int  # counted in this rank's tokens
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def continued(self) -> bool:
        """Whether the sequence began in an earlier piece."""
        return self.place > 0


class Fragments:
    """The fragments of every rank, in the order in which it has them. It knows nothing of sequences."""

    def __init__(self, fragments: Sequence[Sequence[Fragment]]):
        self.fragments = tuple(tuple(_joined(of_rank)) for of_rank in fragments)
        held = sorted((*f, rank, at) for rank in range(len(fragments)) for f, at in self.places(rank))
        self.held = tuple(held)  # all fragments in the order of the row, each with its rank and its place there
        self.total = max((stop for _, stop, *_ in held), default=0)

    def places(self, rank: int) -> Iterator[tuple[Fragment, int]]:
        """A rank's fragments, each with its place among the rank's tokens."""
        at = 0
        for start, stop in self.fragments[rank]:
            yield (start, stop), at
            at += stop - start

    def in_order(self) -> list[tuple[int, int, int]]:
        """All fragments in the order of the row: the rank, and where they start and stop among its tokens."""
        return [(rank, at, at + stop - start) for start, stop, rank, at in self.held]

    def tokens(self, rank: int) -> int:
        return sum(stop - start for start, stop in self.fragments[rank])


class Split(Fragments):
    """The bounds [N + 1] of the sequences, and the fragments that cut them into pieces."""

    def __init__(self, cu_seqlens: tuple[int, ...], fragments: Sequence[Sequence[Fragment]]):
        super().__init__(fragments)
        self.cu_seqlens = cu_seqlens
        self.chains = tuple(tuple(chain) for chain in _chains(cu_seqlens, self.held))
        pieces = [piece for chain in self.chains for piece in chain]
        self.rows = tuple(tuple(sorted(_on(rank, pieces), key=_by_place)) for rank in range(len(fragments)))
        continuing = [[p for p in rows if self.continues(p)] for rows in self.rows]
        continued = [[p for p in rows if p.continued] for rows in self.rows]
        self.most_continuing, self.most_continued = (max(map(len, ps), default=0) for ps in (continuing, continued))
        self.sent = _numbers(continuing, self.most_continuing)
        self.taken = _numbers(continued, self.most_continued)

    # In the forward pass every rank sends something for each of its pieces that continue, and in the backward pass for
    # each that is continued. ``sent`` and ``taken`` give the places of pieces in all that arrives, if each rank sends
    # the same number.

    def bounds(self, rank: int) -> tuple[int, ...]:
        """The bounds of a rank's rows, counted from its first token."""
        rows = self.rows[rank]
        return (*(p.start for p in rows), rows[-1].stop) if rows else (0,)

    def continues(self, piece: Piece) -> bool:
        """Whether the sequence continues in a later piece."""
        return piece.place < len(self.chains[piece.sequence]) - 1

    def left(self, piece: Piece) -> tuple[Piece, ...]:
        """The pieces of the sequence before this one, in order."""
        return self.chains[piece.sequence][: piece.place]

    def right(self, piece: Piece) -> tuple[Piece, ...]:
        """The pieces of the sequence after this one, in order."""
        return self.chains[piece.sequence][piece.place + 1 :]

    def history(self, piece: Piece, size: int) -> list[tuple[Piece, int]]:
        """The pieces that have the ``size`` inputs before a piece, nearest first, and how many of their last inputs.

        The first piece of the sequence always has enough, because it also has the inputs before the first token.
        """
        sources = []
        for other in reversed(self.left(piece)):
            count = min(size, other.tokens) if other.continued else size
            if count:
                sources.append((other, count))
            size -= count
        return sources


def head_tail(cu_seqlens: Sequence[int], ranks: int) -> tuple[tuple[Fragment, ...], ...]:
    """The fragments of each rank that balance causal attention.

    Every sequence is cut into ``2 * ranks`` parts of one length. (The first parts may have one token more.) Rank r
    holds the parts r and ``2 * ranks - 1 - r`` of each sequence, as trainers do it. With the bounds ``[0, tokens]`` the
    whole row is cut instead, with any documents in it.

    Example:
        >>> from flash_delta.parallel import head_tail
        >>> head_tail([0, 8, 16], ranks=2)
        (((0, 2), (6, 10), (14, 16)), ((2, 6), (10, 14)))
    """
    parts = 2 * ranks
    of_rank: list[list[Fragment]] = [[] for _ in range(ranks)]
    for start, stop in pairwise(map(int, cu_seqlens)):
        length, more = divmod(stop - start, parts)
        cuts = [start + length * i + min(i, more) for i in range(parts + 1)]
        for rank in range(ranks):
            of_rank[rank] += [(cuts[i], cuts[i + 1]) for i in (rank, parts - 1 - rank)]
    return tuple(tuple(_joined(fragments)) for fragments in of_rank)


def _joined(fragments: Sequence[Fragment]) -> Iterator[Fragment]:
    """Joins neighbouring fragments and leaves out empty ones, unless there is no other."""
    last = None
    for start, stop in fragments:
        if last is not None and start != stop and last[1] == start:
            last = last[0], stop
        elif last is None or last[0] == last[1]:
            last = start, stop
        elif start != stop:
            yield last
            last = start, stop
    if last is not None:
        yield last


def _chains(bounds: tuple[int, ...], held: Sequence[tuple[int, int, int, int]]) -> Iterator[list[Piece]]:
    """The chain of every sequence. ``held``: the fragments in order, each with its rank and its place there."""
    full = [f for f in held if f[0] < f[1]]
    starts = [start for start, *_ in full]
    for n, (a, b) in enumerate(pairwise(bounds)):
        chain, i = [], bisect_right(starts, a) - 1
        if a == b:
            start, _, rank, at = full[i] if full and a < full[-1][1] else held[-1]
            chain.append(Piece(n, 0, rank, at + a - start, at + a - start))
        while a < b:
            start, stop, rank, at = full[i]
            end = min(b, stop)
            chain.append(Piece(n, len(chain), rank, at + a - start, at + end - start))
            a, i = end, i + 1
        yield chain


def _on(rank: int, pieces: list[Piece]) -> Iterator[Piece]:
    return (p for p in pieces if p.rank == rank)


def _by_place(piece: Piece) -> tuple[int, int]:
    return piece.start, piece.sequence


def _numbers(pieces: list[list[Piece]], most: int) -> dict[Piece, int]:
    return {p: rank * most + i for rank, of_rank in enumerate(pieces) for i, p in enumerate(of_rank)}
