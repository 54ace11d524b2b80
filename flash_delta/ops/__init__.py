"""The public ops: PyTorch in, PyTorch out."""

from collections.abc import Callable
from inspect import signature, unwrap
from typing import Any

from flash_delta.ops._backend import Explain, Explanation
from flash_delta.ops._compilation import forbid_compilation
from flash_delta.ops.comba import chunk_comba
from flash_delta.ops.delta_rule import (
    chunk_delta_rule,
    chunk_gated_delta_product,
    fused_recurrent_gated_delta_product,
)
from flash_delta.ops.gate import (
    erase_norm,
    fused_gdn_gate,
    fused_kda_gate,
    guard_erase,
    naive_gdn_gate,
    naive_kda_gate,
    naive_kda_lowerbound_gate,
)
from flash_delta.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from flash_delta.ops.gdn2 import chunk_gdn2, fused_recurrent_gdn2
from flash_delta.ops.kda import chunk_kda, fused_recurrent_kda
from flash_delta.ops.mixer import Layout, Place, mix
from flash_delta.ops.serving import (
    decode_gated_delta_product,
    decode_gated_delta_rule,
    decode_gdn2,
    decode_kda,
    prefill_gated_delta_product,
    prefill_gated_delta_rule,
    prefill_gdn2,
    prefill_kda,
)
from flash_delta.ops.simple_gla import chunk_simple_gla

__all__ = [
    "Explanation",
    "Layout",
    "Place",
    "chunk_comba",
    "chunk_delta_rule",
    "chunk_gated_delta_product",
    "chunk_gated_delta_rule",
    "chunk_gdn2",
    "chunk_kda",
    "chunk_simple_gla",
    "decode_gated_delta_product",
    "decode_gated_delta_rule",
    "decode_gdn2",
    "decode_kda",
    "erase_norm",
    "explain",
    "forbid_compilation",
    "fused_gdn_gate",
    "fused_kda_gate",
    "fused_recurrent_gated_delta_product",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn2",
    "fused_recurrent_kda",
    "guard_erase",
    "mix",
    "naive_gdn_gate",
    "naive_kda_gate",
    "naive_kda_lowerbound_gate",
    "prefill_gated_delta_product",
    "prefill_gated_delta_rule",
    "prefill_gdn2",
    "prefill_kda",
]


def explain(
    op: Callable[..., Any], /, *args: Any, backend: str | None = None, launches: bool = False, **kwargs: Any
) -> Explanation:  # fmt: skip
    """Tell which backend the call ``op(*args, **kwargs)`` would take, and why not the others. The call does not run.

    The arguments are checked as in a real call. Tensors may be on the meta device. To see a line for each backend,
    print the result: ``print(explain(chunk_kda, q, k, v, g, beta))``.

    Args:
        op: one of the delta rule ops of this module: ``chunk_*``, ``fused_recurrent_*``, ``decode_*`` or ``prefill_*``.
        backend: as given to the op. Default None.
        launches: also tell which kernels the call would launch. Tensors on the meta device then count as on the current
            GPU, if there is one. Default False.
        args: the op's arguments.
        kwargs: the op's arguments by name.

    Returns:
        An :class:`Explanation`. Its ``backend`` is the name, or None if the call would be refused. Its ``reasons`` has
        a reason for each backend. Its ``problem`` describes the call. Its ``launches`` has a line for each kernel of
        "forward", "backward", "decode" or "prefill": the grid and the numbers of its tile. The backward pass is that of
        most calls: nobody uses the final states. A backend that launches PyTorch's kernels has no such lines.

    Raises:
        ValueError: as the op, for arguments that no backend takes; and if ``op`` is none of these.

    Example:
        >>> import torch
        >>> from flash_delta import chunk_delta_rule, explain
        >>> x = torch.randn(1, 64, 2, 32)
        >>> explanation = explain(chunk_delta_rule, x, x, x, torch.rand(1, 64, 2))
        >>> explanation.backend
        'torch'
    """
    name = getattr(op, "__name__", repr(op))
    if globals().get(name) is not unwrap(op) or not {"q", "backend"} <= signature(op).parameters.keys():
        raise ValueError(f"explain: op: expected one of the delta rule ops of flash_delta, got {name}")
    return op(*args, backend=Explain(backend, launches), **kwargs)
