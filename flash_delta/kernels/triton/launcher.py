"""How kernels are launched: compiled once, all at a time, and from then on with little host time.

Triton looks at every argument of every launch, which takes 50 us of host time for a kernel of forty. What a kernel was
compiled for, and all its arguments but the addresses, depend on less: dtypes, strides and alignments of the caller's
tensors, sizes and flags of the problem. They are looked at once per call of an op (`make_call`); what is known of calls
like it is used again.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, zip_longest
from math import gcd
from operator import is_
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver

from flash_delta.kernels import known
from flash_delta.kernels.triton import cuda
from flash_delta.kernels.triton.forbidding import Flags, Key, Layout, ModuleFlags, Refused, difference
from flash_delta.kernels.triton.tiles import Chip, Tile, chip_of
from flash_delta.kernels.triton.workspace import Workspace
from flash_delta.problem import Around, Convolution, Convolved, Inputs, Norm, Normalized, Problem, Slots, addresses

DECODE, STEP, PREFILL = ("decode",), ("step",), ("prefill",)  # kinds of calls
SERVING = (*DECODE, *STEP, *PREFILL)  # how those begin that have a pool
TOKENS = ("q", "k", "v", "g", "beta", "norm_gate")
POOLS = ("state_pool", "conv_pool")
NAMES = (*Inputs._fields, *Slots._fields, *Around._fields)  # of the tensors of a call that serves


class Plan(NamedTuple):
    """One launch, but for the tensors."""

    grid: tuple[int, int, int]
    tile: Tile
    scalars: tuple[Any, ...]  # the parameters behind the pointers
    constants: dict[str, Any]  # the constexprs
    follows: bool  # the kernel launched before it is this call's, too, and may still run (chunk.follow)
    contracts: bool = True  # the compiler may round a product and a sum as one


class Step(NamedTuple):
    """A launch as Triton's launcher for AMD's driver takes it; as `cuda.Step`."""

    compiled: Any
    grid: tuple[int, int, int]
    pointers: tuple[Any, ...]
    rest: tuple[Any, ...]  # the arguments behind them


class Replay:
    """As `cuda.Replay`."""

    def __init__(self, steps: Sequence[Step], tensors: tuple[Tensor | None, ...], spare: tuple[int, tuple[int, ...]]):
        self.steps = [(*step[:2], [_source(tensors, at) for at in step.pointers], step.rest) for step in steps]
        self.size, self.places = spare

    def launch(self, device: torch.device, *groups: tuple[Tensor | None, ...], own: bool = False) -> None:
        starts = addresses(chain(*groups))
        if self.places and not own:
            memory = torch.empty(self.size, dtype=torch.uint8, device=device).data_ptr()
            starts += [memory + place for place in self.places]
        stream = driver.active.get_current_stream(device.index)
        for compiled, grid, sources, rest in self.steps:
            run, pointers = compiled.run, (starts[tensor] + offset for tensor, offset in sources)  # `run` loads it
            run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *pointers, *rest)


@dataclass(slots=True)
class Shape:
    """What calls have in common that differ in their tensors' values only."""

    key: int  # of what compiled code depends on
    chip: Chip
    replay: cuda.Replay | Replay | None = None  # what they launch, once it is known


class Call(NamedTuple):
    """One call of an op, forward or backward, as the launchers take it."""

    p: Problem | Convolution | Norm
    x: Inputs | Convolved | Normalized
    more: tuple[Tensor | None, ...]  # other tensors that come from outside
    shape: Shape
    direct: bool  # launched with addresses, past Triton's own launcher
    compiling: dict | None = None  # if there, launchers only compile, for it, every tile that other sizes may choose
    steps: list[cuda.Step | Step] | None = None  # if there, launchers note what is to be launched

    @property
    def keys(self) -> Tensor:
        """That erase."""
        return self.x.k if self.x.p is None else self.x.p

    def parts(self, *memory: Workspace) -> list[Any]:
        """All their groups of tensors, as this call's launches take them."""
        return [group for w in memory for group in (w.addresses() if self.direct else w.views())]


_compiled: dict[tuple, Any] = {}  # by `_name`
_keys: dict[Key, int] = {}  # numbered as they come
_flags: dict[Flags | ModuleFlags, Flags | ModuleFlags] = {}  # each of them once, however many calls have them
_ready: set[int] = set()


def make_call(p: Problem, x: Inputs, kind: tuple, *more: Tensor | None, memo: dict | None = None) -> Call:
    """``kind`` tells forward and backward apart; ``memo``: of the problem, if x is what it was made of."""
    shape = None if memo is None else memo.get(kind)
    if shape is None:
        flags = Flags(
            kind, p.device, p.H, p.HV, p.K, p.V, p.gate, p.erase, p.packed, p.l2norm, p.raw_gate, p.raw_beta,
            p.lower_bound is not None, p.state_v_first, p.batch_invariant, p.taps, p.window, p.activation,
            kind in (DECODE, STEP) and alone(p),
        )  # fmt: skip
        tensors = _laid_out(*x, *more)
        if memo is not None:
            shape = memo[kind] = Shape(_key(flags, tensors), chip_of(p.device))
        else:
            sizes = (  # with gradients a call has other memory
                p.N, p.T, p.needs_grad, p.scale, p.beta_range, p.lower_bound, p.checkpoint_every, p.max_prompts, p.eps,
                *(None if t is None else tuple(t.shape) for t in more),
            )  # fmt: skip
            shape = _shape(chip_of(p.device), _flags.setdefault(flags, flags), sizes, tensors)
    return Call(p, x, more, shape, _direct(p.device))


def make_module_call(p: Convolution | Norm, x: Convolved | Normalized, kind: tuple, *more: Tensor | None) -> Call:
    """The same for what layers do around the rule. Its kernels are compiled for all of a problem but T and N."""
    flags = ModuleFlags(
        kind, p.device, *(p.W, p.packed) if isinstance(p, Convolution) else (1, False), p.D, p.activation
    )
    sizes = (*p[:-1], *(None if t is None else tuple(t.shape) for t in (*x, *more)))
    # With an axis in front rows [M, D] count as tokens do: their stride matters, that of parameters does not.
    tensors = tuple([None if t is None else (t.dtype, (0, *t.stride()), t.data_ptr() % 16) for t in (*x, *more)])
    shape = _shape(chip_of(p.device), _flags.setdefault(flags, flags), sizes, tensors)
    return Call(p, x, more, shape, _direct(p.device))


def _direct(device: torch.device) -> bool:
    """Whether past Triton's own launcher."""
    return device.type == "cuda" and not _profiled()


def _profiled() -> bool:
    """Whether somebody wants to see launches, or kernels that note what they do: both is up to Triton's launcher."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.compilation.instrumentation_mode)


def _laid_out(*tensors: Tensor | None) -> tuple[tuple | None, ...]:
    """What `_layout` asks."""
    return tuple([None if t is None else (t.dtype, t.stride(), t.data_ptr() % 16) for t in tensors])


@lru_cache(maxsize=1024)
def _shape(chip: Chip, flags: Flags | ModuleFlags, sizes: tuple, tensors: tuple[tuple | None, ...]) -> Shape:
    """Of calls without a memo. ``sizes`` change what is launched, not what is compiled for it."""
    return Shape(_key(flags, tensors), chip)


def _key(flags: Flags | ModuleFlags, tensors: tuple[tuple | None, ...]) -> int:
    """The number of what compiled code depends on."""
    names = NAMES if flags.kind[0] in SERVING else Inputs._fields
    counted, one = (TOKENS, flags.alone) if flags.kind in (DECODE, STEP) else ((), False)
    layouts = tuple([
        None if t is None else _layout(*t, counted=name in counted, fixed=name in POOLS, alone=one)
        for name, t in zip_longest(names[: len(tensors)], tensors)
    ])  # fmt: skip
    return _keys.setdefault((flags, layouts), len(_keys))


def _layout(
    dtype: torch.dtype, strides: tuple[int, ...], alignment: int, *, counted: bool, fixed: bool, alone: bool
) -> Layout:
    """What Triton compiles for: of a stride whether it is 1 or long and how it divides. To all kernels those of indices
    are numbers like any other, and parameters lie side by side; where tokens are ``counted`` their unit says it all.
    Within a slot of a pool strides are ``fixed``: to `decode` they are constants."""

    if len(strides) < 3 or not dtype.is_floating_point:
        return Layout(dtype, alignment == 0, ())
    if fixed:
        return Layout(dtype, alignment == 0, (*_classes(strides[:1]), *strides[1:]))
    if not counted:
        return Layout(dtype, alignment == 0, _classes(strides))
    row, token, *others = strides
    size = unit(row, token, alone)
    counts = tuple(stride // size < 2**31 for stride in (row, token))
    return Layout(dtype, alignment == 0, (size, *counts, *_classes(others)))


def _classes(strides: Sequence[int]) -> tuple[tuple[int, bool, bool], ...]:
    return tuple([(stride % 16, stride == 1, stride < 2**31) for stride in strides])


def alone(p: Problem) -> bool:
    """Whether rows of decoding have one token: it is a kernel of its own, which looks for no other."""
    return p.T == 1 and not p.packed


def unit(row: int, token: int, one: bool) -> int:
    """In how many numbers `decode` counts its way from row to row and from token to token: up to 16. To a compiler
    nothing else of these strides matters, and usually the unit does not depend on T. Where rows have one token
    (``one``) its stride is whatever the view left there."""
    return gcd(row, 0 if one else token, 16)


def run(c: Call, kernels: Callable[[Call], None], *own: Tensor | None, spare: tuple[Tensor | None, ...] = ()) -> None:
    """Calls ``kernels``, which launches, or launches again what it launched for an earlier call of this shape.

    Before its first time all that it can ever launch is compiled in parallel. ``own``: the tensors that were made for
    this call, a workspace as its buffer; ``spare``: those of them that nobody needs when it is launched.
    """
    if not c.direct:
        with _explained(c):
            return kernels(c)
    if c.shape.key not in _ready:
        found: dict[tuple, Any] = {}
        with (
            _explained(c),
            ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads,
            triton.AsyncCompileMode(threads),
        ):
            loading = threads.submit(known.load)  # takes as long as a small kernel
            kernels(c._replace(direct=False, compiling=found))
        for key, kernel in found.items():
            _compiled[key] = kernel.result() if hasattr(kernel, "result") else kernel
        loading.result()
        _ready.add(c.shape.key)
    if c.shape.replay is None:
        given, steps = _distinct((*c.x, *c.more)), []
        count = len(c.x)
        kernels(c._replace(x=c.x._make(given[:count]), more=tuple(given[count:]), steps=steps))
        *places, size = accumulate((0 if t is None else -(-t.nbytes // 256) * 256 for t in spare), initial=0)
        made = cuda.Replay if _on_nvidia(c) else Replay
        c.shape.replay = made(steps, (*given, *own, *spare), (size, tuple(places)))
    c.shape.replay.launch(c.p.device, c.x, c.more, own, spare, own=True)


def remember(c: Call, kind: tuple, given: Iterable[Tensor | None]) -> bool:
    """For `replayed`, if kernels got the tensors that were ``given``, and no copies; whether it is so."""
    same = c.p.memo is not None and (all(map(is_, c.x, given)) or addresses(c.x) == addresses(given))
    if same:
        c.p.memo["replay", kind] = c.shape
    return same


def replayed(p: Problem | Convolution | Norm, kind: tuple, *groups: tuple[Tensor | None, ...]) -> bool:
    """Launches what `run` launched for an earlier call of this problem; False if none was remembered. ``groups``:
    inputs, others from outside, own ones; what is spare is one allocation. Short calls take as long as what else
    stands between them and this: to make a `Call` takes 1.3 us, a tensor 2."""
    shape = None if p.memo is None else p.memo.get(("replay", kind))
    if shape is None or shape.replay is None or _profiled():
        return False
    if _several_devices() and p.device.index != torch.cuda.current_device():
        with torch.cuda.device(p.device):
            shape.replay.launch(p.device, *groups)
    else:
        shape.replay.launch(p.device, *groups)
    return True


@contextmanager
def _explained(c: Call) -> Iterator[None]:
    """Says of a refused compilation (forbidding.py) what the call has that earlier ones had not."""
    try:
        yield
    except Refused as refused:
        keys = list(_keys)
        serving = isinstance(c.p, Problem) and c.p.pool is not None
        others = (*Slots._fields, *Around._fields) if serving else ("do", "dfinal")
        tensors = dict(zip((*c.x._fields, *others), (*c.x, *c.more), strict=False))
        why = difference(keys[c.shape.key], (keys[number] for number in _ready), tensors)
        raise RuntimeError(
            f"{c.p.op}: kernel {refused} would have to be compiled, which forbid_compilation() forbids: {why}"
        ) from None


def on(device: torch.device) -> AbstractContextManager:
    """Triton launches on the current device."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return nullcontext()


@lru_cache(None)
def _several_devices() -> bool:
    return torch.cuda.device_count() > 1


def launch(c: Call, kernel: Any, pointers: tuple[Any, ...], plans: Callable[[], Iterable[Plan]]) -> None:
    """``pointers``, a plan's scalars and its constants are the kernel's parameters, in their order.

    Of the ``plans`` there is one, but while compiling.
    """
    for plan in plans():
        if c.steps is not None:
            if 0 not in plan.grid:
                c.steps.append(_step(c, kernel, pointers, plan))
            continue
        options = plan.constants | _options(plan)
        if c.compiling is not None:
            compiled = kernel.warmup(*pointers, *plan.scalars, grid=plan.grid, **options)
            c.compiling[_name(c, kernel, plan)] = compiled
        elif 0 not in plan.grid:
            if plan.tile.tma:
                triton.set_allocator(_scratch)
            kernel[plan.grid](*pointers, *plan.scalars, **options)


def compiled_as(name: tuple) -> Any:
    """What was compiled, by the name that its launcher gave it in ``Call.compiling``."""
    return _compiled[name]


def _name(c: Call, kernel: Any, plan: Plan) -> tuple:
    """Of what is compiled: beside what calls of a shape have in common, a launch's own."""
    return id(kernel), c.shape.key, plan.tile, *plan.constants.values()


def _distinct(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """As objects of their own: here one tensor may come as q and as k, in the next call two."""
    found: dict[int, Tensor | None] = {}
    for number, t in enumerate(tensors):
        key = number if t is None else id(t)
        found[number if key in found else key] = t.detach() if t is not None and key in found else t
    return list(found.values())


def _step(c: Call, kernel: Any, pointers: tuple[Any, ...], plan: Plan) -> cuda.Step | Step:
    compiled = compiled_as(_name(c, kernel, plan))
    rest = (*plan.scalars, *plan.constants.values())
    if _on_nvidia(c):
        return cuda.make_step(compiled, plan.grid, (*pointers, *rest))
    return Step(compiled, plan.grid, pointers, rest)


def _on_nvidia(c: Call) -> bool:
    return c.shape.chip.target.startswith("sm_")


def _source(tensors: tuple[Tensor | None, ...], at: Tensor | int | None) -> tuple[int, int]:
    """A pointer as one of the tensors and an offset in bytes; a number points into a workspace, which is bytes.

    None is a constant of the compiled kernel, whose launcher looks at no value for it.
    """
    if at is None:
        return 0, 0
    for number, t in enumerate(tensors):
        if t is at:
            return number, 0
        if isinstance(at, int) and t is not None and t.dtype == torch.uint8:
            offset = at - t.data_ptr()
            if 0 <= offset < max(1, t.nbytes):  # without tokens it has no bytes
                return number, offset
    raise ValueError(f"expected a pointer into one of the call's tensors, got {at}")


def _options(plan: Plan) -> dict[str, int | bool]:
    """What Triton takes beside a kernel's parameters; AMD's compiler does not know the last two."""
    t = plan.tile
    options = {"num_warps": t.warps, "num_stages": t.stages, "enable_fp_fusion": plan.contracts}
    if t.registers is not None:
        options["maxnreg"] = t.registers
    if plan.follows:
        options["launch_pdl"] = True
    return options


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Where descriptors lie."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
