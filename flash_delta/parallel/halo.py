"""What a short convolution reads across the border between ranks.

A convolution with W taps needs, before a rank's first token, the last inputs of its sequence on the ranks to the
left: the state that `causal_conv1d` would have there, ``[W, D]``. Every rank sends the last W inputs of its own last
sequence (before them what that sequence started from, or zeros where it came from the left itself); a rank takes
as many from its left neighbour as that one has, and continues to the left until it has W, or has reached the sequence's
start. Backward, every rank sends the gradient of what it took, and adds to its own last inputs what others took there.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_delta.parallel.part import Part


class Halo:
    """The exchange for several convolutions of W = ``size`` taps, under way from the moment it is made.

    Args:
        context: the split.
        xs: their inputs, each ``[1, T, D]`` with its own D, of one dtype.
        states: their states ``[N, D, W]`` to start from, as `causal_conv1d` takes them, for this rank's sequences (the
            row of one that began on an earlier rank is not read); None: zeros.
        size: W.
    """

    def __init__(self, context: Part, xs: Sequence[Tensor], states: Sequence[Tensor] | None, size: int):
        self.context, self.size = context, size
        self.xs = tuple(xs)
        N = len(context.sequences)
        self.states = tuple(x.new_zeros(N, x.shape[-1], size) for x in xs) if states is None else tuple(states)
        with torch.no_grad():
            tails = [_tail(context, size, x[0], state) for x, state in zip(self.xs, self.states, strict=True)]
            self.everyones, self.work = context.gather(torch.cat(tails, dim=-1))  # [P, W, sum of D]

    def wait(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """``(xs, states)``: the inputs, and the states from which to convolve them as if this rank were alone."""
        self.work.wait()
        pieces = reversed(_taken(self.context, self.context.rank, self.size))
        history = [self.everyones[other, theirs] for other, theirs, _ in pieces]
        history = torch.cat(history) if history else None
        results = _Exchange.apply(self.context, self.size, history, *self.xs, *self.states)
        return results[: len(self.xs)], results[len(self.xs) :]


def _tail(context: Part, W: int, x: Tensor, state: Tensor) -> Tensor:
    """The last W inputs of the sequence that continues, from x [T, D] and states [N, D, W]; without one, unread."""
    own = _own(context, W)
    before = state[-1].mT.to(x.dtype) if _begins_here(context) else x.new_zeros(W, x.shape[-1])
    return torch.cat([before, x[len(x) - own :]])[-W:]


def _begins_here(context: Part) -> bool:
    """Whether there is a sequence that continues to the right and does not come from the left."""
    return context.continues and len(context.sequences) > context.continued


def _own(context: Part, W: int) -> int:
    """How many inputs of this rank are among the last W of the sequence that continues."""
    return min(W, context.tokens - context.bounds[-2]) if context.continues else 0


def _taken(context: Part, rank: int, W: int) -> list[tuple[int, slice, slice]]:
    """What a rank takes, nearest first: from which rank, which of the W rows there, which of its own W they become."""
    pieces, end = [], W
    for other, count in context.split.history(rank, W):
        pieces.append((other, slice(W - count, W), slice(end - count, end)))
        end -= count
    return pieces


class _Exchange(torch.autograd.Function):
    """Lets inputs and states through, with ``history`` [W, sum of D] as the state of what came from the left."""

    @staticmethod
    def forward(ctx, context: Part, W: int, history: Tensor | None, *tensors: Tensor):
        xs, states = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        ctx.context, ctx.W, ctx.widths = context, W, [x.shape[-1] for x in xs]
        if history is not None:
            parts = history.split(ctx.widths, dim=-1)
            states = [torch.cat([part.mT[None].to(s.dtype), s[1:]]) for part, s in zip(parts, states, strict=True)]
        return (*(x.view_as(x) for x in xs), *(s.view_as(s) for s in states))

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor):
        context, W, count = ctx.context, ctx.W, len(ctx.widths)
        dxs, dstates = list(gradients[:count]), list(gradients[count:])
        given = dxs[0].new_zeros(W, sum(ctx.widths))
        if context.continued:
            given = torch.cat([d[0].mT.to(given.dtype) for d in dstates], dim=-1)
            dstates = [torch.cat([torch.zeros_like(d[:1]), d[1:]]) for d in dstates]
        everyones, work = context.gather(given)
        work.wait()
        if not context.continues:
            return None, None, None, *dxs, *dstates
        dtail, own = torch.zeros_like(given), _own(context, W)
        for rank in context.right:
            for other, theirs, places in _taken(context, rank, W):
                if other == context.rank:
                    dtail[theirs] += everyones[rank, places]
        for i, part in enumerate(dtail.split(ctx.widths, dim=-1)):
            dxs[i] = dxs[i].clone()
            dxs[i][0, context.tokens - own :] += part[W - own :]
            if _begins_here(context):  # it had fewer than W tokens here
                dstates[i] = dstates[i].clone()
                dstates[i][-1, :, own:] += part[: W - own].mT
        return None, None, None, *dxs, *dstates
