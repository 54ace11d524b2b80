"""Which inputs of convolutions cross borders, of a split whose bounds only the device knows.

Ranks hold runs of tokens in order. So a rank's last W tokens, and the places of the W inputs before its first token, do
not depend on bounds. Only which of them belong to a sequence does. Inputs before a sequence's first token come from the
rank where it begins, as a part of that rank's tail.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from flash_delta.parallel.cut import Cut
from flash_delta.parallel.part import Part


class DeviceBorders:
    """`Crossings` as marks on the device. A rank has one tail, and at most one continued row."""

    def __init__(self, context: Part, cut: Cut, W: int):
        self.cut, self.rank, self.W, self.tokens = cut, context.rank, W, context.tokens
        self.runs = [run for (run,) in context.split.fragments]
        _, stop = self.runs[self.rank]
        self.last, self.first = cut.last[self.rank, None], cut.first[self.rank, None]
        start_of_last, ends = cut.row.index_select(0, self.last), torch.arange(W, device=cut.row.device)
        self.own = ends + (stop - W) >= start_of_last  # [W], whether an input of the tail is the sequence's own
        self.column = (ends + (stop - W) - start_of_last + W).clamp(0, W - 1)  # if not, its place in the initial state
        self.at = ends + start_of_last - stop  # the place in the tail of each initial input
        self.takes = tuple(self._pairs(to=self.rank))
        self.gives = tuple(self._pairs(of=self.rank))

    def _pairs(self, of: int | None = None, to: int | None = None) -> Iterator[tuple[int, int, Tensor]]:
        """The ranks that this one takes inputs from, or gives to; the number of tokens between both; and marks
        [W - between, 1]: whether these first inputs before rank ``to`` are the last of the tail of rank ``of``."""
        full = [rank for rank, (start, stop) in enumerate(self.runs) if start < stop]
        for a in full if of is None else {of} & {*full}:
            for b in full if to is None else {to} & {*full}:
                between = self.runs[b][0] - self.runs[a][1]
                if 0 <= between < self.W:
                    yield b if to is None else a, between, self._marks(a, b, self.W - between)

    def _marks(self, of: int, to: int, count: int) -> Tensor:
        (start, stop), (border, _) = self.runs[of], self.runs[to]
        places = torch.arange(count, device=self.cut.row.device) + (border - self.W)
        places = places.maximum(self.cut.row.index_select(0, self.cut.first[to, None]))  # or where the sequence begins
        return ((start <= places) & (places < stop) & self.cut.crossed[to])[:, None]

    def tails(self, x: Tensor, state: Tensor) -> Tensor:
        count = min(self.W, self.tokens)
        tail = F.pad(x[self.tokens - count :], (0, 0, self.W - count, 0))
        initial = state.index_select(0, self.last)[0].index_select(1, self.column).mT.to(x.dtype)
        return tail.where(self.own[:, None], initial)[None]

    def enter(self, everyones: Tensor, widths: list[int], states: Sequence[Tensor]) -> list[Tensor]:
        history = everyones.new_zeros(everyones.shape[2:])
        for rank, between, marks in self.takes:
            history[: len(marks)] += everyones[rank, 0, between:].where(marks, 0)
        begins, continued = (marks[:, None, None] for marks in (self.cut.begins, self.cut.continued))
        return [
            part.mT.to(s.dtype).where(continued, s.where(begins, 0))
            for part, s in zip(history.split(widths, dim=-1), states, strict=True)
        ]

    def leave(self, dstates: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        left = torch.cat([d.index_select(0, self.first).mT for d in dstates], dim=-1)
        return left, [d.where(self.cut.begins[:, None, None], 0) for d in dstates]

    def give_back(self, everyones: Tensor, dxs: list[Tensor], dstates: list[Tensor]) -> None:
        dtail = everyones.new_zeros(everyones.shape[2:])
        for rank, between, marks in self.gives:
            dtail[between:] += everyones[rank, 0, : len(marks)].where(marks, 0)
        count = min(self.W, self.tokens)
        of_row = self.cut.begins & (torch.arange(len(self.cut.begins), device=self.last.device) == self.last)
        for i, part in enumerate(dtail.split([d.shape[-1] for d in dxs], dim=-1)):
            dxs[i], own = dxs[i].clone(), part.where(self.own[:, None], 0)
            dxs[i][0, self.tokens - count :] += own[self.W - count :]
            initial = part.index_select(0, self.at.clamp(min=0)).where((self.at >= 0)[:, None], 0)
            dstates[i] = dstates[i] + initial.mT.where(of_row[:, None, None], 0)
