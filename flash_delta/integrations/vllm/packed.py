"""Puts the output norm of Qwen's layer into our call, for versions of vLLM without a method that has it, such as 0.26.

In these versions a layer's operator returns before the norm. The norm then needs launches of its own, and copies of the
gates. The operator also has a method for AMD GPUs, which gets whole projections. On other GPUs vLLM does not use it. So
here the layer calls this method, and we replace it.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

METHODS = {  # methods of such a class, with their parameters
    "forward_cuda": ("self", "hidden_states"),
    "_forward_core_rocm": ("self", "qkvz", "ba", "z_out", "core_attn_out"),
    "_output_projection": ("self", "core_attn_out", "z"),
}


def is_packed(cls: type) -> bool:
    """Whether the norm of this class can be put into our call in this way."""
    known = all(_parameters(getattr(cls, name, None)) == names for name, names in METHODS.items())
    return known and not hasattr(cls, "_forward_core_fused_norm") and torch.version.hip is None


def _parameters(method: Any) -> tuple[str, ...]:
    code = getattr(method, "__code__", None)
    return code.co_varnames[: code.co_argcount] if code else ()


def pack(cls: type, core_with_norm: Callable[..., None], instead: Callable[[Callable, Callable], Callable]) -> None:
    """Replaces two methods of the class, so that our call includes the norm.

    Args:
        core_with_norm: runs a layer between its projections. Its first argument is the function that does so if the
            ops do not take the layer.
        instead: makes a method from vLLM's and ours.
    """
    theirs, encode = cls.forward_cuda, import_module(cls.__module__)._encode_layer_name

    def forward_cuda(self: Any, hidden_states: Tensor) -> Tensor:
        """vLLM compiles this, so its Python does not run in every step."""
        if self.gqa_interleaved_layout:  # as in Qwen3-Next
            return theirs(self, hidden_states)
        qkvz, ba = self.in_proj_qkvz(hidden_states)[0], self.in_proj_ba(hidden_states)[0]
        # Zeros, because rows of padding are not written.
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
    """vLLM's own code, for a layer that our ops do not take."""
    module._forward_core(mixed_qkv, b.contiguous(), a.contiguous(), out)
    out.copy_(module.norm(out.flatten(0, 1), gate.flatten(0, 1)).view(out.shape))
