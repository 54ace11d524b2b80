"""The output norm of Qwen's layer where vLLM has no method that holds it, as in 0.26.

There a layer's operator returns before the norm, which is launches of its own, and copies the gates for it. vLLM has
another method of that operator, for AMD GPUs, which is given whole projections. On other GPUs it is free. So here the
layer calls that one, and the norm is in our call.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

METHODS = {  # of such a class, with their parameters
    "forward_cuda": ("self", "hidden_states"),
    "_forward_core_rocm": ("self", "qkvz", "ba", "z_out", "core_attn_out"),
    "_output_projection": ("self", "core_attn_out", "z"),
}


def is_packed(cls: type) -> bool:
    """Whether the norm can be had in this way."""
    known = all(_parameters(getattr(cls, name, None)) == names for name, names in METHODS.items())
    return known and not hasattr(cls, "_forward_core_fused_norm") and torch.version.hip is None


def _parameters(method: Any) -> tuple[str, ...]:
    code = getattr(method, "__code__", None)
    return code.co_varnames[: code.co_argcount] if code else ()


def pack(cls: type, core_with_norm: Callable[..., None], instead: Callable[[Callable, Callable], Callable]) -> None:
    """
    Args:
        core_with_norm: runs what lies between the projections; its first argument is what does it otherwise.
        instead: makes a method from vLLM's and ours.
    """
    theirs, encode = cls.forward_cuda, import_module(cls.__module__)._encode_layer_name

    def forward_cuda(self: Any, hidden_states: Tensor) -> Tensor:
        """Nothing here runs in a step: vLLM compiles it."""
        if self.gqa_interleaved_layout:  # of Qwen3-Next
            return theirs(self, hidden_states)
        qkvz, ba = self.in_proj_qkvz(hidden_states)[0], self.in_proj_ba(hidden_states)[0]
        # Zeros, since nobody writes the rows of padding.
        out = qkvz.new_zeros(qkvz.shape[0], self.num_v_heads // self.tp_size, self.head_v_dim)
        unused = qkvz.new_empty(1)
        torch.ops.vllm.qwen_gdn_attention_core(qkvz, ba, unused, out, encode(self.prefix), True)
        return self.out_proj(out.flatten(1))[0]

    def core(_: Callable, module: Any, qkvz: Tensor, ba: Tensor, z_out: Tensor, core_attn_out: Tensor) -> None:
        values = core_attn_out.shape[1] * core_attn_out.shape[2]
        mixed_qkv, gate = qkvz.split_with_sizes([qkvz.shape[1] - values, values], 1)
        b, a = module.split_ba(ba)
        core_with_norm(_own, module, mixed_qkv, b, a, gate.view(core_attn_out.shape), core_attn_out)

    cls.forward_cuda, cls._forward_core_rocm = forward_cuda, instead(cls._forward_core_rocm, core)


def _own(module: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, gate: Tensor, out: Tensor) -> None:
    """vLLM's own code, of a layer that was declined."""
    module._forward_core(mixed_qkv, b.contiguous(), a.contiguous(), out)
    out.copy_(module.norm(out.flatten(0, 1), gate.flatten(0, 1)).view(out.shape))
