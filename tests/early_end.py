"""Compilation that ends early, for tests that look at what is there by then."""

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

SKIPPED = {"ttgir": ("make_llir", "make_ptx"), "llir": ("make_ptx",)}


@contextmanager
def compiled_to(stage):
    """Leaves the stages after "ttgir" or "llir" out, which take most of the time. There is no machine code."""
    from triton.backends.nvidia.compiler import CUDABackend

    def nothing(self, source, metadata, *rest):
        for name, none in (("name", "none"), ("shared", 0)):
            metadata.setdefault(name, none)
        return ""

    with ExitStack() as stack:
        for method in SKIPPED[stage]:
            stack.enter_context(patch.object(CUDABackend, method, nothing))
        stack.enter_context(patch.object(CUDABackend, "make_cubin", lambda *given: b""))
        yield
