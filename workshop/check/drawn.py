"""Random parameters of layers, as a freshly initialised model would have them."""

import torch
from torch import Tensor

from flash_delta.testing.workload import Workload

TAPS = 4  # taps of a layer's convolution


class Drawn:
    """Draws tensors of a workload's dtype on a device."""

    def __init__(self, w: Workload, device: torch.device | str, seed: int):
        self.device, self.dtype = device, getattr(torch, w.dtype)
        self.gen = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, std: float = 1.0) -> Tensor:
        return (std * torch.randn(shape, generator=self.gen, device=self.device)).to(self.dtype)

    def hidden(self, w: Workload) -> Tensor:
        """The hidden states of a layer. Packed sequences are in one row."""
        return self.normal(*((1, w.tokens) if w.packed else (w.N, w.T)), w.hidden)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return (low + (high - low) * torch.rand(shape, generator=self.gen, device=self.device)).to(self.dtype)

    def weight(self, out: int, into: int) -> Tensor:
        """The weight of a projection."""
        return self.normal(out, into, std=into**-0.5)

    def taps(self, channels: int) -> Tensor:
        return self.uniform(-(TAPS**-0.5), TAPS**-0.5, channels, 1, TAPS)

    def gate(self, heads: int, channels: int = 1) -> dict[str, Tensor]:
        """The parameters of a gate: steps from 0.001 to 0.1, and rates from 1 to 16."""
        return {"dt_bias": self.uniform(-7, -2.3, heads * channels), "A_log": self.uniform(0, 2.8, heads)}
