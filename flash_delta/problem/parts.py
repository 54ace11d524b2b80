"""Parts of problems."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flash_delta.problem.marks import Schema


class Gate(NamedTuple):
    """The decay of a member, and how a call computes it. The first fields are the caller's, in this order."""

    kind: Schema[Literal["none", "scalar", "channel"]]  # no decay, one per value head, one per key channel
    raw: Schema[bool] = False  # the log decay is computed from a raw g, A_log, dt_bias and the bound
    # The least log decay per token. None with a raw gate: the softplus gate. A given log decay below it counts as it.
    bound: Schema[float | None] = None
    dtype: torch.dtype | None = None  # of g, often wider than q; None: there is no g
    has_A: bool = False
    has_bias: bool = False

    def of(self, g: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None) -> "Gate":
        """The gate, with what follows from its tensors."""
        return self._replace(
            dtype=None if g is None else g.dtype, has_A=A_log is not None, has_bias=dt_bias is not None
        )

    def constants(self) -> dict[str, bool]:
        """The constants of kernels, by the names of their parameters."""
        return {
            "GATE": self.kind == "scalar", "CHANNEL": self.kind == "channel", "RAW_GATE": self.raw,
            "BOUNDED": self.bound is not None, "HAS_A": self.has_A, "HAS_BIAS": self.has_bias,
        }  # fmt: skip
