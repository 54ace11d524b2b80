"""A switch that makes it an error to compile a kernel, and the error's message."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from triton import knobs

from flash_delta.kernels.runtime.compile_key import Key
from flash_delta.problem import PACKAGE


class Refused(Exception):
    """Says that a kernel would have to be compiled. The text is the kernel's name."""


_other: Any = None  # the previous hook


def forbid(yes: bool) -> bool:
    """Sets whether compilations are errors, in all threads. Returns the previous setting."""
    global _other
    before = knobs.runtime.jit_cache_hook is _refuse
    if yes and not before:
        _other, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, _refuse
    if before and not yes:
        knobs.runtime.jit_cache_hook = _other
    return before


def _refuse(*, fn: Any, **call: Any) -> Any:
    """Triton calls this before it compiles any kernel. Kernels of other libraries may be compiled."""
    if fn.module.startswith(f"{PACKAGE}."):
        raise Refused(fn.name)
    return None if _other is None else _other(fn=fn, **call)


def difference(new: Key, known: Iterable[Key], tensors: dict[str, Tensor | None]) -> str:
    """What distinguishes a call from the most similar ``known`` one."""
    unlike = [list(_unlike(new, key, tensors)) for key in known if key[0].kind == new[0].kind]
    return ", ".join(min(unlike, key=len)) if unlike else "nothing of its kind was compiled before"


def _unlike(new: Key, old: Key, tensors: dict[str, Tensor | None]) -> Iterator[str]:
    for name, a, b in zip(new[0]._fields, new[0], old[0], strict=True):
        if a != b:
            yield f"{name} is {a}, compiled was {b}"
    for (name, t), a, b in zip(tensors.items(), new[1], old[1], strict=True):
        if a is None or b is None:
            if a is not b:
                yield f"{name} is {'None' if a is None else 'given'}"
            continue
        if a.dtype != b.dtype:
            yield f"{name} is {a.dtype}, compiled was {b.dtype}"
        if a.aligned != b.aligned:
            yield f"{name} starts at {'a' if a.aligned else 'no'} multiple of 16 bytes"
        if a.strides != b.strides:
            yield f"{name} has strides {list(t.stride())}, for which other code is compiled"
