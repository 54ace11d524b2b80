"""Kernel backends: a folder each, with ``unsupported``, ``forward``, ``backward`` and ``step``."""


def require_triton() -> None:
    """Raises ModuleNotFoundError unless there is a Triton that the kernels were compiled and tested under."""
    import triton

    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 6):
        raise ModuleNotFoundError(f"triton >= 3.6 is needed, {triton.__version__} is installed", name="triton >= 3.6")
