"""Launches kernels as launch.py does, but with descriptors for the copy engine."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flash_delta.kernels.runtime.calls import Call
from flash_delta.kernels.runtime.cuda_driver import BoundStep, describe, make_step
from flash_delta.kernels.runtime.launch import compiled_as
from flash_delta.kernels.runtime.profiling import tell


class Descriptor(NamedTuple):
    """The parts of Triton's ``TensorDescriptor``. That class checks them, which takes 4 us. So it is made only if
    Triton compiles or launches."""

    base: Tensor
    shape: Sequence[int]
    strides: Sequence[int]
    block_shape: list[int]
    layout: Any


class DescribedPlan(NamedTuple):
    """One launch."""

    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]  # the parameters after descriptors and numbers


def launch_described(c: Call, kernel: Any, *plans: DescribedPlan, **more: int) -> None:
    """Launches all ``plans``. They may share descriptors. ``more``: options for the compiler."""
    options = {"num_warps": 4, "enable_fp_fusion": True, "launch_pdl": True, **more}
    described: dict[int, tuple] = {}
    for plan in plans:
        name = (id(kernel), c.shape.key, *plan.constants.values())
        if c.steps is not None:
            c.steps.append(bind(compiled_as(name), plan, described))
            continue
        arguments = [TensorDescriptor(*a) if isinstance(a, Descriptor) else a for a in plan.arguments]
        if c.compiling is not None:
            c.compiling[name] = partial(kernel.warmup, *arguments, grid=plan.grid, **plan.constants, **options)
        else:
            kernel.launch_metadata = tell
            kernel[plan.grid](*arguments, **plan.constants, **options)


def bind(compiled: Any, plan: DescribedPlan, described: dict[int, tuple]) -> BoundStep:
    """The launch of a plan. ``described``: descriptors that plans share, by their identity."""
    metas = iter(compiled.metadata.tensordesc_meta)
    values = [_described(a, next(metas), described) if type(a) is Descriptor else a for a in plan.arguments]
    return make_step(compiled, (*plan.grid, 1, 1)[:3], (*values, *plan.constants.values()))


def _described(d: Descriptor, meta: dict[str, Any], described: dict[int, tuple]) -> tuple[Any, ...]:
    if id(d) not in described:
        element = meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
        found = describe(d.base, d.shape, d.strides, meta["swizzle"], element, meta["block_size"])
        described[id(d)] = d, found  # keeping d alive keeps its id unique
    return described[id(d)][1]
