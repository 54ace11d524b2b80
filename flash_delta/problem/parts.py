"""Parts of problems: the gate, and what only serving calls have."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flash_delta.problem.marks import Compiled, Schema


class Gate(NamedTuple):
    """The decay of a member, and how a call computes it. Ops pass the first three fields on as a tuple, since making a
    Gate takes 0.3 us, and a tracer would guard its class."""

    kind: Schema[Literal["none", "scalar", "channel"]]  # no decay, one per value head, one per key channel
    raw: Schema[bool] = False  # the log decay is computed from a raw g, A_log, dt_bias and the bound
    # The least log decay per token. None with a raw gate: the softplus gate. A given log decay below it counts as it.
    bound: Schema[float | None] = None
    dtype: torch.dtype | None = None  # of g, often wider than q; None: there is no g
    has_A: bool = False
    has_bias: bool = False

    def constants(self) -> dict[str, bool]:
        """The constants of kernels, by the names of their parameters."""
        return {
            "GATE": self.kind == "scalar", "CHANNEL": self.kind == "channel", "RAW_GATE": self.raw,
            "BOUNDED": self.bound is not None, "HAS_A": self.has_A, "HAS_BIAS": self.has_bias,
        }  # fmt: skip


Form = tuple[str, bool, float | None]  # the first three fields of a Gate


def gate_of(form: Form, g: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None) -> Gate:
    """The gate of a call with these tensors."""
    return Gate(*form, None if g is None else g.dtype, A_log is not None, dt_bias is not None)


class Pools(NamedTuple):
    """The part of a serving call: its pools, and what a layer does around the rule."""

    eps: float | None = None  # of the gated norm after the rule; None: no norm
    activation: Compiled[Literal["silu", "sigmoid"] | None] = None  # the activation of that norm's gate
    rolling: Compiled[bool] = False  # slots of windows hold more: a draft's inputs, after those of its first window
    null_slot: int = -1  # this index is padding, like indices out of range
    checkpoint_every: int = 0  # prefill: tokens between two checkpoints; 0: no checkpoints
    max_prompts: int | None = None  # prefill: at most so many sequences have over SHORT tokens; None: any number
    dtype: torch.dtype = torch.float32  # of the pool whose slots hold the states
    write_dtype: torch.dtype | None = None  # decoding: of the pool that is written; None: the same pool
    plain: bool = True  # slots of states have no gaps inside and begin at multiples of 16 bytes
    taps: Compiled[int] = 0  # taps of the short convolution before the rule; 0: no convolution
    window: Compiled[int] = 0  # how many inputs of a channel a window in the convolution's pool holds
    most_tokens: int = 0  # decoding of packed rows: rows with more tokens are padding; 0: rows are not packed
    records: int = 0  # decoding: tokens leave records, so many to a page, and no states; 0: they leave states
    checkpoint_offsets: bool = False  # prefill: each sequence has one checkpoint, at its own offset
