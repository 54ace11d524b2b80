"""Calls of the serving ops with tensors as servers have them, all zeros and all padding, for tests of warm-up."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

import flash_delta
from flash_delta.ops.serving import Convolution, OutputNorm

RAW = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
TAPS, PAGE = 4, 80  # numbers that a slot of a paged pool has too many
OPS = {
    "decode": {"gdn": flash_delta.decode_gated_delta_rule, "kda": flash_delta.decode_kda},
    "prefill": {"gdn": flash_delta.prefill_gated_delta_rule, "kda": flash_delta.prefill_kda},
}
Sizes = tuple[int, ...]  # H, HV, K, V


def example(form: str, rule: str, sizes: Sizes, rows: int, tokens: int, slots: int = 3, **options: Any):
    """An op and its arguments. ``form`` has the op's name, and what calls have in addition, as words."""
    words = set(form.split())
    (call,) = words & OPS.keys()
    return OPS[call][rule], arguments(words, rule, sizes, rows, tokens, slots, **options)


def arguments(
    words: set[str], rule: str, sizes: Sizes, rows: int, tokens: int, slots: int, dtype=torch.bfloat16, device="cpu",
    index=torch.int32, wide: int | None = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Without ``wide`` tensors are their own. With it they are slices of a projection that has so many outputs more."""
    H, HV, K, V = sizes
    new, prompts = partial(torch.zeros, device=device), "prefill" in words
    packed = prompts or "packed" in words
    B, T = (1, rows * tokens) if packed else (rows, tokens)
    shapes = ((H, K), (H, K), (HV, V), (HV, K) if rule == "kda" else (HV,), (HV,), (HV, V))
    widths = [shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes]
    if wide is None:
        q, k, v, g, beta, gate = (new(B, T, *shape, dtype=dtype) for shape in shapes)
    else:
        parts = new(B * T, sum(widths) + wide, dtype=dtype).split([*widths, wide], 1)
        q, k, v, g, beta, gate = (t.unflatten(1, s).unflatten(0, (B, T)) for t, s in zip(parts, shapes, strict=False))
    x = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "state_v_first": True}
    if "raw" in words:
        bias = new(HV * K if rule == "kda" else HV)
        x |= RAW | {"A_log": new(HV), "dt_bias": bias}
    x["state_pool"] = pool((slots, HV, V, K), "paged" in words, torch.float32, device)
    indices = partial(torch.full, fill_value=-1, dtype=index, device=device)
    x["read_indices"] = indices((rows,))
    if packed:
        x["cu_seqlens"] = torch.arange(rows + 1, dtype=index, device=device) * tokens
    x |= prefill_indices(words, rows, tokens, indices) if prompts else decode_indices(words, rows, tokens, indices)
    room = (5,) if "rows" in words else ()
    if "apart" in words:
        x["write_pool"] = new(slots, *room, HV, V, K, dtype=torch.bfloat16)
    if "conv" in words:
        D, rolling = 2 * H * K + HV * V, "rolling" in words
        window = TAPS - 1 + 3 * rolling if "paged" in words else TAPS + 3 * rolling
        windows = pool((slots, window, D), "paged" in words, dtype, device).mT
        windows = windows if "paged" in words else windows.contiguous()
        target = new(slots, *room, D, window, dtype=dtype) if "apart" in words else None
        x["convolution"] = Convolution(windows, new(D, TAPS), None if "paged" in words else new(D), target, rolling)
    if "norm" in words:
        x["output_norm"] = OutputNorm(gate, new(V))
    return x | options


def pool(shape: Sizes, paged: bool, dtype: torch.dtype, device: str) -> Tensor:
    slots, *inner = shape
    size = torch.Size(inner).numel()
    return torch.zeros(slots, size + PAGE * paged, dtype=dtype, device=device)[:, :size].unflatten(1, inner)


def decode_indices(words: set[str], rows: int, tokens: int, indices) -> dict[str, Any]:
    """``each``: a slot for every token."""
    x = {"write_indices": indices((rows, tokens) if "each" in words else (rows,))} if "reads" not in words else {}
    if "counted" in words:
        x |= {"read_indices": indices((rows, 5))[:, :3], "num_accepted_tokens": indices((rows,))}
    return x | ({"parent_idx": indices((rows, tokens))} if "tree" in words else {})


def prefill_indices(words: set[str], rows: int, tokens: int, indices) -> dict[str, Any]:
    x = {"write_indices": indices((rows,))} if "reads" not in words else {}
    if "fresh" in words:
        x["has_initial_state"] = indices((rows,)).bool()
    if "stride" in words:
        x |= {"checkpoint_indices": indices((rows, 1 + tokens // 64)), "checkpoint_every": 64}
    if "offset" in words:
        x |= {"checkpoint_indices": indices((rows,)), "checkpoint_offsets": indices((rows,))}
    return x
