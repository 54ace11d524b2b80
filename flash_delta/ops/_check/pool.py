"""Checks of pools of states and of windows, except their shapes."""

from torch import Tensor

from flash_delta.ops._check.options import refuse
from flash_delta.ops._check.rule import check_kind
from flash_delta.ops._transforms import is_traced
from flash_delta.problem import Problem


def check_pool(p: Problem, name: str, pool: Tensor, slots: int = 0) -> None:
    """Check a pool, except its shape. ``slots``: its axis of slots."""
    check_kind(p.op, name, pool, p.device)
    check_strides(p.op, name, pool, slots)


def check_strides(op: str, name: str, pool: Tensor, slots: int = 0) -> None:
    """Check the strides of a pool. ``slots``: its axis of slots."""
    axes = list(zip(pool.shape, pool.stride(), strict=True))
    if any(size > 1 and stride == 0 for size, stride in axes):
        refuse(op, name, "no stride of 0 (slots have numbers of their own)", f"strides {list(pool.stride())}")
    if sum((size - 1) * stride for size, stride in axes[slots + 1 :]) >= 2**31:
        refuse(op, name, "every slot to span fewer than 2^31 numbers", f"strides {list(pool.stride())}")


def is_plain(pool: Tensor) -> bool:
    """Whether a copy engine can describe it."""
    (slots, *sizes), (apart, *strides) = pool.shape, pool.stride()
    expected = 1  # as torch does, ignore the stride of an axis of size 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    apart = 0 if slots == 1 else apart * pool.element_size()
    begins = 0 if is_traced(pool) else pool.data_ptr()
    return slots > 0 and apart % 16 == 0 and begins % 16 == 0
