"""What a layer's caller names or gives: activations, and widths of heads."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from flash_delta.ops._check.options import as_float, as_size

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: x.clamp(max=0).exp() + x.clamp(min=0),  # elu(x) + 1, without the difference of exp(x) and 1
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "identity": lambda x: x,
    "logsigmoid": F.logsigmoid,
    "relu": F.relu,
    "sigmoid": F.sigmoid,
    "silu": F.silu,
    "sqrelu": lambda x: F.relu(x).square(),
    "swish": F.silu,
}


def head_width(layer: str, name: str, hidden_size: int, expand: float, num_heads: int) -> int:
    """The width of each head. All heads together have ``expand`` (the argument ``name``) times the hidden size."""
    hidden_size, num_heads = as_size(layer, "hidden_size", hidden_size), as_size(layer, "num_heads", num_heads)
    expand = as_float(layer, name, expand, "a positive number", lowest=1 / hidden_size)
    total = round(hidden_size * expand)
    if not math.isclose(total, hidden_size * expand) or total % num_heads != 0:
        raise ValueError(
            f"{name}: expected hidden_size * {name} to be a multiple of num_heads = {num_heads}, "
            f"got {hidden_size} * {expand}"
        )
    return total // num_heads


def head_widths(layer: str, head_dim: int, expand_v: float) -> dict[str, int]:
    """Key and value width of a head. The value width is ``expand_v`` times the key width."""
    head_dim = as_size(layer, "head_dim", head_dim)
    expand_v = as_float(layer, "expand_v", expand_v, "a positive number", lowest=1 / head_dim)
    if not (head_dim * expand_v).is_integer():
        raise ValueError(f"expand_v: expected head_dim * expand_v to be whole, got {head_dim} * {expand_v}")
    return {"head_k_dim": head_dim, "head_v_dim": int(head_dim * expand_v)}
