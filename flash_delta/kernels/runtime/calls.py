"""A call of an op as launchers take it, and what calls share that differ only in values."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs

from flash_delta.kernels.runtime import fastcall
from flash_delta.kernels.runtime.chip import Chip, chip_of
from flash_delta.kernels.runtime.compile_key import flags_of, key_of, laid_out
from flash_delta.kernels.runtime.cuda_driver import BoundStep, Replay
from flash_delta.kernels.runtime.plan import Draft
from flash_delta.kernels.runtime.workspace import Workspace
from flash_delta.problem import Around, Inputs, KnownCall, Problem, Slots

MOST = 64  # launches that a known call keeps: one for each plan of segments and each layout of a gradient


@dataclass(slots=True)
class Shape:
    """What calls share that differ only in their tensors' values."""

    key: int  # the number of everything that compiled code depends on
    chip: Chip
    replay: Replay | None = None  # the launches, once they are known
    makes: tuple[tuple | None, ...] = ()  # dtype and sizes of every tensor that is made for a call
    replayable: bool = False  # by `again`: kernels get the caller's own tensors and no copies


class Call(NamedTuple):
    """One call of an op, forward or backward, as launchers take it."""

    p: Problem
    x: Inputs
    more: tuple[Tensor | None, ...]  # other tensors from outside
    shape: Shape
    direct: bool  # launched with addresses, without Triton's launcher
    compiling: dict | None = None  # if given, launchers launch nothing: they list here what any size may need compiled
    steps: list[BoundStep] | None = None  # if given, launchers note their launches here

    @property
    def chip(self) -> Chip:
        return self.shape.chip

    @property
    def made(self) -> None:
        """Stands for `Draft.made`. A call that is not planned makes its memory before it launches."""

    @property
    def every(self) -> bool:
        """Whether launchers now list what to compile: all that calls of any size may launch."""
        return self.compiling is not None

    @property
    def keys(self) -> Tensor:
        """The keys that erase."""
        return self.x.k if self.x.p is None else self.x.p

    def parts(self, *memory: Workspace) -> list[Any]:
        """All groups of tensors in the workspaces, as this call's launches take them."""
        return [group for w in memory for group in (w.addresses() if self.direct else w.views())]


AnyCall = Call | Draft  # what launchers take: a call that is planned, or one that launches now


def make_call(
    p: Problem, x: Inputs, kind: tuple, *more: Tensor | None, known: KnownCall | None = None, name: tuple | None = None
) -> Call:
    """``kind`` distinguishes forward and backward. ``known`` keeps the call's `Shape` under ``name``. The name is the
    kind, unless the launches depend on more than the kind and the call that ``known`` was made for."""
    name = kind if name is None else name
    shape = None if known is None else known.launches.pop(name, None)
    if shape is None:
        shape = Shape(key_of(flags_of(p, kind), laid_out(*x, *more)), chip_of(p.device))
    keep(known, name, shape)
    return Call(p, x, more, shape, is_direct(p.device))


def opened(c: Call) -> tuple[Slots, Around]:
    """The parts of ``c.more`` in a serving call. While a call is recorded, each of its tensors is an object of its own,
    so launches take these and not the caller's."""
    return Slots(*c.more[: len(Slots._fields)]), Around(*c.more[len(Slots._fields) :])


def keep(known: KnownCall | None, name: Any, launches: Any) -> None:
    """Puts launches into ``known``, as the newest ones."""
    if known is not None:
        if len(known.launches) >= MOST:
            oldest, *_ = known.launches  # in one step, since other threads put launches in, too
            known.launches.pop(oldest, None)
        known.launches[name] = launches


def is_direct(device: torch.device) -> bool:
    """Whether to launch without Triton's launcher. AMD's GPUs and an older torch need Triton's launcher."""
    return device.type == "cuda" and torch.version.hip is None and fastcall.API is not None and not profiled()


def profiled() -> bool:
    """Whether a profiler watches launches, or kernels are instrumented. Both need Triton's launcher."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.compilation.instrumentation_mode)


def on(device: torch.device) -> AbstractContextManager:
    """A context in which ``device`` is the current device, on which Triton launches."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return nullcontext()
