"""Recall: pairs of a key and a value are told, then every key is asked for its value."""

from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn

from flash_delta.layers import (
    Attention,
    GatedDeltaNet,
    GatedDeltaNet2,
    KimiDeltaAttention,
    SimpleGatedLinearAttention,
)
from flash_delta.modules import ShortConvolution
from flash_delta.proof.task import UNASKED, Learner, Paper, Task, at_least, at_most


class Recall:
    """Strings of pairs, then each key once, in another order. The answer at a key is the value that was told last.

    Told once each, this is multi-query associative recall (arXiv:2312.04927) without noise.

    Args:
        keys: how many keys there are. They are tokens 0 to keys - 1.
        values: how many values there are. They are the tokens from keys on.
        times: how often a key of a string is told, on average, and at least once.
    """

    def __init__(self, keys: int, values: int, times: int = 1) -> None:
        self.keys, self.values, self.times = keys, values, times
        self.symbols = keys + values

    def __call__(self, generator: Generator, rows: int, size: int) -> tuple[Tensor, Tensor]:
        """Tokens and answers for ``size`` different keys, [rows, size (2 times + 1)] each."""
        told = size * self.times
        names = torch.rand(rows, self.keys, generator=generator).argsort(1)[:, :size]
        again = torch.randint(size, (rows, told - size), generator=generator)
        order = torch.rand(rows, told, generator=generator).argsort(1)
        which = torch.cat((torch.arange(size).expand(rows, size), again), 1).gather(1, order)
        values = torch.randint(self.values, (rows, told), generator=generator)
        last = torch.zeros(rows, size, dtype=torch.long)
        for t in range(told):
            last.scatter_(1, which[:, t : t + 1], values[:, t : t + 1])
        asked = torch.rand(rows, size, generator=generator).argsort(1)
        pairs = torch.stack((names.gather(1, which), values + self.keys), 2).flatten(1)
        tokens = torch.cat((pairs, names.gather(1, asked)), 1)
        return tokens, torch.cat((torch.full_like(pairs, UNASKED), last.gather(1, asked)), 1)


class ConvolvedAttention(nn.Module):
    """Softmax attention behind a short convolution, which brings a key to its value as in the other layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution, self.attention = ShortConvolution(width, 4), Attention(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] -> [B, T, width]"""
        return self.attention(x + self.convolution(x)[0])


def attention(width: int) -> list[nn.Module]:
    """One layer of softmax attention, which keeps every pair."""
    return [ConvolvedAttention(width)]


def mixer(layer: Callable[..., nn.Module], channels: int) -> Callable[[int], list[nn.Module]]:
    """One layer with one head, whose keys have so many channels and whose values have the width of the model."""

    def make(width: int) -> list[nn.Module]:
        if layer is SimpleGatedLinearAttention:
            return [layer(hidden_size=width, num_heads=1, expand_k=channels / width, expand_v=1)]
        return [layer(width, num_heads=1, head_dim=channels, expand_v=width / channels)]

    return make


WIDTH_OF_A_STATE = Paper(
    "Attention recalls pairs at any width. Gated convolutions need more width for longer strings.",
    "Arora et al., Zoology, arXiv:2312.04927",
)
CHANNELS, TOO_FEW, SIZES = 8, 2, (4, 8, 16)
RECALLED = at_least(0.75, (4, 8))
RETOLD_CHANNELS, RETOLD_SIZES = 16, (4, 8, 12)
RETOLD_BOUNDS = at_least(0.9, (4, 8)) | at_least(0.82, (12,))
RETOLD_CONTROL = at_most(0.84, (8,)) | at_most(0.76, (12,))

RECALL = Task(
    name="recall",
    title="Recall, with fewer channels than keys",
    unit="pairs",
    batch=Recall(keys=32, values=32),
    symbols=64,
    answers=32,
    chance=1 / 32,
    learners=(
        Learner("softmax attention", attention, at_least(0.95, SIZES)),
        Learner("Gated DeltaNet, 8 channels", mixer(GatedDeltaNet, CHANNELS), RECALLED),
        Learner("Kimi Delta Attention, 8 channels", mixer(KimiDeltaAttention, CHANNELS), RECALLED),
        Learner("GDN-2, 8 channels", mixer(GatedDeltaNet2, CHANNELS), RECALLED),
        Learner("simple GLA, 8 channels", mixer(SimpleGatedLinearAttention, CHANNELS), RECALLED),
        Learner("Gated DeltaNet, 2 channels", mixer(GatedDeltaNet, TOO_FEW), at_most(0.5, (8, 16)), control=True),
    ),
    papers=(WIDTH_OF_A_STATE,),
    steps=1600,
    shortest=2,
    trained=16,
    sizes=SIZES,
)
RETOLD = Task(
    name="retold",
    title="Recall of keys that are told again",
    unit="keys, each told three times on average",
    batch=Recall(keys=32, values=32, times=3),
    symbols=64,
    answers=32,
    chance=1 / 32,
    learners=(
        Learner("Gated DeltaNet", mixer(GatedDeltaNet, RETOLD_CHANNELS), RETOLD_BOUNDS),
        Learner("Kimi Delta Attention", mixer(KimiDeltaAttention, RETOLD_CHANNELS), RETOLD_BOUNDS),
        Learner("GDN-2", mixer(GatedDeltaNet2, RETOLD_CHANNELS), RETOLD_BOUNDS),
        Learner("simple GLA", mixer(SimpleGatedLinearAttention, RETOLD_CHANNELS), RETOLD_CONTROL, True),
    ),
    steps=800,
    shortest=2,
    trained=8,
    sizes=RETOLD_SIZES,
)
