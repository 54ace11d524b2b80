"""Kernel backends: a folder each, with ``unsupported``, ``forward``, ``backward`` and ``step``."""

import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

TRITON = (3, 6), (3, 9)  # the oldest and the newest that kernels are compiled and tested under


@cache
def require_triton() -> None:
    """Raises ModuleNotFoundError without Triton, and for one that is too old. Warns once of one that is too new."""
    import triton

    oldest, newest = (".".join(map(str, version)) for version in TRITON)
    installed = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if installed < TRITON[0]:
        name = f"triton >= {oldest}"
        raise ModuleNotFoundError(f"{name} is needed, {triton.__version__} is installed", name=name)
    if installed > TRITON[1]:
        warnings.warn(
            f"triton {triton.__version__} is installed; flash_delta was tested under {oldest} to {newest}",
            RuntimeWarning,
            stacklevel=2,
        )


def modules_of(package: str) -> Callable[[str], ModuleType]:
    """Returns a package's ``__getattr__``, which imports a module of it when it is first used. A call needs few of all
    kernels, and Triton takes milliseconds for a module with kernels."""

    def load(name: str) -> ModuleType:
        if find_spec(f"{package}.{name}") is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_module(f"{package}.{name}")

    return load
