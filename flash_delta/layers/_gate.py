"""The parameters of gates: their initial values, their precision, and their mark for weight decay."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

GATES = frozenset({"A_log", "dt_bias"})


def initial_dt_bias(like: Tensor) -> Tensor:
    """b with softplus(b) = dt for dt log-uniform in [0.001, 0.1], like the steps of Mamba2 (arXiv:2405.21060)."""
    dt = torch.empty_like(like).uniform_(math.log(1e-3), math.log(1e-1)).exp()
    return dt + torch.log(-torch.expm1(-dt))


class GateParameters(nn.Module):
    """Keeps the parameters A_log and dt_bias in float32 at least, and marks them.

    A decay is an exponential of an exponential of A_log, so 16 bits are too few. The parameters stay float32 under a
    default dtype of 16 bits, ``to(torch.bfloat16)``, ``half()`` and ``load_state_dict(assign=True)``.

    The mark is ``_no_weight_decay``, for training code that was written for fla or Mamba. copy.deepcopy and
    from_pretrained make new parameters without the marks of the old ones. So each new one is marked.
    """

    unregularized = GATES

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name in GATES and param is not None and param.dtype != _at_least_float32(param):
            param = nn.Parameter(param.detach().to(_at_least_float32(param)), param.requires_grad)
        super().register_parameter(name, param)
        self.mark_gates()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.mark_gates()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Moves and casts the module's tensors, as all of `to`, `half` and `cuda` do."""
        gates = [gate for name, gate in self._parameters.items() if name in GATES and gate is not None]
        gates += [gate.grad for gate in gates]

        def keep(t: Tensor) -> Tensor:
            moved = fn(t)
            narrow = moved.dtype != _at_least_float32(moved) and any(t is gate for gate in gates)
            return t.to(moved.device, _at_least_float32(moved)) if narrow else moved

        super()._apply(keep, recurse)
        self.mark_gates()  # "meta" and `to_empty` make new parameters
        return self

    def mark_gates(self) -> None:
        for name in self.unregularized & self._parameters.keys():
            if (parameter := self._parameters[name]) is not None:
                parameter._no_weight_decay = True


def _at_least_float32(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)
