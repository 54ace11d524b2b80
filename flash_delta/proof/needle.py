"""Needles in a text that is longer than those of training."""

from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn

from flash_delta.layers import Attention, GatedDeltaNet, GatedDeltaNet2, KimiDeltaAttention
from flash_delta.proof.recall import attention, mixer
from flash_delta.proof.task import UNASKED, Learner, Paper, Task, at_least, at_most


class Needles:
    """A text of noise, in which some keys are told with their values. Then each of these keys is asked for its value.

    Args:
        keys: how many keys there are. They are tokens 0 to keys - 1.
        values: how many values there are. They are the tokens from keys on.
        noise: how many other words there are. They are the remaining tokens.
        needles: how many keys a text tells.
    """

    def __init__(self, keys: int, values: int, noise: int, needles: int) -> None:
        self.keys, self.values, self.noise, self.needles = keys, values, noise, needles
        self.symbols = keys + values + noise

    def __call__(self, generator: Generator, rows: int, size: int) -> tuple[Tensor, Tensor]:
        """Tokens and answers for texts of ``size`` tokens, [rows, size + needles] each."""
        text = torch.randint(self.noise, (rows, size), generator=generator) + self.keys + self.values
        at = 2 * torch.rand(rows, size // 2, generator=generator).argsort(1)[:, : self.needles]
        names = torch.rand(rows, self.keys, generator=generator).argsort(1)[:, : self.needles]
        values = torch.randint(self.values, names.shape, generator=generator)
        text.scatter_(1, at, names).scatter_(1, at + 1, values + self.keys)
        answers = torch.cat((torch.full_like(text, UNASKED), values), 1)
        return torch.cat((text, names), 1), answers


def hybrid(channels: int) -> Callable[[int], list[nn.Module]]:
    """A layer of Gated DeltaNet, and one of softmax attention after it."""
    return lambda width: [*mixer(GatedDeltaNet, channels)(width), Attention(width, 1)]


NEEDLE_PAPER = Paper(
    "At 1.3B parameters and 100B tokens, GDN-2 finds 89.8 % of the needles of S-NIAH-3 at 2K tokens, and Kimi Delta "
    "Attention 63.2 %. That is another task: texts and keys are words.",
    "Gated DeltaNet-2: Decoupling Erase and Write in Linear Attention",
)
SIZES = 60, 124, 252, 508, 1020
FOUND = at_least(0.9, SIZES[:3]) | at_least(0.8, SIZES[3:4])
LONG_SIZES = 1_000, 2_000, 4_000, 8_000, 16_000

NEEDLES = Task(
    name="needle",
    title="Needles in texts longer than trained",
    unit="tokens of text",
    batch=Needles(keys=16, values=16, noise=32, needles=4),
    symbols=64,
    answers=16,
    chance=1 / 16,
    learners=(
        Learner("Gated DeltaNet", mixer(GatedDeltaNet, 16), FOUND),
        Learner("Kimi Delta Attention", mixer(KimiDeltaAttention, 16), FOUND),
        Learner("softmax attention, rotary positions", attention, at_most(0.7, SIZES[3:]), control=True),
    ),
    papers=(NEEDLE_PAPER,),
    shortest=8,
    trained=60,
    sizes=SIZES,
)
LONG_NEEDLES = Task(
    name="needle-long",
    title="More needles in texts of thousands of tokens",
    unit="tokens of text",
    batch=Needles(keys=64, values=64, noise=384, needles=16),
    symbols=512,
    answers=64,
    chance=1 / 64,
    learners=(
        Learner("Gated DeltaNet", mixer(GatedDeltaNet, 64), at_least(0.9, LONG_SIZES[:3])),
        Learner("Kimi Delta Attention", mixer(KimiDeltaAttention, 64), at_least(0.9, LONG_SIZES[:3])),
        Learner("GDN-2", mixer(GatedDeltaNet2, 64), at_least(0.9, LONG_SIZES[:3])),
        Learner("Gated DeltaNet, then softmax attention", hybrid(64), at_least(0.9, LONG_SIZES[:1])),
        Learner("softmax attention, rotary positions", attention, at_most(0.7, LONG_SIZES[3:]), control=True),
    ),
    papers=(NEEDLE_PAPER,),
    shortest=32,
    trained=1_000,
    sizes=LONG_SIZES,
    width=128,
    steps=4000,
    lr=3e-3,
    device="cuda",
)
