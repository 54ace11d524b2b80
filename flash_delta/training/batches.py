"""Windows of text for a training step: the targets of bytes, where sequences begin, and which rank has which rows."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100  # no target; the default of cross_entropy


class Batch(NamedTuple):
    """B windows of T bytes. Put end to end they are one packed row."""

    tokens: Tensor  # [B, T]
    targets: Tensor  # [B, T]: the next byte; IGNORED where its sequence ends
    begins: Tensor  # [B, T] bool: where a sequence begins; every window begins one

    @classmethod
    def of(cls, windows: Tensor, begins: Tensor | None) -> "Batch":
        """A batch of windows [B, T]. Each is one sequence, or ``begins`` [B, T] cuts it into several."""
        begins = torch.zeros_like(windows) if begins is None else begins
        begins = begins.bool().index_fill(1, torch.tensor([0]), True)
        ends = F.pad(begins[:, 1:], (0, 1), value=True)
        return cls(windows, windows.roll(-1, dims=1).masked_fill(ends, IGNORED), begins)

    @property
    def count(self) -> int:
        """The number of targets."""
        return int((self.targets != IGNORED).sum())

    @property
    def bounds(self) -> list[int]:
        """The bounds ``[N + 1]`` of all sequences in the row of B * T tokens."""
        return [*self.begins.flatten().nonzero()[:, 0].tolist(), self.begins.numel()]

    def rows(self, which: slice) -> "Batch":
        return Batch(*(x[which] for x in self))

    def padded(self, multiple: int) -> "Batch":
        """The batch with added rows, which have no targets."""
        missing = -len(self.tokens) % multiple
        return Batch(*(F.pad(x, (0, 0, 0, missing), value=v) for x, v in zip(self, (0, IGNORED, True), strict=True)))

    def split(self, size: int) -> Iterator["Batch"]:
        return (self.rows(slice(start, start + size)) for start in range(0, len(self.tokens), size))
