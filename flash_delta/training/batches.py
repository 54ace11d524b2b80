"""Windows of text as a step takes them: what follows each byte, where sequences begin, and which rows are whose."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100  # no target: cross_entropy's own mark


class Batch(NamedTuple):
    """B windows of T bytes, or, end to end, one packed row."""

    tokens: Tensor  # [B, T]
    targets: Tensor  # [B, T]: the next byte; IGNORED where its sequence ends
    begins: Tensor  # [B, T] bool: where a sequence begins, as every window does

    @classmethod
    def of(cls, windows: Tensor, begins: Tensor | None) -> "Batch":
        """Windows [B, T] of one sequence each, or of those that ``begins`` [B, T] cuts them into."""
        begins = torch.zeros_like(windows) if begins is None else begins
        begins = begins.bool().index_fill(1, torch.tensor([0]), True)
        ends = F.pad(begins[:, 1:], (0, 1), value=True)
        return cls(windows, windows.roll(-1, dims=1).masked_fill(ends, IGNORED), begins)

    @property
    def count(self) -> int:
        """How many targets there are."""
        return int((self.targets != IGNORED).sum())

    @property
    def bounds(self) -> list[int]:
        """Of all sequences in the row of B * T tokens, ``[N + 1]``."""
        return [*self.begins.flatten().nonzero()[:, 0].tolist(), self.begins.numel()]

    def rows(self, which: slice) -> "Batch":
        return Batch(*(x[which] for x in self))

    def padded(self, multiple: int) -> "Batch":
        """With more rows, which have no targets."""
        missing = -len(self.tokens) % multiple
        return Batch(*(F.pad(x, (0, 0, 0, missing), value=v) for x, v in zip(self, (0, IGNORED, True), strict=True)))

    def split(self, size: int) -> Iterator["Batch"]:
        return (self.rows(slice(start, start + size)) for start in range(0, len(self.tokens), size))
