"""A switch that makes it an error to compile a kernel, and the error's message."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from triton import knobs

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
    if isinstance(p, Problem):
        found |= {"reflects": p.most_beta > 1, "needs_grad": p.needs_grad, "disable_recompute": p.disable_recompute}
    return found


def _unlike_calls(new: PlannedCall, old: PlannedCall) -> Iterator[str]:
    before = _facts(old.problem)
    for name, value in _facts(new.problem).items():
        if value != before.get(name):
            yield f"{name} is {value}, compiled was {before.get(name)}"
    for name, a, b in _pairs(new, old):
        yield from _unlike_tensors(name, a, b)


def _unlike_sizes(new: PlannedCall, old: PlannedCall) -> Iterator[str]:
    for name, a, b in _pairs(new, old):
        if a is not None and (a.shape, a.strides) != (b.shape, b.strides):
            was = f"{list(b.shape)} and {list(b.strides)}"
            yield f"{name} has shape {list(a.shape)} and strides {list(a.strides)}, compiled was {was}"


def _pairs(new: PlannedCall, old: PlannedCall) -> Iterator[tuple[str, Layout | None, Layout | None]]:
    for group, before in zip(new.layouts, old.layouts, strict=True):
        yield from zip(group._fields, group, before, strict=True)


def _unlike_tensors(name: str, a: Layout | None, b: Layout | None) -> Iterator[str]:
    """What distinguishes two tensors, in what kernels are compiled for."""
    if a is None or b is None:
        if a is not b:
            yield f"{name} is {'None' if a is None else 'given'}"
        return
    if a.dtype != b.dtype:
        yield f"{name} is {a.dtype}, compiled was {b.dtype}"
    if (a.offset == 0) != (b.offset == 0):
        yield f"{name} starts at {'a' if a.offset == 0 else 'no'} multiple of 16 bytes"
    if _kinds(a.strides) != _kinds(b.strides):
        yield f"{name} has strides {list(a.strides)}, for which other code is compiled"


def _kinds(strides: tuple[int, ...]) -> list[tuple[bool, bool, bool]]:
    """What Triton compiles for."""
    return [(stride % 16 == 0, stride == 1, stride < 2**31) for stride in strides]
