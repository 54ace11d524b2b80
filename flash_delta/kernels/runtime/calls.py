"""A call of an op, as launchers take it, and what calls have in common that differ in values only."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs

from flash_delta.kernels.runtime import fastcall
from flash_delta.kernels.runtime.chip import Chip, chip_of
from flash_delta.kernels.runtime.compile_key import flags_of, key_of, laid_out, module_flags_of
from flash_delta.kernels.runtime.cuda_driver import Replay, Step
from flash_delta.kernels.runtime.workspace import Workspace
from flash_delta.problem import AroundInputs, AroundProblem, Inputs, KnownCall, Problem

MOST = 64  # launches that a known call keeps: one for every plan of segments and every layout of a gradient


@dataclass(slots=True)
class Shape:
    """What calls have in common that differ in their tensors' values only."""

    key: int  # of what compiled code depends on
    chip: Chip
    replay: Replay | None = None  # what they launch, once it is known
    makes: tuple[tuple | None, ...] = ()  # of every tensor that is made for a call its dtype and its sizes
    replayable: bool = False  # by `again`: kernels get the tensors that the caller has given, and no copies


class Call(NamedTuple):
    """One call of an op, forward or backward, as the launchers take it."""

    p: Problem | AroundProblem
    x: Inputs | AroundInputs
    more: tuple[Tensor | None, ...]  # other tensors that come from outside
    shape: Shape
    direct: bool  # launched with addresses, past Triton's own launcher
    compiling: dict | None = None  # if there, launchers only note in it what compiles: all that other sizes may launch
    steps: list[Step] | None = None  # if there, launchers note what is to be launched

    @property
    def keys(self) -> Tensor:
        """That erase."""
        return self.x.k if self.x.p is None else self.x.p

    def parts(self, *memory: Workspace) -> list[Any]:
        """All their groups of tensors, as this call's launches take them."""
        return [group for w in memory for group in (w.addresses() if self.direct else w.views())]


def make_call(
    p: Problem, x: Inputs, kind: tuple, *more: Tensor | None, known: KnownCall | None = None, name: tuple | None = None
) -> Call:
    """``kind`` tells forward and backward apart. What is found is kept in ``known`` by ``name``, which is the kind
    unless more decides what is launched than the kind and what ``known`` was made of."""
    name = kind if name is None else name
    shape = None if known is None else known.launches.pop(name, None)
    if shape is None:
        shape = Shape(key_of(flags_of(p, kind), laid_out(*x, *more)), chip_of(p.device))
    keep(known, name, shape)
    return Call(p, x, more, shape, _direct(p.device))


def keep(known: KnownCall | None, name: tuple, shape: Shape) -> None:
    """As the newest one that ``known`` knows."""
    if known is not None:
        if len(known.launches) >= MOST:
            known.launches.pop(next(iter(known.launches)), None)
        known.launches[name] = shape


def make_module_call(
    p: AroundProblem, x: AroundInputs, kind: tuple, *more: Tensor | None, known: KnownCall | None = None,
) -> Call:  # fmt: skip
    """The same for what layers do around the rule. Its kernels are compiled for all of a problem but T and N. ``more``:
    gradients, which ``known`` was not made of."""
    # With an axis in front rows [M, D] count as tokens do: their stride matters, that of parameters does not.
    tensors = tuple([None if t is None else (t.dtype, (0, *t.stride()), t.data_ptr() % 16) for t in (*x, *more)])
    name = (kind, tensors) if more else kind
    shape = None if known is None else known.launches.get(name)
    if shape is None:
        shape = Shape(key_of(module_flags_of(p, kind), tensors), chip_of(p.device))
        keep(known, name, shape)
    return Call(p, x, more, shape, _direct(p.device))


def _direct(device: torch.device) -> bool:
    """Whether past Triton's own launcher, which launches all on AMD's GPUs, and all under an older torch."""
    return device.type == "cuda" and torch.version.hip is None and fastcall.API is not None and not profiled()


def profiled() -> bool:
    """Whether somebody wants to see launches, or kernels that note what they do: both is up to Triton's launcher."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.compilation.instrumentation_mode)


def on(device: torch.device) -> AbstractContextManager:
    """Triton launches on the current device."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return nullcontext()
