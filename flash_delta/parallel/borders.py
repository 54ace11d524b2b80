"""Which inputs of convolutions cross borders, of a split that is planned on the host."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from flash_delta.parallel.part import Part
from flash_delta.parallel.split import Piece, Split


class Borders:
    """`Crossings` as numbers of this rank's tokens and of received rows, ``[P, pieces, W]`` flat."""

    def __init__(self, context: Part, W: int):
        self.context, self.split, self.rows, self.W = context, context.split, context.rows, W
        self.continued = tuple(row for row, piece in enumerate(self.rows) if piece.continued)
        self.continuing = tuple(row for row, piece in enumerate(self.rows) if self.split.continues(piece))
        self.counts = [min(W, self.rows[row].tokens) for row in self.continuing]  # of inputs that are sent

    @cached_property
    def sent(self) -> tuple[int, ...]:
        """The last W tokens of the pieces that continue. If a piece is shorter, other tokens fill the places."""
        stops = (self.rows[row].stop for row in self.continuing)
        return tuple(max(stop - self.W + w, 0) for stop in stops for w in range(self.W))

    @cached_property
    def history(self) -> tuple[int, ...]:
        """The W received rows that each continued piece takes in the forward pass."""
        return tuple(
            number
            for row in self.continued
            for number in reversed([n for n, _ in _taken(self.split, self.rows[row], self.W)])
        )

    @cached_property
    def returned(self) -> list[tuple[int, ...]]:
        """Numbers of received rows, for the backward pass. Each tuple has a row to add to each of the W rows of each
        piece that continues. Where no taker is left, the number is that of a row of zeros after the last one."""
        nothing = len(self.split.rows) * self.split.most_continued * self.W
        takers: list[list[int]] = []
        for row in self.continuing:
            piece = self.rows[row]
            mine = [self.split.sent[piece] * self.W + w for w in range(self.W)]
            of_place: dict[int, list[int]] = {number: [] for number in mine}
            for other in self.split.right(piece):
                for number, place in _taken(self.split, other, self.W):
                    if number in of_place:
                        of_place[number].append(self.split.taken[other] * self.W + place)
            takers += of_place.values()
        rounds = max(map(len, takers), default=0)
        return [tuple(t[i] if i < len(t) else nothing for t in takers) for i in range(rounds)]

    def tails(self, x: Tensor, state: Tensor) -> Tensor:
        W = self.W
        tails = x.new_zeros(self.split.most_continuing, W, x.shape[-1])
        count = len(self.continuing)
        if count:
            tails[:count] = x.index_select(0, self._place(self.sent, x)).unflatten(0, (-1, W))
        for i, (row, count) in enumerate(zip(self.continuing, self.counts, strict=True)):
            if count < W:
                tails[i, : W - count] = 0 if self.rows[row].continued else state[row, :, count:].mT.to(x.dtype)
        return tails

    def enter(self, everyones: Tensor, widths: list[int], states: Sequence[Tensor]) -> list[Tensor]:
        if not self.continued:
            return list(states)
        everyones, rows = everyones.flatten(0, 2), self._place(self.continued, everyones)
        history = everyones.index_select(0, self._place(self.history, everyones)).unflatten(0, (-1, self.W))
        parts = history.split(widths, dim=-1)
        return [s.index_copy(0, rows, part.mT.to(s.dtype)) for part, s in zip(parts, states, strict=True)]

    def leave(self, dstates: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        left = dstates[0].new_zeros(self.split.most_continued, self.W, sum(d.shape[1] for d in dstates))
        if not self.continued:
            return left, list(dstates)
        rows = self._place(self.continued, left)
        left[: len(rows)] = torch.cat([d.index_select(0, rows).mT.to(left.dtype) for d in dstates], dim=-1)
        return left, [d.index_fill(0, rows, 0) for d in dstates]

    def give_back(self, everyones: Tensor, dxs: list[Tensor], dstates: list[Tensor]) -> None:
        if not self.returned:
            return
        W, widths = self.W, [d.shape[-1] for d in dxs]
        everyones = everyones.flatten(0, 2)
        everyones = torch.cat([everyones, torch.zeros_like(everyones[:1])])
        dtails = sum(everyones.index_select(0, self._place(numbers, everyones)) for numbers in self.returned)
        for i, part in enumerate(dtails.unflatten(0, (-1, W)).split(widths, dim=-1)):
            dxs[i], dstates[i] = dxs[i].clone(), dstates[i].clone()
            for row, count, dtail in zip(self.continuing, self.counts, part, strict=True):
                piece = self.rows[row]
                dxs[i][0, piece.stop - count : piece.stop] += dtail[W - count :]
                if count < W and not piece.continued:
                    dstates[i][row, :, count:] += dtail[: W - count].mT

    def _place(self, numbers: tuple[int, ...], like: Tensor) -> Tensor:
        return self.context.place(numbers, like.device)


def _taken(split: Split, piece: Piece, W: int) -> list[tuple[int, int]]:
    """The inputs that a continued piece takes, nearest first: the received row's number, and its place among the W."""
    inputs, end = [], W
    for other, count in split.history(piece, W):
        first = split.sent[other] * W
        inputs += [(first + W - 1 - i, end - 1 - i) for i in range(count)]
        end -= count
    return inputs
