"""Where fresh gates start."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def initial_dt_bias(size: int) -> Tensor:
    """The b with softplus(b) = dt for dt log-uniform in [0.001, 0.1], the step sizes of Mamba2 (arXiv:2405.21060)."""
    dt = torch.empty(size).uniform_(math.log(1e-3), math.log(1e-1)).exp()
    return dt + torch.log(-torch.expm1(-dt))
