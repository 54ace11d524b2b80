"""Checks of calls that round states to int8, and of calls that restore them."""

from typing import NamedTuple

import torch
from torch import Tensor

from flash_delta.ops._check.options import refuse
from flash_delta.ops._check.pool import check_strides
from flash_delta.ops._check.rule import INDEX_DTYPES, check_kind, check_shape
from flash_delta.ops.serving.around import STORED
from flash_delta.problem import Int8Problem, Resting, needs_gradient

SCALES = (torch.float32, torch.bfloat16)
NAMES = ("state_pool", "store.states", "store.scale", "read_indices", "write_indices")


class Int8Options(NamedTuple):
    null_slot: int | None
    restores: bool


def describe_resting(x: Resting, options: Int8Options) -> Int8Problem:
    """Check a call and describe it. Raises ValueError naming the argument, what was expected and what came."""
    op = "dequantize_states" if options.restores else "quantize_states"
    pool, layers = x.state_pool, ("layers",) if isinstance(x.state_pool, Tensor) and x.state_pool.ndim == 5 else ()
    *before, _, HV, rows, columns = check_shape(op, "state_pool", pool, *layers, "slots", "HV", "rows", "columns")
    if 0 in (*before, HV, rows, columns):
        refuse(op, "state_pool", "no axis of size 0, except that of slots", f"shape {list(pool.shape)}")
    *_, stored, _, _, _ = check_shape(op, "store.states", x.states, *before, "slots", HV, rows, columns)
    axis = _check_scale(op, x.scale, (*before, stored, HV), rows, columns)
    (N,) = check_shape(op, "read_indices", x.read_indices, "N")
    check_shape(op, "write_indices", x.write_indices, N)
    for name, t, dtypes in zip(NAMES, x, (STORED, (torch.int8,), SCALES, INDEX_DTYPES, INDEX_DTYPES), strict=True):
        check_kind(op, name, t, pool.device, dtypes, like="state_pool")
        if needs_gradient((t,)):
            refuse(
                op, name, "a tensor without gradient (call it under torch.no_grad())", "one that requires a gradient"
            )
    for name, t in zip(NAMES[:3], x, strict=False):
        check_strides(op, name, t, len(layers))
    null_slot = -1 if options.null_slot is None else options.null_slot
    return Int8Problem(op, options.restores, rows, columns, axis, pool.dtype, pool.device, null_slot)


def _check_scale(op: str, scale: Tensor, before: tuple[int, ...], rows: int, columns: int) -> int:
    """Check the scale. Returns the axis of a state along which numbers share one."""
    by_row, by_column = (*before, rows, 1), (*before, 1, columns)
    shape = tuple(scale.shape) if isinstance(scale, Tensor) else None
    if shape not in (by_row, by_column):
        wanted = f"a tensor {list(by_row)} (a scale per row) or {list(by_column)} (a scale per column)"
        refuse(op, "store.scale", wanted, type(scale).__name__ if shape is None else f"shape {list(shape)}")
    if scale.dtype == torch.float16:
        refuse(op, "store.scale", "torch.float32 or torch.bfloat16 (float16 rounds small scales to 0)", scale.dtype)
    return -1 if shape == by_row else -2
