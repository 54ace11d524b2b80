"""Splits a mixer's heads over the ranks of a group, by a plan for `parallelize_module`."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from flash_delta.layers._mixer import Mixer
from flash_delta.layers.attention import Attention
from flash_delta.modules import ShortConvolution


def tensor_parallel_plan(layer: nn.Module) -> dict[str, ParallelStyle]:
    """The plan with which `parallelize_module` lets each rank of a group compute some of a layer's heads.

    The number of key heads has to be a multiple of the number of ranks. Every rank has the layer's whole input and
    output, and the states of its own heads. You may apply FSDP2 afterwards, over another dimension of the mesh.

    Args:
        layer: the layer that will be parallelized, any layer of `flash_delta.layers`.

    Returns:
        A style for each of the layer's modules. The style for "" is for the layer's own parameters.

    Raises:
        ValueError: for another module, and for a `GatedDeltaProduct` with several updates per token, whose channels are
            not ordered by heads; in `parallelize_module`, if heads do not divide.

    Example:
        >>> from flash_delta.layers import GatedDeltaNet, tensor_parallel_plan
        >>> layer = GatedDeltaNet(hidden_size=64, num_heads=2, head_dim=16)
        >>> plan = tensor_parallel_plan(layer)  # then: parallelize_module(layer, mesh["tp"], plan)
        >>> type(plan["o_proj"]).__name__
        'RowwiseParallel'
    """
    if not isinstance(layer, Mixer | Attention):
        raise ValueError(f"layer: expected a layer of flash_delta.layers, got {type(layer).__name__}")
    if (updates := getattr(layer, "num_householder", 1)) > 1:
        raise ValueError(f"layer: expected one with num_householder = 1, got {type(layer).__name__} with {updates}")
    plan: dict[str, ParallelStyle] = {"": _Laid(Shard(0))}
    for name, module in layer.named_children():
        if isinstance(module, nn.Sequential):  # the first of two matrices is for all heads
            plan[f"{name}.1"] = ColwiseParallel()
        elif isinstance(module, nn.Linear):
            plan[name] = RowwiseParallel() if name == "o_proj" else ColwiseParallel()
        else:  # a norm is the same for all heads
            plan[name] = _Laid(Shard(0) if isinstance(module, ShortConvolution) else Replicate())
    return plan


class _Laid(ParallelStyle):
    """Splits a module's own parameters over ranks, or copies them. The module computes with its rank's part."""

    def __init__(self, placement: Shard | Replicate):
        super().__init__()
        self.placement = placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, Mixer | Attention):
            _check_heads(module, device_mesh.size())
        for name, parameter in list(module.named_parameters(recurse=False)):
            laid = nn.Parameter(distribute_tensor(parameter.detach(), device_mesh, [self.placement]))
            laid.requires_grad_(parameter.requires_grad)
            vars(laid).update(vars(parameter))  # copies the mark `_no_weight_decay`
            module.register_parameter(name, laid)
        return module


def _check_heads(layer: Mixer | Attention, ranks: int) -> None:
    queries, keys = layer.q_proj.out_features, layer.k_proj.out_features
    heads = keys // (layer.head_dim if isinstance(layer, Attention) else layer.head_k_dim)
    if heads % ranks:
        name = "num_kv_heads" if keys < queries else "num_heads"
        raise ValueError(f"{name}: expected a multiple of the {ranks} ranks, got {heads}")
