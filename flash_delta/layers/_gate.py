"""The parameters of gates: their initial values, and their mark for weight decay."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


def initial_dt_bias(size: int) -> Tensor:
    """b with softplus(b) = dt for dt log-uniform in [0.001, 0.1], like the steps of Mamba2 (arXiv:2405.21060)."""
    dt = torch.empty(size).uniform_(math.log(1e-3), math.log(1e-1)).exp()
    return dt + torch.log(-torch.expm1(-dt))


class GateMarks(nn.Module):
    """Marks parameters by ``_no_weight_decay``, for training code that was written for fla or Mamba.

    copy.deepcopy and from_pretrained make new parameters without the marks of the old ones. So each new one is marked.
    """

    unregularized = frozenset({"A_log", "dt_bias"})

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._mark_gate()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark_gate()

    def _mark_gate(self) -> None:
        for name in self.unregularized & self._parameters.keys():
            self._parameters[name]._no_weight_decay = True
