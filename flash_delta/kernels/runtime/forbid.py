"""A switch that makes it an error to compile a kernel, and the error's message."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor
from triton import knobs

from flash_delta.kernels.runtime.compile_key import Key, TensorLayout
from flash_delta.kernels.runtime.plan import Layout
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
        yield from _unlike_tensors(name, a, b, t)


def _unlike_tensors(
    name: str, a: TensorLayout | None, b: TensorLayout | None, t: Tensor | Layout | None
) -> Iterator[str]:  # fmt: skip
    """What distinguishes two tensors, in what kernels are compiled for. ``t``: the first one."""
    if a is None or b is None:
        if a is not b:
            yield f"{name} is {'None' if a is None else 'given'}"
        return
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
    """What distinguishes a planned call from the most similar ``known`` one. If nothing else does, it is sizes: a step
    may be compiled for one token, or for the strides of a state."""
    calls = [call for call in known if call.planner is new.planner]
    if not calls:
        return "nothing of its kind was compiled before"
    nearest = min(calls, key=lambda call: len(list(_unlike_calls(new, call))))
    return ", ".join(_unlike_calls(new, nearest)) or ", ".join(_unlike_sizes(new, nearest))


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
    for name, a, b in _pairs(new, old):
        yield from _unlike_tensors(name, _compiled_for(a), _compiled_for(b), a)


def _unlike_sizes(new: PlannedCall, old: PlannedCall) -> Iterator[str]:
    for name, a, b in _pairs(new, old):
        if a is not None and (a.shape, a.strides) != (b.shape, b.strides):
            was = f"{list(b.shape)} and {list(b.strides)}"
            yield f"{name} has shape {list(a.shape)} and strides {list(a.strides)}, compiled was {was}"


def _pairs(new: PlannedCall, old: PlannedCall) -> Iterator[tuple[str, Layout | None, Layout | None]]:
    for group, before in zip(new.layouts, old.layouts, strict=True):
        yield from zip(group._fields, group, before, strict=True)


def _compiled_for(t: Layout | None) -> TensorLayout | None:
    """What Triton compiles for."""
    if t is None:
        return None
    return TensorLayout(t.dtype, t.offset == 0, tuple([(s % 16 == 0, s == 1, s < 2**31) for s in t.strides]))
