"""The network around the mixers of a task."""

from collections.abc import Sequence

from torch import Tensor, nn


class Network(nn.Module):
    """An embedding, mixers with residuals, and a linear head. There is no feed-forward layer: mixers alone must learn.

    Equation, for each mixer::

        x <- x + mixer(RMSNorm(x))
    """

    def __init__(self, symbols: int, answers: int, width: int, mixers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in mixers)
        self.mixers = nn.ModuleList(mixers)
        self.head = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, answers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[B, T, answers]`` for tokens ``[B, T]``."""
        x = self.embedding(tokens)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        return self.head(x)
