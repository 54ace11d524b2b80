"""Composes maps of states along the chains of pieces.

Maps are composed in float64. They are small, and neither autocast nor TF32 changes float64.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from flash_delta.parallel.part import Part
from flash_delta.parallel.split import Piece


def states_at_starts(context: Part, rows: Sequence[int], maps: Tensor) -> Tensor:
    """The states [n, HV, K, V] that this rank's continued ``rows`` start from, of all maps [P M, HV, K, K + V]."""
    K, sent, states = maps.shape[-2], context.split.sent, {}
    for group, pieces in _alike(context, rows, lambda piece: piece.place):
        first, *later = zip(*([sent[other] for other in context.split.left(p)] for p in pieces), strict=True)
        S = rows_of(maps, first)[..., K:].double()
        for numbers in later:
            one = rows_of(maps, numbers).double()
            S = one[..., :K] @ S + one[..., K:]
        states |= zip(group, S.to(maps.dtype), strict=True)
    return torch.stack([states[row] for row in rows])


def passed_through(context: Part, K: int, maps: Tensor) -> Tensor:
    """The part of the maps that :func:`gradients_of_ends` needs: Phi [n, HV, K, K] of the pieces in `_between`."""
    return rows_of(maps, [context.split.sent[piece] for piece in _between(context)])[..., :K].clone()


def gradients_of_ends(context: Part, rows: Sequence[int], passed: Tensor, D: Tensor) -> list[Tensor]:
    """The gradients [HV, K, V] that the ends of this rank's ``rows`` get from the right. All ``rows`` continue.
    ``D [P C, HV, K, V]``: the D of all ranks' continued pieces."""
    taken, number = context.split.taken, {piece: i for i, piece in enumerate(_between(context))}
    gradients: dict[int, Tensor] = {}
    for group, pieces in _alike(context, rows, lambda piece: len(context.split.right(piece))):
        *nearer, last = zip(*(context.split.right(piece) for piece in pieces), strict=True)
        dS = rows_of(D, [taken[piece] for piece in last]).double()
        for ones in reversed(nearer):
            transition = rows_of(passed, [number[piece] for piece in ones]).double()
            dS = rows_of(D, [taken[piece] for piece in ones]).double() + transition.mT @ dS
        gradients |= zip(group, dS.to(D.dtype), strict=True)
    return [gradients[row] for row in rows]


def rows_of(t: Tensor, numbers: Sequence[int]) -> Tensor:
    """Rows of t, without waiting for the device. If the rows are neighbours, the result is a view."""
    first = numbers[0] if numbers else 0
    if list(numbers) == list(range(first, first + len(numbers))):
        return t[first : first + len(numbers)]
    return torch.stack([t[i] for i in numbers])


def _between(context: Part) -> list[Piece]:
    """The pieces that gradients pass through from the right to this rank: all except the last of a chain."""
    right = (context.split.right(piece)[:-1] for piece in context.rows)
    return list(dict.fromkeys(piece for pieces in right for piece in pieces))


def _alike(context: Part, rows: Sequence[int], key: Callable[[Piece], int]) -> Iterator[tuple[list[int], list[Piece]]]:
    """Groups of rows with equal keys, and their pieces. The rows of a group are composed together."""
    for _, group in groupby(sorted(rows, key=lambda row: key(context.rows[row])), lambda row: key(context.rows[row])):
        numbers = list(group)
        yield numbers, [context.rows[row] for row in numbers]
