"""How the loop is launched: as ``triton/launcher.py`` does it, but with descriptors for the copy engine."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flash_delta.kernels.triton.cuda import Map, Pointer, Step, make_step
from flash_delta.kernels.triton.launcher import Call, compiled_as


class Plan(NamedTuple):
    """One launch."""

    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]  # the parameters behind them


def launch(c: Call, kernel: Any, plans: Callable[[], Iterable[Plan]], options: dict[str, Any]) -> None:
    """Of the ``plans`` there is one, but while compiling."""
    for plan in plans():
        name = (id(kernel), c.shape.key, *plan.constants.values())
        if c.steps is not None:
            c.steps.append(_step(compiled_as(name), plan, c.tensors))
        elif c.compiling is not None:
            c.compiling[name] = kernel.warmup(*plan.arguments, grid=plan.grid, **plan.constants, **options)
        else:
            kernel[plan.grid](*plan.arguments, **plan.constants, **options)


def _step(compiled: Any, plan: Plan, tensors: tuple[Tensor | None, ...]) -> Step:
    described = iter(compiled.metadata.tensordesc_meta)
    values: list[Any] = []
    for value in (*plan.arguments, *plan.constants.values()):
        if isinstance(value, TensorDescriptor):
            values.append(_map(value, _where(value.base, tensors), next(described)))
        else:
            values.append(_where(value, tensors) if isinstance(value, Tensor) else value)
    return make_step(compiled, (*plan.grid, 1)[:3], values)


def _where(tensor: Tensor, tensors: tuple[Tensor | None, ...]) -> Pointer:
    """One of the call's tensors, or where it lies in a workspace, which is bytes."""
    for number, t in enumerate(tensors):
        if t is tensor:
            return Pointer(number, 0)
    for number, t in enumerate(tensors):
        if t is not None and t.dtype == torch.uint8 and 0 <= (offset := tensor.data_ptr() - t.data_ptr()) < t.nbytes:
            return Pointer(number, offset)
    raise ValueError(f"expected one of the call's tensors, got one of shape {list(tensor.shape)}")


def _map(d: TensorDescriptor, at: Pointer, meta: dict[str, Any]) -> Map:
    element = meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
    return Map(at, meta["swizzle"], element, tuple(meta["block_size"]), tuple(d.shape), tuple(d.strides))
