"""Who holds what of a packed row that is cut into runs of tokens, one per rank. Plain integers, the same everywhere.

A sequence is a row of every rank between the one where it begins and the one where it ends, both included: also of
ranks there without a token, through which its state passes unchanged. An empty sequence is a row of the rank that holds
the token at its place, at the very end of the last rank.
"""

from bisect import bisect_left, bisect_right
from typing import NamedTuple


class Split(NamedTuple):
    """The bounds [N + 1] of the sequences, and the first token [P + 1] of every rank, after them the number of all."""

    cu_seqlens: tuple[int, ...]
    starts: tuple[int, ...]

    def tokens(self, rank: int) -> int:
        return self.starts[rank + 1] - self.starts[rank]

    def rows(self, rank: int) -> range:
        """The sequences of a rank."""
        return range(self._begun(rank) - self.crossed(rank), self._begun(rank + 1))

    def bounds(self, rank: int) -> tuple[int, ...]:
        """The bounds of a rank's sequences, counted from its first token."""
        start, end = self.starts[rank : rank + 2]
        rows = self.rows(rank)
        return tuple(min(max(bound, start), end) - start for bound in self.cu_seqlens[rows.start : rows.stop + 1])

    def crossed(self, rank: int) -> bool:
        """Whether a sequence continues from the ranks before ``rank`` into it; False for P, the number of ranks."""
        begun = self._begun(rank)
        return begun > 0 and self.cu_seqlens[begun] > self.starts[rank]

    def left(self, rank: int) -> range:
        """The ranks before ``rank`` that hold what its first sequence has had, the one where it begins first."""
        if not self.crossed(rank):
            return range(rank, rank)
        return range(self._holder(self.cu_seqlens[self._begun(rank) - 1]), rank)

    def right(self, rank: int) -> range:
        """The ranks after ``rank`` that hold the rest of its last sequence, the one where it ends last."""
        if not self.crossed(rank + 1):
            return range(rank + 1, rank + 1)
        return range(rank + 1, self._holder(self.cu_seqlens[self._begun(rank + 1)] - 1) + 1)

    def history(self, rank: int, size: int) -> list[tuple[int, int]]:
        """Where the ``size`` inputs before a rank's first token come from: (rank, how many of its last), nearest first.

        The rank where the sequence begins has as many as are asked for: what is missing was before the first token.
        """
        pieces, left = [], self.left(rank)
        for other in reversed(left):
            taken = size if other == left.start else min(size, self.tokens(other))
            if taken:
                pieces.append((other, taken))
            size -= taken
        return pieces

    def _begun(self, rank: int) -> int:
        """How many sequences begin on earlier ranks."""
        last = rank == len(self.starts) - 1
        return len(self.cu_seqlens) - 1 if last else bisect_left(self.cu_seqlens, self.starts[rank], hi=self.N)

    def _holder(self, token: int) -> int:
        return bisect_right(self.starts, token) - 1

    @property
    def N(self) -> int:
        return len(self.cu_seqlens) - 1
