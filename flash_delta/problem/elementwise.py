"""Calls of what is around the rule: convolution, norm and gate, all of a mixer, and states at rest in int8."""

from typing import NamedTuple

import torch
from torch import Tensor

from flash_delta.problem.marks import Compiled, Schema
from flash_delta.problem.parts import Gate


class ConvolutionProblem(NamedTuple):
    """A call of the short convolution: everything except the values of its tensors."""

    op: Schema[str]
    B: int
    T: int
    D: Compiled[int]  # channels
    W: Compiled[int]  # taps
    N: int  # sequences
    dtype: torch.dtype  # the widest of its tensors
    device: Compiled[torch.device]
    packed: Compiled[bool]
    activation: Schema[Compiled[str | None]]
    output_final_state: Schema[bool] = False
    DQ: Compiled[int] = 0  # channels of q, and of k; v has the others. 0: there is one tensor x


class Convolved(NamedTuple):
    """The tensors of a convolution. In the backward pass the same tuple holds their gradients."""

    x: Tensor  # [B, T, D]
    weight: Tensor  # [D, W]
    bias: Tensor | None = None  # [D]
    initial_state: Tensor | None = None  # [N, D, W]: the last inputs, the oldest first
    cu_seqlens: Tensor | None = None  # [N + 1]


class ConvolvedHeads(NamedTuple):
    """The tensors of the three convolutions of a layer, which have no bias and no state."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    q_weight: Tensor  # [H * K, W]
    k_weight: Tensor  # [H * K, W]
    v_weight: Tensor  # [HV * V, W]
    cu_seqlens: Tensor | None = None  # [N + 1]


class NormProblem(NamedTuple):
    """A call of the RMS norm over the last axis, gated if there is an activation."""

    op: Schema[str]
    D: Compiled[int]  # the last axis
    dtype: torch.dtype  # the widest of its tensors
    device: Compiled[torch.device]
    activation: Schema[Compiled[str | None]]
    eps: Schema[float]
    output_dtype: Schema[Compiled[torch.dtype | None]] = None  # None: x's


class Normalized(NamedTuple):
    """The tensors of a norm. In the backward pass the same tuple holds their gradients."""

    x: Tensor  # [..., D]
    weight: Tensor  # [D]
    gate: Tensor | None = None  # [..., D]


class GateProblem(NamedTuple):
    """A call that computes log decays from raw activations."""

    op: Schema[str]
    HV: Compiled[int]  # heads
    K: Compiled[int]  # gates per head: one per channel, or 1 for a gate per head
    dtype: torch.dtype  # the widest of its tensors
    device: Compiled[torch.device]
    gate: Schema[Gate]  # raw
    output_dtype: Schema[Compiled[torch.dtype]]


class Gated(NamedTuple):
    """The tensors of a gate's call. In the backward pass the same tuple holds their gradients."""

    g: Tensor  # [..., HV], or [..., HV, K] with a gate per channel
    A_log: Tensor | None = None  # HV elements; None with a lower bound only
    dt_bias: Tensor | None = None  # HV * K elements


class Mixed(NamedTuple):
    """The tensors of a mixer, which is all of a layer that is between its projections. In the backward pass the same
    tuple holds their gradients. The first six are q, k and v before their convolutions, g before A_log and dt_bias, the
    logits of beta, and z, the gate of the norm, or None. If their places are given, they are packed projections."""

    first: Tensor  # q [B, T, H, K], or [B, T, P]
    second: Tensor | None  # k [B, T, H, K], or [B, T, P]
    third: Tensor | None  # v [B, T, HV, V], or [B, T, P]
    fourth: Tensor | None  # g [B, T, HV] or [B, T, HV, K], or [B, T, P]
    fifth: Tensor | None  # beta [B, T, HV], or [B, T, P]
    sixth: Tensor | None  # z [B, T, HV, V], or [B, T, P]
    q_weight: Tensor  # [H * K, W], or [H * K, 1, W]; without the two others those of all channels
    k_weight: Tensor | None  # [H * K, W], or [H * K, 1, W]
    v_weight: Tensor | None  # [HV * V, W], or [HV * V, 1, W]
    A_log: Tensor | None  # [HV]
    dt_bias: Tensor | None  # [HV] or [HV * K]
    norm_weight: Tensor  # [V]
    cu_seqlens: Tensor | None = None  # [N + 1]


class Int8Problem(NamedTuple):
    """A call that rounds states of a pool to int8, or restores them."""

    op: str
    restores: Compiled[bool]
    rows: Compiled[int]  # of a state as it lies in the pool
    columns: Compiled[int]
    axis: Compiled[int]  # the numbers along it share a scale; -1: a scale per row, -2: a scale per column
    dtype: torch.dtype  # of the pool
    device: Compiled[torch.device]
    null_slot: int  # an index that is padding; -1: there is none


class Resting(NamedTuple):
    """The tensors of a call on states at rest. The first three have an axis of layers."""

    state_pool: Tensor  # [L, slots, HV, rows, columns]
    states: Tensor  # int8, likewise, with other slots
    scale: Tensor  # likewise, with one row or with one column
    read_indices: Tensor  # [N]
    write_indices: Tensor  # [N]


ElementwiseProblem = ConvolutionProblem | NormProblem | GateProblem | Int8Problem
ElementwiseInputs = Convolved | ConvolvedHeads | Normalized | Gated | Resting
