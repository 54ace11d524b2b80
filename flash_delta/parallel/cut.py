"""Where ranks cut the sequences of a row, as tensors that are computed on the device.

Each of P ranks holds one run of tokens, and has a row for each of the N sequences. The rows of sequences without tokens
there are empty. Only the sequence of a rank's first token can have begun on an earlier rank, and only that of its last
token can continue on a later one. So a rank has at most one row of each kind, which tensors number and mark.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Cut(NamedTuple):
    """Bounds are int64, marks are bool. An empty sequence belongs to the rank that holds the token at its place."""

    row: Tensor  # [N + 1], the bounds of the whole row
    padded: Tensor  # [N + 2], the same with padding as one more sequence
    bounds: Tensor  # [N + 1], of this rank's rows, counted from its first token
    begins: Tensor  # [N], marks the sequences that begin on this rank
    ends: Tensor  # [N], marks those that end here
    continued: Tensor  # [N], marks the row whose sequence began on an earlier rank and has tokens here
    continues: Tensor  # [N], marks the row whose sequence continues on a later rank
    first: Tensor  # [P], the sequence of each rank's first token; any if it is padding
    last: Tensor  # [P], the same of its last token
    crossed: Tensor  # [P], whether the sequence of the first token began on an earlier rank
    spans: Tensor  # [P], whether it is then that of the last token too


def cut_row(cu_seqlens: Tensor, starts: Tensor, rank: int) -> Cut:
    """``starts [P + 1]``: where each rank's tokens start in the row, and where the last ones stop. Bounds that decrease
    or leave the row are moved up to the bound before or into the row, since nobody can refuse them on a device."""
    total, starts, stops = starts[-1], starts[:-1], starts[1:]
    row = cu_seqlens.long().clamp(min=0).minimum(total).cummax(0).values
    numbers = torch.arange(len(row) - 1, device=row.device)
    first, last = (
        torch.searchsorted(row[1:], tokens, right=True).clamp(max=len(numbers) - 1) for tokens in (starts, stops - 1)
    )
    holds = starts < stops
    crossed = holds & (row[first] < starts) & (starts < row[first + 1])
    goes_on = holds & (stops < row[last + 1])
    start, stop = starts[rank], stops[rank]

    def here(tokens: Tensor) -> Tensor:
        tokens = tokens.minimum(total - 1)
        return (start <= tokens) & (tokens < stop)

    return Cut(
        row, torch.cat([row, total[None]]), (row - start).clamp(min=0).minimum(stop - start),
        begins=here(row[:-1]), ends=here((row[1:] - 1).maximum(row[:-1])),
        continued=(numbers == first[rank]) & crossed[rank], continues=(numbers == last[rank]) & goes_on[rank],
        first=first, last=last, crossed=crossed, spans=crossed & (first == last),
    )  # fmt: skip
