"""Operations of Gluon whose names differ between Triton 3.6 and 3.9."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma


def either(place: object, new: str, old: str) -> object:
    return getattr(place, new) if hasattr(place, new) else getattr(place, old)


barrier = either(gl, "barrier", "thread_barrier")
reinterpret = either(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")
tma_load = either(tma, "async_load", "async_copy_global_to_shared")
tma_store = either(tma, "async_store", "async_copy_shared_to_global")
