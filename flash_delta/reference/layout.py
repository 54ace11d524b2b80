"""Tables that say where every token of a ragged batch goes, so that the stages run on all sequences at once.

Sequences are cut into chunks of C tokens, counted from the sequence's start. Chunks are ordered by their position in
the sequence, and at one position by the length of the sequence, longest first. So the chunks at position j are one
slice of the chunk axis, and they belong to the first n_j sequences. A step of the scan is then one slice, for any mix
of lengths.
"""

from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Segment(NamedTuple):
    """A run of chunk positions, small enough that its intermediates stay in the cache."""

    position: int  # the first position
    start: int  # the first chunk
    steps: list[slice]  # per position: its chunks, counted from ``start``

    @property
    def size(self) -> int:
        """The number of chunks in the segment."""
        return self.steps[-1].stop

    @property
    def width(self) -> int:
        """The number of sequences in the segment."""
        return self.steps[0].stop


class Layout:
    """The chunk tables of N sequences of the given lengths, one after another (or each in its row of T tokens)."""

    def __init__(self, lengths: tuple[int, ...], row_length: int | None, chunk_size: int, device: torch.device):
        """``row_length``: T if every sequence has its own batch row, None if all share one row."""
        host = {"dtype": torch.long, "device": "cpu"}  # for any torch.set_default_device
        length = torch.tensor(lengths, **host)
        order = length.argsort(descending=True, stable=True)
        chunks = (length + chunk_size - 1) // chunk_size  # per sequence
        widths = [int((chunks > j).sum()) for j in range(max(chunks.tolist(), default=0))]
        position = torch.arange(len(widths), **host).repeat_interleave(torch.tensor(widths, **host))  # [M]
        sequence = torch.cat([order[:width] for width in widths]) if widths else order[:0]  # [M]
        row = torch.arange(len(lengths), **host)
        start = row * row_length if row_length is not None else length.cumsum(0) - length
        token = position[:, None] * chunk_size + torch.arange(chunk_size, **host)  # [M, C], in its sequence
        valid = token < length[sequence][:, None]

        self.tokens = sum(lengths)
        self.chunk_size = chunk_size
        self.bounds = [0, *accumulate(widths)]  # chunks of position j: bounds[j]:bounds[j + 1]
        ordered = all(a >= b for a, b in pairwise(lengths))
        # Copies to a GPU do not wait for it. The tables are in pageable memory, which is read before the call returns.
        send = partial(torch.Tensor.to, device=device, non_blocking=True)
        self.order = None if ordered else send(order)  # sequences, longest first; None: in the given order
        rows = torch.where(valid, start[sequence][:, None] + token, 0)
        self.rows = send(rows)  # [M, C], in [B * T]; 0 after a sequence's end
        self.valid = None if bool(valid.all()) else send(valid)  # [M, C]
        self.slots = send(valid.flatten().nonzero().squeeze(1))  # the tokens' places in [M * C]
        self.token_rows = send(rows[valid])  # the same tokens' places in [B * T]
        self.filled = [0, *valid.sum(1).cumsum(0).tolist()]  # tokens in the chunks before chunk m
        self.number = send((chunks.cumsum(0) - chunks)[sequence] + position)  # [M], sequence by sequence
        # If rows consist of whole chunks, views load and store them in one pass. Index tables need two passes.
        self.aligned = row_length is not None and self.valid is None

    def segments(self, budget: int) -> list[Segment]:
        """Groups consecutive positions into segments of up to ``budget`` chunks. A position is never split."""
        result: list[Segment] = []
        for j, (start, stop) in enumerate(pairwise(self.bounds)):
            if result and stop - result[-1].start <= budget:
                result[-1].steps.append(slice(start - result[-1].start, stop - result[-1].start))
            else:
                result.append(Segment(j, start, [slice(0, stop - start)]))
        return result

    def new_tokens(self, like: Tensor) -> Tensor:
        """A contiguous buffer for ``store``. It is filled with zeros if some of its tokens belong to no sequence."""
        full = self.tokens == like.shape[0] * like.shape[1]
        return like.new_empty(like.shape) if full else like.new_zeros(like.shape)

    def mask_(self, tile: Tensor, segment: Segment) -> Tensor:
        """Set the slots of ``[M, ..., C, D]`` that lie after a sequence's end to zero."""
        if self.valid is None:
            return tile
        valid = self.valid[segment.start : segment.start + segment.size]
        return tile.masked_fill_(~valid.reshape(valid.shape[0], *[1] * (tile.dim() - 3), -1, 1), 0)

    def load(self, x: Tensor, segment: Segment, dtype: torch.dtype) -> Tensor:
        """Tokens ``[B, T, H, D]`` to chunks ``[M, H, C, D]``, with zeros after the end of a sequence.

        The result may share memory with ``x``.
        """
        if self.aligned:
            tile = self._view(x, segment)
        else:
            rows = self.rows[segment.start : segment.start + segment.size]
            tile = x.reshape(-1, *x.shape[2:]).index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(1, 2)
        if tile.dtype == dtype:
            tile = tile.contiguous()
        else:
            tile = torch.empty(tile.shape, dtype=dtype, device=tile.device).copy_(tile)  # cast and reorder in one pass
        return self.mask_(tile.flatten(0, -4), segment)

    def store(self, tile: Tensor, segment: Segment, x: Tensor) -> None:
        """Chunks ``[M, H, C, D]`` to their tokens in the contiguous ``x [B, T, H, D]``; the inverse of ``load``."""
        if self.aligned:
            view = self._view(x, segment)
            view.copy_(tile.view(view.shape))
            return
        tokens = slice(self.filled[segment.start], self.filled[segment.start + segment.size])
        slots = self.slots[tokens] - segment.start * self.chunk_size
        tile = tile.transpose(1, 2).flatten(0, 1).index_select(0, slots)
        x.view(-1, *x.shape[2:]).index_copy_(0, self.token_rows[tokens], tile.to(x.dtype))

    def _view(self, x: Tensor, segment: Segment) -> Tensor:
        """The tokens of a segment, ``[B, T, H, D]`` to ``[positions, B, H, C, D]``."""
        first = segment.position * self.chunk_size
        x = x[:, first : first + len(segment.steps) * self.chunk_size]
        return x.view(x.shape[0], -1, self.chunk_size, *x.shape[2:]).permute(1, 0, 3, 2, 4)

    def unpack_chunks(self, tiles: list[Tensor], B: int) -> Tensor:
        """Per chunk ``[M, H, r, ...]`` of all segments to ``[B, chunks, HV, ...]``, sequence after sequence.

        There is at least one tile, which may have no chunks.
        """
        tile = torch.cat(tiles).flatten(1, 2)
        return torch.empty_like(tile).index_copy_(0, self.number, tile).unflatten(0, (B, -1))
