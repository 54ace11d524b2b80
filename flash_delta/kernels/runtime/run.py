"""Runs plans: compiles what is missing, makes memory, launches. The next call like it only makes memory and launches.

A planner takes a problem, the chip and groups of layouts, and returns a `Plan`. Compiled kernels are kept under names
that follow from the launch alone (`name_of`), so no rule says by hand which facts about a call matter for which kernel.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, chain, repeat
from math import prod
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flash_delta.kernels.runtime import fastcall, pack
from flash_delta.kernels.runtime.chip import Chip, chip_of
from flash_delta.kernels.runtime.cuda_driver import BoundStep, Kernel, Replay, ensure_context, kernel_of
from flash_delta.kernels.runtime.forbid import PlannedCall, Refused, difference_of
from flash_delta.kernels.runtime.launch import (
    compile_all,
    compiling,
    is_direct,
    launch_by_triton,
    on,
    options_of,
    profiled,
    several_devices,
)
from flash_delta.kernels.runtime.plan import EVERY, Descriptor, Layout, Memory, Plan, Step, layouts_of
from flash_delta.problem import ElementwiseProblem, KnownCall, Problem

LIMIT = 2**31  # of numbers of 32 bits
ALIGNED = 256  # bytes
MOST = 64  # launches that a known call keeps: one for each choice and each layout of a gradient
KINDS = Layout, Memory, tl.constexpr, Descriptor  # of arguments, for C
Planner = Callable[..., Plan]
Later = Callable[..., Plan | None]
Choose = Callable[[Problem, Chip], Any]  # it answers with something small and hashable
Group = tuple[Tensor | None, ...]  # a named tuple
Results = tuple[Tensor | None, ...]

compiled: dict[tuple, Any] = {}  # by device and `name_of`
calls_that_compiled: list[PlannedCall] = []  # for the error of `forbid_compilation`


def by_sizes(p: Problem, chip: Chip) -> None:
    """For `run`, of plans that depend on sizes and not on lengths: a known call has all sizes."""


def run(
    plan: Planner, p: Problem | ElementwiseProblem, *groups: Group, after: tuple[Group, ...] = (),
    choose: Choose | None = None, known: KnownCall | None = None, later: Later | None = None,
) -> Results:  # fmt: skip
    """Launches what ``plan`` plans for a call, and returns the plan's results. ``groups``: the tensors of the call that
    ``known`` stands for. ``after``: in a backward pass, gradients and where to write gradients, whose layouts the known
    call does not say. Even those of inputs may be others there, since hooks may have moved them
    (`torch.autograd.graph.saved_tensors_hooks`). ``choose``: what decides by sizes and lengths; ``plan`` takes its
    answer as ``choice``. ``later``: plans what else to compile together with this call, from the same layouts."""
    name: Any = plan if choose is None or choose is by_sizes else (plan, p.lengths)
    key = None
    if after:
        groups += after
        key = fastcall.key(False, *groups)
        name = name, key
    launch = None if known is None else known.launches.get(name)
    if launch is None or profiled():
        with on(p.device):
            return run_new(plan, p, groups, choose, known, name, key, later)
    if several_devices() and p.device.index != torch.cuda.current_device():
        with torch.cuda.device(p.device):
            return launch(p.device, groups)
    return launch(p.device, groups)


def run_new(
    plan: Planner, p: Problem | ElementwiseProblem, groups: tuple[Group, ...], choose: Choose | None,
    known: KnownCall | None, name: Any, key: tuple | None, later: Later | None,
) -> Results:  # fmt: skip
    """``name``: the call's, among the launches of the known call. ``key``: its part that says layouts. With other
    lengths the choice may be the same, and then so are the launches."""
    chip, chosen, by_choice = chip_of(p.device), {}, name
    if choose not in (None, by_sizes):
        choice = choose(p, chip)
        chosen, by_choice = {"choice": choice}, (choice, plan, key) if p.packed else name
        launch = None if known is None or profiled() else known.launches.get(by_choice)
        if launch is not None:
            keep(known, name, launch)
            return launch(p.device, groups)
    layouts = tuple([layouts_of(group) for group in groups])
    planned, call = plan(p, chip, *layouts, **chosen), PlannedCall(p, plan, layouts)
    given = given_to(planned, groups)
    if p.device.type != "cuda" or profiled():  # Triton compiles what it launches
        with _explained(call):
            return ByTriton(planned, given)(p.device, groups)
    device = p.device.index  # a kernel is loaded for one device
    names = [(device, *name_of(step)) for step in planned.steps]
    kernels = [compiled.get(name) for name in names]  # a name is long: it is hashed once
    direct = is_direct(p.device)
    if None in kernels and direct and pack.packs(chip.target):
        kernels = _unpacked(p.device, chip, names, planned.steps)
    if None in kernels:
        wanted = [planned if choose is None else plan(p, chip, *layouts, choice=EVERY)]
        more = None if later is None else later(p, chip, *layouts)
        if more is not None:
            wanted.append(more)
        with compiling, _explained(call):
            if _compile(wanted, chip, device, direct, dict(zip(given, chain.from_iterable(groups), strict=True))):
                calls_that_compiled.append(call)
        kernels = [compiled[name] for name in names]
    if direct and is_direct(p.device):  # C may have been missing
        ensure_context(p.device)
        launch = Launched(planned, given, kernels, groups)
    else:
        launch = ByTriton(planned, given)
    for kept in {name, by_choice}:
        keep(known, kept, launch)
    return launch(p.device, groups)


def keep(known: KnownCall | None, name: Any, launches: Any) -> None:
    """Puts launches into ``known``, as the newest ones."""
    if known is not None:
        if len(known.launches) >= MOST:
            oldest, *_ = known.launches  # in one step, since other threads put launches in, too
            known.launches.pop(oldest, None)
        known.launches[name] = launches


def given_to(plan: Plan, groups: Iterable[Group]) -> list[str]:
    """The names of the tensors that a caller gives."""
    given = [name for group in groups for name in group._fields]
    names = [*given, *(m.name for m in plan.memory)]
    if len(set(names)) < len(names):
        raise ValueError(f"plan: expected a different name for each tensor, got {', '.join(names)}")
    return given


def _unpacked(device: torch.device, chip: Chip, names: list[tuple], steps: Iterable[Step]) -> list[Any]:
    """The kernels that are compiled or that packs have; None for others."""
    fastcall.load()
    ensure_context(device)
    for name, step in zip(names, steps, strict=True):
        if name not in compiled:
            kernel = pack.load(chip.target, step, name[1:])
            if kernel is not None:
                compiled[name] = kernel
    return [compiled.get(name) for name in names]


def _compile(plans: Iterable[Plan], chip: Chip, device: int, direct: bool, given: dict[str, Any]) -> bool:
    """Compiles the steps that are missing and that no pack has, in parallel. False if another thread has done it."""
    missing: dict[tuple, partial] = {}
    for plan in plans:
        memory = {m.name: m for m in plan.memory}

        def pointer(t: Layout, memory: dict[str, Memory] = memory) -> Any:
            return Pointer(t, memory[t.name]) if t.name in memory else tensor_of(t, given)

        steps = {(device, *name_of(step)): step for step in plan.steps}
        missing |= {
            name: _compilation(step, pointer) for name, step in steps.items()
            if name not in compiled and not (direct and pack.has(chip.target, step, name[1:]))
        }  # fmt: skip
    if missing:
        compiled.update(compile_all(missing))
    return bool(missing)


class Launched(Replay):
    """The launches of a plan, without Triton's launcher. A tensor of its own (``makes``) has a result, and what is
    filled. All other memory is one allocation."""

    __slots__ = ("filled", "makes", "picks")

    def __init__(self, plan: Plan, given: Sequence[str], kernels: Sequence[Any], groups: tuple[Group, ...]):
        returned = {t.name for t in plan.results if t is not None}
        apart = [m for m in plan.memory if m.name in returned or m.filled is not None]
        together = [m for m in plan.memory if m.name not in returned and m.filled is None]
        words = {name: word for word, name in enumerate((*given, *(m.name for m in (*apart, *together))))}
        makers = _makers(groups)
        self.makes = tuple([
            (*makers.get(m.dtype, (0, 0)), m.shape, None if m.dtype in makers else m.dtype) for m in apart
        ])  # fmt: skip
        self.filled = tuple([(number, value_of(m)) for number, m in enumerate(apart) if m.filled is not None])
        picks = tuple([None if t is None else words[t.name] for t in plan.results])
        made = len(given), len(given) + len(apart)
        self.picks = None if picks == tuple(range(*made)) else picks
        *starts, size = accumulate((m.nbytes for m in together), initial=0)

        steps, places = [], fastcall.load().places
        for step, kernel in zip(plan.steps, kernels, strict=True):
            if 0 not in step.grid:
                values = *places(step.arguments, words, KINDS), *step.constants.values()
                loaded = kernel if type(kernel) is Kernel else kernel_of(kernel)
                steps.append(BoundStep(loaded, step.grid, values))
        address = next(t.data_ptr() for t in groups[0] if t is not None) & -ALIGNED
        super().__init__(steps, len(words), (size, tuple(starts)), address)

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


def _makers(groups: tuple[Group, ...]) -> dict[torch.dtype, tuple[int, int]]:
    """The place of a tensor of each dtype, from which PyTorch makes others in half the time. Anything is faster than
    `torch.empty` with a device."""
    found: dict[torch.dtype, tuple[int, int]] = {}
    for i, group in enumerate(groups):
        for j, t in enumerate(group):
            if type(t) is Tensor:  # of a subclass the new tensor might be one, too
                found.setdefault(t.dtype, (i, j))
    return found


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
                fill(tensors[m.name], value_of(m), tensors)
        for step in self.plan.steps:
            if 0 not in step.grid:
                launch_by_triton(step, resolved(step.arguments, lambda t: tensor_of(t, tensors)))
        return tuple([None if t is None else tensors[t.name] for t in self.plan.results])


def tensor_of(t: Layout, tensors: dict[str, Tensor]) -> Tensor:
    """The tensor with this layout."""
    found = tensors[t.name]
    if t.start is None:
        return found
    return found.narrow(0, t.start, prod(t.shape) * t.dtype.itemsize).view(t.dtype).view(t.shape)


def value_of(m: Memory) -> str | float | None:
    """What it is filled with: a number, or the name of a tensor."""
    return m.filled.name if isinstance(m.filled, Layout) else m.filled


def fill(t: Tensor, value: str | float, tensors: dict[str, Tensor | None]) -> None:
    t.copy_(tensors[value]) if isinstance(value, str) else t.fill_(value)


class Pointer:
    """Stands for memory that is not made yet, when Triton compiles. ``t`` is in ``memory``."""

    def __init__(self, t: Layout, memory: Memory):
        self.dtype, self.layout, self.memory = t.dtype, t, memory

    def data_ptr(self) -> int:
        return self.layout.offset

    def element_size(self) -> int:
        return self.dtype.itemsize

    def ptr_range(self) -> int:
        """The memory's bytes. AMD's compiler has other code for more than 2 GB."""
        return self.memory.nbytes


def resolved(arguments: tuple[Any, ...], tensor: Callable[[Layout], Any]) -> tuple[Any, ...]:
    """The arguments as Triton takes them, with a ``tensor`` for each layout."""
    found = []
    for a in arguments:
        if isinstance(a, Layout):
            a = tensor(a)
        elif type(a) is tuple:
            a = resolved(a, tensor)
        elif type(a) is Descriptor:
            a = TensorDescriptor(tensor(a.tensor), list(a.shape), list(a.strides), list(a.box), a.layout)
        found.append(a)
    return tuple(found)


def _compilation(step: Step, pointer: Callable[[Layout], Any]) -> partial:
    values = resolved(step.arguments, pointer)
    return partial(step.kernel.warmup, *values, grid=step.grid, **step.constants, **options_of(step))


def name_of(step: Step) -> tuple:
    """Everything that a step's compiled code depends on, by Triton's own rules."""
    name = [id(step.kernel), step.tile, step.follows, step.contracts, *step.constants.values()]
    look = _look if fastcall.loaded is None else fastcall.loaded.facts  # it is loaded while the first kernels compile
    look(step.arguments, _rules(step.kernel), KINDS, name)
    return tuple(name)


_specializations: dict[int, bytes] = {}  # by id, since a kernel's hash parses its source


def _rules(kernel: Any) -> bytes:
    """For each parameter, whether Triton compiles it for the value 1 (bit 0), and for multiples of 16 (bit 1)."""
    if id(kernel) not in _specializations:
        _specializations[id(kernel)] = bytes([
            (not p.do_not_specialize) + 2 * (not (p.do_not_specialize or p.do_not_specialize_on_alignment))
            for p in kernel.params
        ])  # fmt: skip
    return _specializations[id(kernel)]


def _look(values: tuple[Any, ...], rules: Iterable[int], kinds: tuple[type, ...], seen: list[Any]) -> None:
    """Appends to ``seen`` what matters about each value. ``rules``: as of `_rules`. It does what `facts` in C does,
    where that cannot be loaded: with an older torch."""
    for value, rule in zip(values, rules, strict=False):
        kind = type(value)
        if kind is int:
            narrow, whole = -LIMIT <= value < LIMIT, rule & 2 and value % 16 == 0
            seen.append("1" if value == 1 and rule & 1 else narrow + 2 * bool(whole))
        elif isinstance(value, Layout):
            seen += value.dtype, bool(rule & 2) and value.offset == 0
        elif kind is Descriptor:
            seen += value.tensor.dtype, value.box, id(value.layout)
        elif kind is tuple:
            seen.append(len(value))
            _look(value, repeat(3), kinds, seen)  # whatever the kernel asks for, Triton does this
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
