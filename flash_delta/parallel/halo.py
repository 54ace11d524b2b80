"""The inputs that a short convolution reads across the border between pieces.

A convolution with W taps needs the last inputs before a piece that continues a sequence. This is the state ``[W, D]``
that `causal_conv1d` would have there. Every rank sends the last W inputs of each of its pieces that continue. If such a
piece is shorter, the sequence's initial inputs come before its own, or zeros if the piece itself is continued. A
continued piece takes as many inputs from the piece before as that piece has. Then it goes on to the left until it has W
inputs or has reached the sequence's start. In the backward pass, every rank sends the gradients of the inputs that it
took, and adds the gradients that others send to its own last inputs.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_delta.parallel.part import Part
from flash_delta.parallel.split import Piece, Split


class Borders:
    """Which inputs cross borders: numbers of this rank's tokens and of received rows, ``[P, pieces, W]`` flat."""

    def __init__(self, split: Split, rank: int, W: int):
        self.split, self.rows, self.W = split, split.rows[rank], W
        self.continued = tuple(row for row, piece in enumerate(self.rows) if piece.continued)
        self.continuing = tuple(row for row, piece in enumerate(self.rows) if split.continues(piece))
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


class Halo:
    """The exchange for several convolutions of W taps. It starts when the object is made.

    Args:
        context: the split.
        borders: which inputs cross borders.
        xs: the inputs of the convolutions, each ``[1, T, D]`` with its own D, all of one dtype.
        states: the initial states ``[N, D, W]`` of this rank's rows, as `causal_conv1d` takes them. Those of continued
            pieces are not read. None: zeros.
    """

    def __init__(self, context: Part, borders: Borders, xs: Sequence[Tensor], states: Sequence[Tensor] | None):
        self.context, self.borders, self.xs = context, borders, tuple(xs)
        N, W = len(context.rows), borders.W
        self.states = tuple(x.new_zeros(N, x.shape[-1], W) for x in xs) if states is None else tuple(states)
        if not context.split.most_continuing:
            return
        with torch.no_grad():
            tails = [_tails(context, borders, x[0], state) for x, state in zip(self.xs, self.states, strict=True)]
            self.everyones, self.work = context.gather(torch.cat(tails, dim=-1))  # [P, M, W, sum of D]

    def wait(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """``(xs, states)``: the inputs and initial states for convolutions on this rank alone."""
        if not self.context.split.most_continuing:
            return self.xs, self.states
        self.work.wait()
        everyones = self.everyones.flatten(0, 2)
        history = everyones.index_select(0, self.context.place(self.borders.history, everyones.device))
        history = history.unflatten(0, (-1, self.borders.W))
        results = _Exchange.apply(self.context, self.borders, history, *self.xs, *self.states)
        return results[: len(self.xs)], results[len(self.xs) :]


def _tails(context: Part, borders: Borders, x: Tensor, state: Tensor) -> Tensor:
    """The last W inputs [M, W, D] of the pieces that continue, from x [T, D] and states [N, D, W]."""
    W = borders.W
    tails = x.new_zeros(context.split.most_continuing, W, x.shape[-1])
    count = len(borders.continuing)
    if count:
        tails[:count] = x.index_select(0, context.place(borders.sent, x.device)).unflatten(0, (-1, W))
    for i, (row, count) in enumerate(zip(borders.continuing, borders.counts, strict=True)):
        if count < W:
            tails[i, : W - count] = 0 if context.continued[row] else state[row, :, count:].mT.to(x.dtype)
    return tails


def _taken(split: Split, piece: Piece, W: int) -> list[tuple[int, int]]:
    """The inputs that a continued piece takes, nearest first: the received row's number, and its place among the W."""
    inputs, end = [], W
    for other, count in split.history(piece, W):
        first = split.sent[other] * W
        inputs += [(first + W - 1 - i, end - 1 - i) for i in range(count)]
        end -= count
    return inputs


class _Exchange(torch.autograd.Function):
    """Returns inputs and states, with ``history`` [n, W, sum of D] as the states of continued pieces."""

    @staticmethod
    def forward(ctx, context: Part, borders: Borders, history: Tensor, *tensors: Tensor):
        xs, states = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        ctx.context, ctx.borders, ctx.widths = context, borders, [x.shape[-1] for x in xs]
        if borders.continued:
            rows = context.place(borders.continued, history.device)
            parts = history.split(ctx.widths, dim=-1)
            states = [s.index_copy(0, rows, part.mT.to(s.dtype)) for part, s in zip(parts, states, strict=True)]
        return (*(x.view_as(x) for x in xs), *(s.view_as(s) for s in states))

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor):
        context, borders, count, W = ctx.context, ctx.borders, len(ctx.widths), ctx.borders.W
        dxs, dstates = list(gradients[:count]), list(gradients[count:])
        taken = dxs[0].new_zeros(context.split.most_continued, W, sum(ctx.widths))
        if borders.continued:
            rows = context.place(borders.continued, taken.device)
            taken[: len(rows)] = torch.cat([d.index_select(0, rows).mT.to(taken.dtype) for d in dstates], dim=-1)
            dstates = [d.index_fill(0, rows, 0) for d in dstates]
        everyones, work = context.gather(taken)
        work.wait()
        if borders.returned:
            _give_back(context, borders, everyones.flatten(0, 2), dxs, dstates)
        return None, None, None, *dxs, *dstates


def _give_back(context: Part, borders: Borders, everyones: Tensor, dxs: list[Tensor], dstates: list[Tensor]) -> None:
    """Add the gradients that others send to those of the last inputs of the pieces that continue. If a piece has fewer
    than W inputs, the rest goes to the gradients of its state."""
    W, widths = borders.W, [d.shape[-1] for d in dxs]
    everyones = torch.cat([everyones, torch.zeros_like(everyones[:1])])
    dtails = sum(everyones.index_select(0, context.place(numbers, everyones.device)) for numbers in borders.returned)
    for i, part in enumerate(dtails.unflatten(0, (-1, W)).split(widths, dim=-1)):
        dxs[i], dstates[i] = dxs[i].clone(), dstates[i].clone()
        for row, count, dtail in zip(borders.continuing, borders.counts, part, strict=True):
            piece = context.rows[row]
            dxs[i][0, piece.stop - count : piece.stop] += dtail[W - count :]
            if count < W and not piece.continued:
                dstates[i][row, :, count:] += dtail[: W - count].mT
