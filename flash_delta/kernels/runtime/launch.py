"""Launches kernels. The first call of a kind compiles all that it can ever need. Later calls take little host time.

Triton looks at every argument of every launch, which takes 50 us of host time for a kernel with forty arguments. The
compiled code, and all arguments except addresses, depend on less: dtypes, strides and alignments of the caller's
tensors, and sizes and flags of the problem. `make_call` looks at these once per call of an op, and finds what earlier
calls like it have left.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from itertools import accumulate
from operator import is_
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime._allocation import NullAllocator, _allocator

from flash_delta.kernels.runtime import fastcall
from flash_delta.kernels.runtime.calls import AnyCall, Call, keep, profiled
from flash_delta.kernels.runtime.compile_key import key_numbers
from flash_delta.kernels.runtime.cuda_driver import Replay, ensure_context, make_step
from flash_delta.kernels.runtime.forbid import Refused, difference
from flash_delta.kernels.runtime.plan import Draft, Step
from flash_delta.kernels.runtime.profiling import tell
from flash_delta.kernels.runtime.together import compile_together
from flash_delta.kernels.runtime.turns import taking_turns
from flash_delta.problem import Around, Inputs, KnownCall, Problem, Slots, addresses

Kernels = Callable[[Call], None]


_compiled: dict[tuple, Any] = {}  # by `_name`
_ready: set[int] = set()
compiling = RLock()


def run(
    c: Call,
    kernels: Kernels,
    *made: Tensor | None,
    left: tuple[Tensor | None, ...] = (),
    spare: tuple[Tensor | None, ...] = (),
    later: Callable[[], tuple[Call, Kernels]] | None = None,
) -> None:
    """Calls ``kernels``, which launches, or repeats the launches of an earlier call of this shape.

    Before the first launch, all kernels that the call can ever launch are compiled in parallel, together with those of
    a ``later`` call. ``made``: contiguous results of this call; a workspace is given as its buffer. ``spare``:
    contiguous tensors that only this call's kernels use. ``left``: tensors that the forward pass made for this call.
    """
    # While somebody instruments kernels, Triton compiles at each launch, and nothing is kept here.
    if c.shape.key not in _ready and (c.direct or (c.p.device.type == "cuda" and not profiled())):
        _compile((c, kernels), *(() if later is None else (later(),)))
    if not c.direct:
        with _explained(c):
            return kernels(c)
    if c.shape.replay is None:
        ensure_context(c.p.device)
        given, steps = _distinct((*c.x, *c.more)), []
        count = len(c.x)
        kernels(c._replace(x=c.x._make(given[:count]), more=tuple(given[count:]), steps=steps))
        *places, size = accumulate((0 if t is None else -(-t.nbytes // 256) * 256 for t in spare), initial=0)
        c.shape.replay = Replay(steps, (*given, *left, *made, *spare), (size, tuple(places)))
        c.shape.makes = tuple([None if t is None else (t.dtype, *t.shape) for t in made])
    c.shape.replay.launch(c.p.device, c.x, c.more, left, made, spare, own=True)


def _compile(*calls: tuple[Call, Kernels]) -> None:
    """Compiles everything that calls with these keys can ever launch, in parallel. If several threads make such a
    call first, one of them compiles, and the others wait."""
    with compiling:
        if all(c.shape.key in _ready for c, _ in calls):
            return
        wanted: dict[tuple, partial] = {}
        for c, kernels in calls:
            kernels(c._replace(direct=False, compiling=wanted))
        with _explained(calls[0][0]):
            _compiled.update(compile_all(wanted))
        _ready.update(c.shape.key for c, _ in calls)


def compile_all(wanted: dict[tuple, partial]) -> dict[tuple, Any]:
    """Compiles kernels in parallel. The slowest ones come first."""
    names = sorted(wanted, key=lambda name: _size(wanted[name]), reverse=True)
    with taking_turns():
        found = compile_together([wanted[name] for name in names], beside=_load)
    return dict(zip(names, found, strict=True))


def _load() -> None:
    """Loads the C module, which takes as long as to compile a small kernel."""
    if fastcall.API is not None:
        fastcall.load()


def _size(compile_it: partial) -> tuple[int, int]:
    """A rough measure of how long LLVM and ptxas take: the number of descriptors, and then the length of the source.
    Only hand-written kernels have descriptors, and a form of a kernel with more of them has more code
    (docs/notes/2026-11-25-first-call.md)."""
    described = sum(isinstance(value, TensorDescriptor) for value in compile_it.args)
    return described, len(compile_it.func.__self__.src)


def remember(
    c: Call, given: Iterable[Tensor | None], known: KnownCall | None = None, name: tuple | None = None
) -> None:
    """Remembers a call for `again`, if kernels got the ``given`` tensors and no copies. ``name``: a second name, which
    is faster to look up than that of `make_call`."""
    got, given = (*c.x, *c.more), tuple(given)
    got = got[: len(given)]
    c.shape.replayable = all(map(is_, got, given)) or addresses(got) == addresses(given)
    if name is not None and c.shape.replayable:
        keep(known, name, c.shape)


def again(
    known: KnownCall | None, name: tuple, *groups: tuple[Tensor | None, ...], made: tuple[Tensor | None, ...] = ()
) -> tuple[Tensor | None, ...] | None:
    """Repeats the launches of `run` for an earlier call with the same ``known`` and ``name``.

    Returns the ``made`` tensors, which are new unless given, or None if there was no such call. ``groups``: the inputs,
    other tensors from outside, and tensors that were ``left``. It makes few objects, because they take much of a short
    call's time: a `Call` 1.3 us, a tensor 2 us. So all spare tensors are one allocation.
    """
    shape = None if known is None else known.launches.get(name)
    if shape is None or not shape.replayable or shape.replay is None or profiled():
        return None
    device = known.problem.device
    made = made or tuple([t and torch.empty(*t[1:], dtype=t[0], device=device) for t in shape.makes])
    if several_devices() and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            shape.replay.launch(device, *groups, made)
    else:
        shape.replay.launch(device, *groups, made)
    return made


def output_of(p: Problem, s: Slots) -> Tensor:
    """The tensor for a serving call's output. For launches it counts as the call's own, even if given."""
    return torch.empty(p.B, p.T, p.HV, p.V, dtype=p.dtype, device=p.device) if s.out is None else s.out


def remember_served(call: Call, x: Inputs, known: KnownCall | None, kind: tuple) -> None:
    """Remembers a serving call, so that a known one only launches."""
    remember(call, x)
    if known is not None and call.shape.replayable:
        known.again = partial(_served_again, kind)


def _served_again(kind: tuple, known: KnownCall, x: Inputs, s: Slots, around: Around) -> Tensor | None:
    o = output_of(known.problem, s)
    return o if again(known, kind, x, s, around, made=(o,)) else None


@contextmanager
def _explained(c: Call) -> Iterator[None]:
    """Adds to the error of a refused compilation (forbid.py) what is new in the call."""
    try:
        yield
    except Refused as refused:
        keys = list(key_numbers)
        serving = isinstance(c.p, Problem) and c.p.pools is not None
        others = (*Slots._fields, *Around._fields) if serving else ("do", "dfinal")
        tensors = dict(zip((*c.x._fields, *others), (*c.x, *c.more), strict=False))
        why = difference(keys[c.shape.key], (keys[number] for number in _ready), tensors)
        raise RuntimeError(
            f"{c.p.op}: kernel {refused} would have to be compiled, which forbid_compilation() forbids: {why}"
        ) from None


@lru_cache(None)
def several_devices() -> bool:
    return torch.cuda.device_count() > 1


def launch(c: AnyCall, step: Step) -> None:
    """Puts a step into a plan or, in a call that is not planned, launches it. Then its arguments are tensors."""
    if isinstance(c, Draft):
        c.steps.append(step)
    elif c.compiling is not None:
        compile_it = partial(
            step.kernel.warmup, *step.arguments, grid=step.grid, **step.constants, **options_of(step)
        )  # fmt: skip
        c.compiling[_name(c, step)] = compile_it
    elif 0 in step.grid:
        return
    elif c.steps is not None:
        values = *step.arguments, *step.constants.values()
        c.steps.append(make_step(compiled_as(_name(c, step)), step.grid, values))
    else:
        launch_by_triton(step, step.arguments)


def launch_by_triton(step: Step, arguments: tuple[Any, ...]) -> None:
    """``arguments``: those of the step, with tensors."""
    step.kernel.launch_metadata = tell
    with memory_for_descriptors() if step.tile.tma else nullcontext():
        step.kernel[step.grid](*arguments, **step.constants, **options_of(step))


@contextmanager
def memory_for_descriptors() -> Iterator[None]:
    """A context in which Triton has an allocator. If the caller has set one, it is the caller's."""
    if not isinstance(_allocator.get(), NullAllocator):
        yield
        return
    before = _allocator.set(_scratch)
    try:
        yield
    finally:
        _allocator.reset(before)


def compiled_as(name: tuple) -> Any:
    """The compiled kernel that its launcher named so in ``Call.compiling``."""
    return _compiled[name]


def _name(c: Call, step: Step) -> tuple:
    """The name of a compiled kernel: what calls of a shape share, and what is specific to this launch."""
    return id(step.kernel), c.shape.key, step.tile, *step.constants.values()


def _distinct(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """The tensors as different objects. One may be both q and k in this call, and two tensors in the next."""
    found: dict[int, Tensor | None] = {}
    for number, t in enumerate(tensors):
        key = number if t is None else id(t)
        found[number if key in found else key] = t.detach() if t is not None and key in found else t
    return list(found.values())


def options_of(step: Step) -> dict[str, int | bool]:
    """Triton's options for a launch. AMD's compiler does not have the last two."""
    t = step.tile
    options = {"num_warps": t.warps, "num_stages": t.stages, "enable_fp_fusion": step.contracts}
    if t.registers is not None:
        options["maxnreg"] = t.registers
    if step.follows:
        options["launch_pdl"] = True
    return options


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Memory for descriptors."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
