"""Splits a mixer's heads over the ranks of a group, by a plan for `parallelize_module`."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from flash_delta.layers.gated_delta_net import GatedDeltaNet
from flash_delta.layers.kimi_delta_attention import KimiDeltaAttention


def tensor_parallel_plan(layer: GatedDeltaNet | KimiDeltaAttention) -> dict[str, ParallelStyle]:
    """The plan with which `parallelize_module` lets each rank of a group compute some of a layer's heads.

    The number of key heads has to be a multiple of the number of ranks. Every rank has the layer's whole input and
    output, and the states of its own heads. You may apply FSDP2 afterwards, over another dimension of the mesh.

    Args:
        layer: the layer that will be parallelized.

    Returns:
        A style for each of the layer's modules. The style for "" is for the layer's own parameters.

    Raises:
        ValueError: for another layer; in `parallelize_module`, if heads do not divide.

    Example:
        >>> from flash_delta.layers import GatedDeltaNet, tensor_parallel_plan
        >>> layer = GatedDeltaNet(hidden_size=64, num_heads=2, head_dim=16)
        >>> plan = tensor_parallel_plan(layer)  # then: parallelize_module(layer, mesh["tp"], plan)
        >>> type(plan["o_proj"]).__name__
        'RowwiseParallel'
    """
    if not isinstance(layer, GatedDeltaNet | KimiDeltaAttention):
        raise ValueError(f"layer: expected a GatedDeltaNet or KimiDeltaAttention, got {type(layer).__name__}")
    split = ["q_proj", "k_proj", "v_proj", "b_proj"]
    if isinstance(layer, KimiDeltaAttention):  # the first of the two matrices is for all heads
        split += ["f_proj.1", "g_proj.1"]
    else:
        split += ["a_proj", "g_proj"] if layer.use_gate else ["a_proj"]
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in split}
    plan |= {"o_proj": RowwiseParallel(), "o_norm": _Laid(Replicate()), "": _Laid(Shard(0))}
    if layer.use_short_conv:
        plan |= {f"{name}_conv1d": _Laid(Shard(0)) for name in "qkv"}
    return plan


class _Laid(ParallelStyle):
    """Splits a module's own parameters over ranks, or copies them. The module computes with its rank's part."""

    def __init__(self, placement: Shard | Replicate):
        super().__init__()
        self.placement = placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        heads, ranks = getattr(module, "num_heads", device_mesh.size()), device_mesh.size()
        if heads % ranks:
            raise ValueError(f"num_heads: expected a multiple of the {ranks} ranks, got {heads}")
        for name, parameter in list(module.named_parameters(recurse=False)):
            laid = nn.Parameter(distribute_tensor(parameter.detach(), device_mesh, [self.placement]))
            laid.requires_grad_(parameter.requires_grad)
            vars(laid).update(vars(parameter))  # copies the mark `_no_weight_decay`
            module.register_parameter(name, laid)
        return module
