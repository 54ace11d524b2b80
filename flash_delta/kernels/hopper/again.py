"""How the loop is launched: as ``triton/launcher.py`` does it, but with descriptors for the copy engine.

Triton's launcher makes every descriptor anew in each launch. Here one is known by its address: what it describes is the
launch's own.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.driver import driver

from flash_delta.kernels.hopper.names import either
from flash_delta.kernels.triton.launcher import Call, compiled_as

KEPT = 8  # descriptors of one argument of one launch; each takes 128 bytes


class Plan(NamedTuple):
    """One launch."""

    grid: tuple[int, int]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]  # the parameters behind them


class Place(NamedTuple):
    """Of an argument that changes from call to call."""

    at: int
    tensor: int  # which one of the call's
    describe: Callable[[int], Any] | None  # from an address, what is handed over in its place


class Step(NamedTuple):
    """A launch as the driver takes it, but for the addresses. It holds no tensor."""

    run: Any
    grid: tuple[int, int, int]
    function: int
    metadata: Any
    arguments: list[Any]
    places: tuple[Place, ...]

    def launch(self, stream: int, starts: list[int]) -> None:
        """``starts``: the addresses of all tensors of the call."""
        arguments = self.arguments.copy()
        for at, tensor, describe in self.places:
            arguments[at] = starts[tensor] if describe is None else describe(starts[tensor])
        self.run(*self.grid, stream, self.function, self.metadata, None, None, None, *arguments)


def launch(c: Call, kernel: Any, plans: Callable[[], Iterable[Plan]], options: dict[str, Any]) -> None:
    """Of the ``plans`` there is one, but while compiling."""
    for plan in plans():
        name = (id(kernel), c.shape.key, *plan.constants.values())
        if c.steps is not None:
            c.steps.append(_step(compiled_as(name), (*plan.grid, 1)[:3], plan, c.tensors))
        elif c.compiling is not None:
            c.compiling[name] = kernel.warmup(*plan.arguments, grid=plan.grid, **plan.constants, **options)
        else:
            kernel[plan.grid](*plan.arguments, **plan.constants, **options)


def _step(compiled: Any, grid: tuple[int, int, int], plan: Plan, tensors: tuple[Tensor | None, ...]) -> Step:
    """With descriptors taken apart, as the driver gets them: the kernel's launcher would do that each time."""
    signature: list[Any] = []
    arguments: list[Any] = []
    places: list[Place] = []
    described = iter(compiled.metadata.tensordesc_meta)
    values = (*plan.arguments, *plan.constants.values())
    for value, kind in zip(values, compiled.src.signature.values(), strict=True):
        if isinstance(value, TensorDescriptor):
            places.append(Place(len(arguments), _number(value.base, tensors), _describer(value, next(described))))
            rank = len(value.shape)
            signature += ["nvTmaDesc", *rank * ["i32"], *rank * ["i64"]]
            arguments += [None, *value.shape, *value.strides]
            continue
        if isinstance(value, Tensor):
            places.append(Place(len(arguments), _number(value, tensors), None))
        signature.append(kind)
        arguments.append(None if isinstance(value, Tensor) else value)
    run = _launcher(compiled, tuple(signature))
    compiled.run  # noqa: B018  loads it
    return Step(run, grid, compiled.function, compiled.packed_metadata, arguments, tuple(places))


@lru_cache(None)
def _launcher(compiled: Any, signature: tuple[Any, ...]) -> Any:
    """Of all lengths: to make one takes milliseconds, though its C source is that of the kernel's own launcher."""
    source = SimpleNamespace(signature=dict(enumerate(signature)), constants={})
    return driver.active.launcher_cls(source, compiled.metadata._replace(tensordesc_meta=[]))


def _number(tensor: Tensor, tensors: tuple[Tensor | None, ...]) -> int:
    for number, t in enumerate(tensors):
        if t is tensor:
            return number
    raise ValueError(f"expected one of the call's tensors, got one of shape {list(tensor.shape)}")


def _describer(d: TensorDescriptor, meta: dict[str, Any]) -> Callable[[int], Any]:
    fill = either(driver.active.utils, "fill_tma_descriptor_tiled", "fill_tma_descriptor")
    element = meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
    shape = meta["block_size"], d.shape, d.strides
    return lru_cache(KEPT)(lambda address: fill(address, *element, *shape, 0))
