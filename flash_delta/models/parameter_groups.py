"""Decides which parameters get weight decay."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters in two groups for an optimizer: those that decay, and those that do not.

    Parameters of fewer than two dimensions do not decay: the gates' `A_log` and `dt_bias`, norms' weights, biases.
    Parameters with the attribute `_no_weight_decay` do not decay either. All others do, also embeddings and short
    convolutions.

    Args:
        model: any module, plain or wrapped (peft, DistributedDataParallel, torch.compile, `fully_shard`). A parameter
            that two modules share appears once. Parameters that need no gradient are left out.
        weight_decay: that of the first group, at least 0. The second group has 0.

    Returns:
        Two groups, each with "params", their names in "param_names", and "weight_decay". One may be empty.

    Raises:
        ValueError: if weight_decay is negative or not finite, if no parameter needs a gradient, or if a module is a
            `FullyShardedDataParallel`, whose flattened parameters do not show which of them are matrices.

    Example:
        >>> import torch
        >>> from flash_delta.layers import GatedDeltaNet
        >>> from flash_delta.models import parameter_groups
        >>> groups = parameter_groups(GatedDeltaNet(hidden_size=32, head_dim=16, num_heads=2), weight_decay=0.1)
        >>> optimizer = torch.optim.AdamW(groups, lr=1e-3)
        >>> sorted(groups[1]["param_names"])
        ['A_log', 'dt_bias', 'o_norm.weight']
    """
    if not (math.isfinite(weight_decay) and weight_decay >= 0):
        raise ValueError(f"weight_decay: expected a finite number of at least 0, got {weight_decay}")
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError("model: expected a model that FullyShardedDataParallel has not flattened, got one that it has")
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("model: expected parameters that need a gradient, got none")
    decayed = [(name, p) for name, p in trainable if p.dim() > 1 and not getattr(p, "_no_weight_decay", False)]
    names = {name for name, _ in decayed}
    others = [(name, p) for name, p in trainable if name not in names]
    return [_group(decayed, weight_decay), _group(others, 0.0)]


def _group(named: list[tuple[str, nn.Parameter]], weight_decay: float) -> dict[str, Any]:
    names, parameters = [name for name, _ in named], [p for _, p in named]
    return {"params": parameters, "param_names": names, "weight_decay": weight_decay}
