"""Runs plans: compiles what is missing, makes memory, launches. The next call like it only makes memory and launches.

A planner takes a problem, the chip and groups of layouts, and returns a `Plan`. Compiled kernels are kept under names
that follow from the launch alone (`name_of`), so no rule says by hand which facts about a call matter for which kernel.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate, chain, repeat
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from flash_delta.kernels.runtime import fastcall
from flash_delta.kernels.runtime.calls import is_direct, keep, on, profiled
from flash_delta.kernels.runtime.chip import chip_of
from flash_delta.kernels.runtime.cuda_driver import BoundStep, Replay, ensure_context, kernel_of
from flash_delta.kernels.runtime.forbid import PlannedCall, Refused, difference_of
from flash_delta.kernels.runtime.launch import (
    compile_all,
    compiling,
    memory_for_descriptors,
    options_of,
    several_devices,
)
from flash_delta.kernels.runtime.plan import Layout, Memory, Plan, Step, layout_of, resolved, size_of
from flash_delta.kernels.runtime.profiling import tell
from flash_delta.problem import ElementwiseProblem, KnownCall, Problem

LIMIT = 2**31  # of numbers of 32 bits
Planner = Callable[..., Plan]
Group = tuple[Tensor | None, ...]  # a named tuple
Results = tuple[Tensor | None, ...]

compiled: dict[tuple, Any] = {}  # by device and `name_of`
calls_that_compiled: list[PlannedCall] = []  # for the error of `forbid_compilation`


def run(
    plan: Planner, p: Problem | ElementwiseProblem, *groups: Group, after: tuple[Group, ...] = (),
    chooses: bool = False, known: KnownCall | None = None,
) -> Results:  # fmt: skip
    """Launches what ``plan`` plans for a call, and returns the plan's results. ``groups``: the tensors of the call that
    ``known`` stands for. ``after``: in a backward pass, gradients and where to write gradients, whose layouts the known
    call does not say. Even those of inputs may be others there, since hooks may have moved them
    (`torch.autograd.graph.saved_tensors_hooks`)."""
    name: Any = plan
    if after:
        groups += after
        name = plan, fastcall.key(False, *groups)
    launch = None if known is None else known.launches.get(name)
    if launch is None or profiled():
        with on(p.device):
            return run_new(plan, p, groups, chooses, known, name)
    if several_devices() and p.device.index != torch.cuda.current_device():
        with torch.cuda.device(p.device):
            return launch(p.device, groups)
    return launch(p.device, groups)


def run_new(
    plan: Planner, p: Problem | ElementwiseProblem, groups: tuple[Group, ...], chooses: bool,
    known: KnownCall | None, name: Any,
) -> Results:  # fmt: skip
    layouts = tuple([group._make([layout_of(t) for t in group]) for group in groups])
    planned = plan(p, chip_of(p.device), *layouts)
    tensors, call = by_name(planned, layouts), PlannedCall(p, plan, layouts)
    given = [name for group in groups for name in group._fields]
    if p.device.type != "cuda" or profiled():  # Triton compiles what it launches
        with _explained(call):
            return ByTriton(planned, given)(p.device, groups)
    device = p.device.index  # a kernel is loaded for one device
    names = [(device, *name_of(step, tensors)) for step in planned.steps]
    if not all(map(compiled.__contains__, names)):
        of_all_sizes = plan(p, chip_of(p.device), *layouts, every=True) if chooses else planned
        with compiling, _explained(call):
            _compile(of_all_sizes, device, by_name(of_all_sizes, layouts), by_name(of_all_sizes, groups))
            calls_that_compiled.append(call)
    if is_direct(p.device):
        ensure_context(p.device)
        launch = Launched(planned, given, [compiled[name] for name in names], groups)
    else:
        launch = ByTriton(planned, given)
    keep(known, name, launch)
    return launch(p.device, groups)


def by_name(plan: Plan, groups: Iterable[tuple[Any, ...]]) -> dict[str, Any]:
    """What is given, and the plan's memory."""
    found, count = {m.name: m for m in plan.memory}, len(plan.memory)
    for group in groups:
        found |= zip(group._fields, group, strict=True)
        count += len(group)
    if len(found) < count:
        names = [*(name for group in groups for name in group._fields), *(m.name for m in plan.memory)]
        raise ValueError(f"plan: expected a different name for each tensor, got {', '.join(names)}")
    return found


def _compile(plan: Plan, device: int, layouts: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Compiles the steps that are missing, in parallel."""
    pointers = tensors | {m.name: Pointer(m) for m in plan.memory}
    names = [(device, *name_of(step, layouts)) for step in plan.steps]
    missing = {name: step for name, step in zip(names, plan.steps, strict=True) if name not in compiled}
    compiled.update(compile_all({name: _compilation(step, pointers) for name, step in missing.items()}))


class Launched(Replay):
    """The launches of a plan, without Triton's launcher. A tensor of its own (``makes``) has a result, and what is
    filled. All other memory is one allocation."""

    __slots__ = ("filled", "makes", "picks")

    def __init__(self, plan: Plan, given: Sequence[str], kernels: Sequence[Any], groups: tuple[Group, ...]):
        apart = [m for m in plan.memory if m.name in plan.results or m.filled is not None]
        together = [m for m in plan.memory if m.name not in plan.results and m.filled is None]
        words = {name: (word, 0) for word, name in enumerate((*given, *(m.name for m in (*apart, *together))))}
        self.makes = tuple([_maker(groups, m) for m in apart])
        self.filled = tuple([(number, m.filled) for number, m in enumerate(apart) if m.filled is not None])
        picks = tuple([None if name is None else words[name][0] for name in plan.results])
        made = len(given), len(given) + len(apart)
        self.picks = None if picks == tuple(range(*made)) else picks
        *starts, size = accumulate(map(size_of, together), initial=0)
        steps = [
            BoundStep(kernel_of(kernel), step.grid, (*resolved(step.arguments, words), *step.constants.values()))
            for step, kernel in zip(plan.steps, kernels, strict=True) if 0 not in step.grid
        ]  # fmt: skip
        super().__init__(steps, (None,) * len(words), (size, tuple(starts)))

    def __call__(self, device: torch.device, groups: tuple[Group, ...]) -> Results:
        made = []
        for group, place, shape, dtype in self.makes:
            new = groups[group][place].new_empty
            made.append(new(*shape) if dtype is None else new(shape, dtype=dtype))
        if self.filled:
            tensors = {name: t for group in groups for name, t in zip(group._fields, group, strict=True)}
            for number, value in self.filled:
                fill(made[number], value, tensors)
        made = tuple(made)
        if self.names:  # as in `launch`, with one call less
            memory = groups[0][0].new_empty(self.size, dtype=torch.uint8) if self.has_places else None
            try:
                frame = self.frames.pop()
            except IndexError:
                frame = fastcall.load().copy(self.template)
            status = self.start(frame, self.stream_of(device.index), memory, *groups, made)
            if status:
                self.recover(status, frame, device, memory, *groups, made)
            self.frames.append(frame)
        if self.picks is None:
            return made
        every = *chain.from_iterable(groups), *made
        return tuple([None if pick is None else every[pick] for pick in self.picks])


def _maker(groups: tuple[Group, ...], m: Memory) -> tuple[int, int, tuple[int, ...], torch.dtype | None]:
    """The place of a tensor from which this memory is made, its shape, and its dtype. The dtype is None if that tensor
    has it: then PyTorch takes half the time. Either is faster than `torch.empty` with a device."""
    for i, group in enumerate(groups):
        for j, t in enumerate(group):
            if type(t) is Tensor and t.dtype == m.dtype:  # of a subclass it might be one, too
                return i, j, m.shape, None
    return 0, 0, m.shape, m.dtype


class ByTriton:
    """The launches of a plan by Triton's launcher: in the interpreter, on AMD's GPUs, with an older torch, under a
    profiler, and where kernels are only compiled."""

    __slots__ = ("given", "plan")

    def __init__(self, plan: Plan, given: Sequence[str]):
        self.plan, self.given = plan, given

    def __call__(self, device: torch.device, groups: tuple[Group, ...]) -> Results:
        tensors: dict[str, Any] = dict(zip(self.given, chain.from_iterable(groups), strict=True))
        for m in self.plan.memory:
            tensors[m.name] = torch.empty(m.shape, dtype=m.dtype, device=device)
            if m.filled is not None:
                fill(tensors[m.name], m.filled, tensors)
        for step in self.plan.steps:
            if 0 not in step.grid:
                step.kernel.launch_metadata = tell
                with memory_for_descriptors() if step.tile.tma else nullcontext():
                    arguments = resolved(step.arguments, tensors)
                    step.kernel[step.grid](*arguments, **step.constants, **options_of(step))
        return tuple([None if name is None else tensors[name] for name in self.plan.results])


def fill(t: Tensor, value: str | float, tensors: dict[str, Tensor | None]) -> None:
    t.copy_(tensors[value]) if isinstance(value, str) else t.fill_(value)


class Pointer:
    """Stands for memory that is not made yet, when Triton compiles."""

    def __init__(self, memory: Memory):
        self.dtype, self.memory = memory.dtype, memory

    def data_ptr(self) -> int:
        return self.memory.offset

    def ptr_range(self) -> int:
        """Its bytes. AMD's compiler has other code for more than 2 GB."""
        return size_of(self.memory)


def _compilation(step: Step, pointers: dict[str, Any]) -> partial:
    values = resolved(step.arguments, pointers)
    return partial(step.kernel.warmup, *values, grid=step.grid, **step.constants, **options_of(step))


def name_of(step: Step, layouts: dict[str, Layout | Memory | None]) -> tuple:
    """Everything that a step's compiled code depends on, by Triton's own rules."""
    name = [id(step.kernel), step.tile, step.follows, step.contracts, *step.constants.values()]
    _look(step.arguments, _specialized(step.kernel), layouts, name)
    return tuple(name)


_specializations: dict[int, tuple[tuple[bool, bool], ...]] = {}  # by id, since a kernel's hash parses its source


def _specialized(kernel: Any) -> tuple[tuple[bool, bool], ...]:
    """For each parameter, whether Triton compiles it for the value 1, and for multiples of 16."""
    if id(kernel) not in _specializations:
        _specializations[id(kernel)] = tuple([
            (not p.do_not_specialize, not (p.do_not_specialize or p.do_not_specialize_on_alignment))
            for p in kernel.params
        ])  # fmt: skip
    return _specializations[id(kernel)]


def _look(
    values: tuple[Any, ...], rules: Iterable[tuple[bool, bool]], layouts: dict[str, Any], seen: list[Any]
) -> None:
    """Appends to ``seen`` what matters about each value. ``rules``: as of `_specialized`."""
    for value, (one, aligned) in zip(values, rules, strict=False):
        kind = type(value)
        if kind is int:
            seen.append("1" if value == 1 and one else (-LIMIT <= value < LIMIT) + 2 * (aligned and not value % 16))
        elif kind is str:
            t = layouts[value]
            seen.append(None if t is None else (t.dtype, aligned and t.offset == 0))
        elif kind is tuple:
            seen.append(len(value))
            _look(value, repeat((one, aligned)), layouts, seen)
        else:  # bool, float, None, constexpr
            seen.append(value.value if kind is tl.constexpr else kind)


@contextmanager
def _explained(call: PlannedCall) -> Iterator[None]:
    """Adds to the error of a refused compilation (forbid.py) what is new in the call."""
    try:
        yield
    except Refused as refused:
        why = difference_of(call, calls_that_compiled)
        raise RuntimeError(
            f"{call.problem.op}: kernel {refused} would have to be compiled, which forbid_compilation() forbids: {why}"
        ) from None
