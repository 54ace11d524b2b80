"""Kernel backends: a folder each, with ``unsupported``, ``forward``, ``backward`` and ``step``."""

import warnings
from functools import cache

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
