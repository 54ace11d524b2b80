"""What a convolution or a norm refuses: ValueErrors that say what was expected and what came."""

import torch
from torch import Tensor

from flash_delta.problem import Convolved, Normalized


def check_convolution(x: Convolved, activation: str | None) -> None:
    _check_channels(x, activation)
    N = x.x.shape[0] if x.cu_seqlens is None else _count_sequences(x.x, x.cu_seqlens)
    if x.initial_state is not None and x.initial_state.shape != (N, *x.weight.shape):
        expected = f"shape [N, D, W] = {[N, *x.weight.shape]}"
        raise ValueError(f"initial_state: expected {expected}, got {list(x.initial_state.shape)}")


def check_token(x: Convolved, activation: str | None) -> None:
    """Of x [N, D]."""
    _check_channels(x._replace(x=x.x.unsqueeze(1)), activation)
    N, state = len(x.x), x.initial_state
    if state.shape != (N, *x.weight.shape):
        raise ValueError(f"state: expected shape [N, D, W] = {[N, *x.weight.shape]}, got {list(state.shape)}")


def check_norm(x: Normalized) -> None:
    if x.gate is not None and x.gate.shape != x.x.shape:
        raise ValueError(f"gate: expected x's shape {list(x.x.shape)}, got {list(x.gate.shape)}")
    if x.weight.shape != x.x.shape[-1:]:
        shape = list(x.weight.shape)
        raise ValueError(f"x: expected weight's shape {shape} in its last axis, got {list(x.x.shape)}")


def _check_channels(c: Convolved, activation: str | None) -> None:
    x, weight, bias = c.x, c.weight, c.bias
    if x.dim() != 3 or not x.is_floating_point():
        raise ValueError(f"x: expected a floating tensor [B, T, D], got {x.dtype} {list(x.shape)}")
    if weight.dim() != 2 or weight.shape[0] != x.shape[2] or weight.shape[1] < 1:
        raise ValueError(f"weight: expected shape [D, W] with D = {x.shape[2]}, got {list(weight.shape)}")
    if bias is not None and bias.shape != x.shape[2:]:
        raise ValueError(f"bias: expected shape [D] = {list(x.shape[2:])}, got {list(bias.shape)}")
    if activation not in (None, "silu"):
        raise ValueError(f"activation: expected 'silu' or None, got {activation!r}")


def _count_sequences(x: Tensor, cu_seqlens: Tensor) -> int:
    """The number of packed sequences N, read from cu_seqlens' shape: its values stay on the device."""
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        raise ValueError(f"cu_seqlens: expected int32 or int64 of shape [N + 1], got {got}")
    if x.shape[0] != 1:
        raise ValueError(f"x: expected B = 1 with cu_seqlens (sequences packed in one row), got B = {x.shape[0]}")
    return cu_seqlens.shape[0] - 1
