"""A switch that makes it an error to compile a kernel, and the error's message."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor
from triton import knobs

from flash_delta.kernels.runtime.compile_key import Key
from flash_delta.problem import PACKAGE, Compiled, ElementwiseProblem, GateProblem, Pools, Problem, marked


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


class PlannedCall(NamedTuple):
    """A call as planners see it."""

    problem: Problem | ElementwiseProblem
    planner: Callable[..., Any]
    layouts: tuple[Any, ...]  # groups of `Layout`


def difference_of(new: PlannedCall, known: Iterable[PlannedCall]) -> str:
    """What distinguishes a planned call from the most similar ``known`` one."""
    unlike = [list(_unlike_calls(new, call)) for call in known if call.planner is new.planner]
    return ", ".join(min(unlike, key=len)) if unlike else "nothing of its kind was compiled before"


def _facts(p: Problem | ElementwiseProblem) -> dict[str, Any]:
    """What kernels are compiled for."""
    found = {name: getattr(p, name) for name in marked(type(p), Compiled)}
    if isinstance(p, Problem | GateProblem):
        found |= {"gate": p.gate.kind, "raw_gate": p.gate.raw, "bounded": p.gate.bound is not None}
    if isinstance(p, Problem) and p.pools is not None:
        found |= {name: getattr(p.pools, name) for name in marked(Pools, Compiled)}
    return found


def _unlike_calls(new: PlannedCall, old: PlannedCall) -> Iterator[str]:
    before = _facts(old.problem)
    for name, value in _facts(new.problem).items():
        if value != before.get(name):
            yield f"{name} is {value}, compiled was {before.get(name)}"
    for group, before in zip(new.layouts, old.layouts, strict=True):
        for name, a, b in zip(group._fields, group, before, strict=True):
            if a is None or b is None:
                if a is not b:
                    yield f"{name} is {'None' if a is None else 'given'}"
                continue
            if a.dtype != b.dtype:
                yield f"{name} is {a.dtype}, compiled was {b.dtype}"
            if (a.offset == 0) != (b.offset == 0):
                yield f"{name} starts at {'no' if a.offset else 'a'} multiple of 16 bytes"
            if [(s % 16 == 0, s == 1) for s in a.strides] != [(s % 16 == 0, s == 1) for s in b.strides]:
                yield f"{name} has strides {list(a.strides)}, for which other code is compiled"
