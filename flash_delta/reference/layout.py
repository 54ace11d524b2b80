"""Where every token of a ragged batch goes: the chunk tables that let the stages run on all sequences at once.

Sequences are cut into chunks of C tokens, each starting at its sequence's start. Chunks are ordered by their position
in the sequence, and at one position by the length of the sequence, longest first. So the chunks at position j are one
slice of the chunk axis, and they belong to the first n_j sequences: a step of the scan is a slice, for any mix of
lengths.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Segment(NamedTuple):
    """A run of chunk positions, small enough that its intermediates stay in the cache."""

    start: int  # first chunk
    steps: list[slice]  # per position: its chunks, counted from ``start``

    @property
    def size(self) -> int:
        """Chunks in the segment."""
        return self.steps[-1].stop

    @property
    def width(self) -> int:
        """Sequences that take part."""
        return self.steps[0].stop


class Layout:
    """The chunk tables of N sequences of the given lengths, one after another (or each in its row of T tokens)."""

    def __init__(self, lengths: tuple[int, ...], row_length: int | None, chunk_size: int, device: torch.device):
        """``row_length``: T if every sequence has a batch row of its own, None if they share one."""
        self.tokens = sum(lengths)
        length = torch.tensor(lengths, dtype=torch.long)
        self.order = length.argsort(descending=True, stable=True)
        count = (length[self.order] + chunk_size - 1) // chunk_size  # chunks per sequence, longest first
        widths = [int((count > j).sum()) for j in range(int(count[0]) if lengths else 0)]
        self.bounds = [0]  # chunks of position j: bounds[j]:bounds[j + 1]
        for width in widths:
            self.bounds.append(self.bounds[-1] + width)

        start = torch.arange(len(lengths)) * row_length if row_length is not None else length.cumsum(0) - length
        sequence = torch.cat([self.order[:width] for width in widths]) if widths else length[:0]  # [M]
        position = torch.arange(len(widths)).repeat_interleave(torch.tensor(widths, dtype=torch.long))  # [M]
        token = position[:, None] * chunk_size + torch.arange(chunk_size)  # [M, C], in its sequence
        valid = token < length[sequence][:, None]
        self.rows = torch.where(valid, start[sequence][:, None] + token, 0).to(device)  # [M, C], in [B * T]
        self.valid = None if bool(valid.all()) else valid.to(device)  # [M, C]
        self.order = self.order.to(device)

        chunks = (length + chunk_size - 1) // chunk_size
        self.flat = ((chunks.cumsum(0) - chunks)[sequence] + position).to(device)  # chunk number, sequence by sequence

    def segments(self, budget: int) -> list[Segment]:
        """Consecutive positions together, up to ``budget`` chunks (a position is never split)."""
        result: list[Segment] = []
        for start, stop in pairwise(self.bounds):
            if result and stop - result[-1].start <= budget:
                result[-1].steps.append(slice(start - result[-1].start, stop - result[-1].start))
            else:
                result.append(Segment(start, [slice(0, stop - start)]))
        return result

    def new_tokens(self, like: Tensor) -> Tensor:
        """A contiguous buffer for ``store``; zeros where it has rows that no sequence owns."""
        full = self.tokens == like.shape[0] * like.shape[1]
        return like.new_empty(like.shape) if full else like.new_zeros(like.shape)

    def mask_(self, tile: Tensor, segment: Segment) -> Tensor:
        """Set the slots of ``[M, ..., C, D]`` that lie behind a sequence's end to zero."""
        if self.valid is None:
            return tile
        valid = self.valid[segment.start : segment.start + segment.size]
        return tile.masked_fill_(~valid.reshape(valid.shape[0], *[1] * (tile.dim() - 3), -1, 1), 0)

    def load(self, x: Tensor, segment: Segment, dtype: torch.dtype) -> Tensor:
        """Tokens ``[B, T, H, D]`` to chunks ``[M, H, C, D]``; zeros where a chunk is longer than its sequence."""
        rows = self.rows[segment.start : segment.start + segment.size]
        tile = x.reshape(-1, *x.shape[2:]).index_select(0, rows.flatten()).unflatten(0, rows.shape)
        tile = tile.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format)
        return self.mask_(tile, segment)

    def store(self, tile: Tensor, segment: Segment, x: Tensor) -> None:
        """Chunks ``[M, H, C, D]`` to their tokens in the contiguous ``x [B, T, H, D]``; the inverse of ``load``."""
        chunks = slice(segment.start, segment.start + segment.size)
        rows, tile = self.rows[chunks].flatten(), tile.transpose(1, 2).flatten(0, 1)
        if self.valid is not None:
            valid = self.valid[chunks].flatten()
            rows, tile = rows[valid], tile[valid]
        x.view(-1, *x.shape[2:]).index_copy_(0, rows, tile.to(x.dtype))

    def unpack_chunks(self, tiles: list[Tensor], B: int) -> Tensor:
        """Per chunk ``[M, H, r, ...]`` of all segments to ``[B, chunks, HV, ...]``, sequence after sequence."""
        tile = torch.cat(tiles).flatten(1, 2)
        return torch.empty_like(tile).index_copy_(0, self.flat, tile).unflatten(0, (B, -1))
