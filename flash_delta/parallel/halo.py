"""The inputs that a short convolution reads across the border between pieces.

A convolution with W taps needs the last inputs before a piece that continues a sequence. This is the state ``[W, D]``
that `causal_conv1d` would have there. Every rank sends the last W inputs of each of its pieces that continue. If such a
piece is shorter, the sequence's initial inputs come before its own, or zeros if the piece itself is continued. A
continued piece takes as many inputs from the piece before as that piece has. Then it goes on to the left until it has W
inputs or has reached the sequence's start. In the backward pass, every rank sends the gradients of the inputs that it
took, and adds the gradients that others send to its own last inputs.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_delta.parallel.part import Part


class Crossings(Protocol):
    """Which inputs cross borders. M pieces of each rank continue at most, and C are continued."""

    W: int

    def tails(self, x: Tensor, state: Tensor) -> Tensor:
        """The last W inputs [M, W, D] of the pieces that continue, from x [T, D] and states [N, D, W]."""

    def enter(self, everyones: Tensor, widths: list[int], states: Sequence[Tensor]) -> list[Tensor]:
        """The states with those of continued pieces, of all tails [P, M, W, sum of D]."""

    def leave(self, dstates: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The gradients [C, W, sum of D] of the states of continued pieces, and the gradients of the other states."""

    def give_back(self, everyones: Tensor, dxs: list[Tensor], dstates: list[Tensor]) -> None:
        """Adds the gradients [P, C, W, sum of D] that others send to those of the last inputs of the pieces that
        continue. If a piece has fewer than W inputs, the rest goes to the gradients of its state."""


class Halo:
    """The exchange for several convolutions of W taps. It starts when the object is made.

    Args:
        context: the split.
        borders: which inputs cross borders. None: none on any rank.
        xs: the inputs of the convolutions, each ``[1, T, D]`` with its own D, all of one dtype.
        states: the initial states ``[N, D, W]`` of this rank's rows, as `causal_conv1d` takes them. Those of continued
            pieces are not read. None: zeros.
        W: the number of taps.
    """

    def __init__(
        self, context: Part, borders: Crossings | None, xs: Sequence[Tensor], states: Sequence[Tensor] | None, W: int
    ):
        self.context, self.borders, self.xs = context, borders, tuple(xs)
        N = len(context.sequences)
        self.states = tuple(x.new_zeros(N, x.shape[-1], W) for x in xs) if states is None else tuple(states)
        if borders is None:
            return
        with torch.no_grad():
            tails = [borders.tails(x[0], state) for x, state in zip(self.xs, self.states, strict=True)]
            self.everyones, self.work = context.gather(torch.cat(tails, dim=-1))

    def wait(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """``(xs, states)``: the inputs and initial states for convolutions on this rank alone."""
        if self.borders is None:
            return self.xs, self.states
        self.work.wait()
        results = _Exchange.apply(self.context, self.borders, self.everyones, *self.xs, *self.states)
        return results[: len(self.xs)], results[len(self.xs) :]


class _Exchange(torch.autograd.Function):
    """Returns inputs and states. The states of continued pieces are inputs of other pieces."""

    @staticmethod
    def forward(ctx, context: Part, borders: Crossings, everyones: Tensor, *tensors: Tensor):
        xs, states = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        ctx.context, ctx.borders, ctx.count = context, borders, len(xs)
        states = borders.enter(everyones, [x.shape[-1] for x in xs], states)
        return (*(x.view_as(x) for x in xs), *(s.view_as(s) for s in states))

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor):
        dxs, dstates = list(gradients[: ctx.count]), gradients[ctx.count :]
        left, dstates = ctx.borders.leave(dstates)
        everyones, work = ctx.context.gather(left.to(dxs[0].dtype))
        work.wait()
        ctx.borders.give_back(everyones, dxs, dstates)
        return None, None, None, *dxs, *dstates
