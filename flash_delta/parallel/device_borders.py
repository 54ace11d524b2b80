"""Which inputs of convolutions cross borders, of a split whose bounds only the device knows.

Ranks hold runs of tokens in order. So a rank's last W tokens, and the places of the W inputs before its first token, do
not depend on bounds. Only which of them belong to a sequence does. Inputs before a sequence's first token come from the
rank where it begins, as a part of that rank's tail.
"""

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor
from torch.nn import functional as F

from flash_delta.parallel.cut import Cut
from flash_delta.parallel.part import Part


class DeviceBorders:
    """`Crossings` as marks on the device. A rank has one tail, and at most one continued row."""

    def __init__(self, context: Part, cut: Cut, W: int):
        self.cut, self.W, self.tokens = cut, W, context.tokens
        self.runs, rank = [run for (run,) in context.split.fragments], context.rank
        self.first, self.last = cut.first[rank, None], cut.last[rank, None]
        stop, begin = self.runs[rank][1], cut.row.index_select(0, self.last)  # begin: of the last sequence
        places = torch.arange(stop - W, stop, device=begin.device)
        self.own = places >= begin  # [W], whether an input of the tail is the sequence's own
        self.column = (places - begin + W).clamp(0, W - 1)  # if not, its place in the initial state
        self.at = begin - stop + torch.arange(W, device=begin.device)  # the place in the tail of each initial input
        full = [number for number, (start, stop) in enumerate(self.runs) if start < stop]
        pairs = [(a, b, self.runs[b][0] - self.runs[a][1]) for a, b in combinations(full, 2)]
        near = [(a, b, between) for a, b, between in pairs if between < W and rank in (a, b)]
        self.takes = [(a, between, self._marks(a, b, W - between)) for a, b, between in near if b == rank]
        self.gives = [(b, between, self._marks(a, b, W - between)) for a, b, between in near if a == rank]

    # Each of ``takes`` and ``gives`` is a rank, the number of tokens between it and this one, and marks.

    def _marks(self, of: int, to: int, count: int) -> Tensor:
        """``[count, 1]``: whether rank ``to`` takes the last ``count`` inputs of the tail of rank ``of``. They are the
        first of its history."""
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
            dstates[i] = dstates[i] + initial.mT.to(dstates[i].dtype).where(of_row[:, None, None], 0)
