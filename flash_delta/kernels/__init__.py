"""Kernel backends: a folder each, with ``unsupported``, ``forward``, ``backward`` and ``step``."""

OLDEST_TRITON = (3, 6)


def require_triton() -> None:
    """Raises ModuleNotFoundError unless there is a Triton that the kernels were compiled and tested under."""
    import triton

    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST_TRITON:
        wanted = f"triton >= {'.'.join(map(str, OLDEST_TRITON))}"
        raise ModuleNotFoundError(f"{wanted} is needed, {triton.__version__} is installed", name=wanted)
