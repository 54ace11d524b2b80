"""What a backend is, and which ones there are. See docs/adding-a-backend.md.

A backend is a module with the functions of :class:`Backend`, and beside it perhaps one with those of
:class:`AroundBackend`. Ops check a call first, so a backend may count on what :class:`~flash_delta.problem.Problem`
says. No function waits for the device, and the same call gives the same bits again.

A backend that cannot run packed sequences unless the host knows their lengths either refuses them or has
``plans_on_host = True``. Then ops wait for the device, read the lengths, and hand them over in ``Problem.lengths``.
"""

import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple, Protocol

from torch import Tensor

from flash_delta.problem import (
    PACKAGE,
    Around,
    AroundProblem,
    ConvolutionProblem,
    Convolved,
    Gated,
    GateProblem,
    Inputs,
    KnownCall,
    Normalized,
    NormProblem,
    Outputs,
    Problem,
    Slots,
)

Preference = tuple[int, str | None]  # the higher is asked first; why it is not higher, for `explain`


class Backend(Protocol):
    """The gated delta rule. A function that ``unsupported`` rules out for every problem may be missing.

    Shapes, dtypes and devices of ``inputs`` are as :class:`~flash_delta.problem.Inputs` and the problem say. Strides
    may be any, and values of ``cu_seqlens`` and of indices may be wrong: they must not make a kernel leave its tensors.
    Autocast is off.

    ``known``: None, or an object that is the same for all calls which differ in their tensors' values only. A backend
    may keep there what it found (``known.launches``), and may ignore it.
    """

    def unsupported(self, problem: Problem) -> str | None:
        """Why this backend cannot run ``problem``, as the end of a sentence; None if it can. The problem alone decides.
        It has to be quick, for it is asked for every call of new sizes. While torch.compile traces, sizes may be
        symbols."""

    def preference(self, problem: Problem) -> Preference:
        """How eager it is to run ``problem``, which it need not support. Backends are asked from the most eager on; of
        equals the one that was registered first. No length may decide, else a longer call would compile another
        backend's kernels."""

    def remark(self, problem: Problem) -> str | None:
        """What `explain` says of how it would run ``problem``, or None."""

    def forward(self, problem: Problem, inputs: Inputs, known: KnownCall | None = None) -> Outputs:
        """Whole sequences.

        Returns:
            ``o [B, T, HV, V]`` in ``problem.dtype``; ``final_state`` of ``problem.state_shape`` in
            ``problem.accumulate``, always, and in memory of its own; with ``problem.needs_grad`` in ``saved`` what
            ``backward`` wants to have, or nothing, and in ``planned`` what would save it work; with
            ``problem.keep_states`` the chunks' ``states``. Rows of a packed ``o`` after the last sequence are zeros.
        """

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        saved: tuple[Tensor, ...],
        do: Tensor,
        dfinal: Tensor | None,
        known: KnownCall | None = None,
    ) -> Inputs:
        """Gradients of all inputs, in their shapes and dtypes; None for what is None. ``do`` and ``dfinal`` may have
        any strides. ``saved`` is what ``forward`` saved, and then ``planned``, except under torch.compile. It is
        empty after ``step``, and under torch.compile without ``empty_saved``. Under torch.compile autograd records
        nothing in here."""

    def step(self, problem: Problem, inputs: Inputs, known: KnownCall | None = None) -> Outputs:
        """As ``forward``, token by token, for ``problem.recurrent``: T calls of one token, with the state handed on,
        have to give the bits of one call."""

    def decode(
        self, problem: Problem, inputs: Inputs, slots: Slots, around: Around, known: KnownCall | None = None
    ) -> Tensor:
        """One token or a draft of every row, on a pool of states, which is written in place. ``o [B, T, HV, V]``,
        contiguous, in ``problem.dtype``; ``slots.out`` if it is there. An index outside of the pool, or
        ``problem.null_slot``, reads zeros and writes nothing. With ``slots.write_pool`` that pool is written, and the
        other is only read. With ``problem.most_tokens`` rows are packed and have lengths of their own. With
        ``problem.taps`` a short convolution comes before the rule, with ``problem.eps`` a gated norm after it, of o as
        it is rounded or before that."""

    def prefill(
        self, problem: Problem, inputs: Inputs, slots: Slots, around: Around, known: KnownCall | None = None
    ) -> Tensor:
        """Packed sequences on from their states in a pool, which is written in place. ``o [1, T, HV, V]``, contiguous,
        in ``problem.dtype``; ``slots.out`` if it is there. What comes ``around`` the rule is as in ``decode``, except
        that o is rounded before the norm. Windows are read and written with states, at checkpoints too."""

    def workspace_bytes(self, problem: Problem, inputs: Inputs) -> int:
        """What ``prefill`` or ``decode`` allocates beside ``o``. Of ``inputs`` only the layout matters: they may be on
        "meta". It may be missing; then `flash_delta.ops.serving.workspace_bytes` cannot be asked."""

    def empty_saved(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, ...]:
        """Fresh tensors with the shapes, strides and dtypes of those that ``forward`` saves, for torch.compile. They
        are made by arithmetic on sizes, which may be symbols; ``problem.lengths`` has no values then. It may be
        missing; then ``problem.needs_grad`` is False in a compiled ``forward``, and nothing is saved."""


class AroundBackend(Protocol):
    """The short convolution, the RMS norm and the gate around the rule.

    Ops make an autograd Function of it, and under torch.compile operators: so it has ``convolve_backward``,
    ``normalize_backward`` and ``gate_backward``. Only `AROUND_IN_TORCH` lacks the last two, on which a backend without
    kernels of its own may stand. Nothing is saved but the inputs. ``known`` is as in :class:`Backend`.
    """

    def unsupported(self, problem: AroundProblem) -> str | None:
        """As :meth:`Backend.unsupported`."""

    def preference(self, problem: AroundProblem) -> Preference:
        """As :meth:`Backend.preference`."""

    def convolve(
        self, problem: ConvolutionProblem, inputs: Convolved, known: KnownCall | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """``y [B, T, D]``, and the final state ``[N, D, W]`` if the problem asks for it; both contiguous."""

    def convolve_backward(
        self,
        problem: ConvolutionProblem,
        inputs: Convolved,
        dy: Tensor | None,
        dfinal: Tensor | None,
        known: KnownCall | None = None,
    ) -> Convolved:
        """Gradients of the four inputs with values, in their shapes and dtypes; None for what is None. ``dy`` or
        ``dfinal`` may be None: zeros."""

    def convolve_token(self, problem: ConvolutionProblem, inputs: Convolved, known: KnownCall | None = None) -> Tensor:
        """``y [N, D]`` of one token ``x [N, D]`` of every row; ``initial_state`` moves on in place. Nobody asks for a
        gradient."""

    def normalize(self, problem: NormProblem, inputs: Normalized, known: KnownCall | None = None) -> Tensor:
        """``y`` in x's shape and dtype, contiguous."""

    def normalize_backward(
        self, problem: NormProblem, inputs: Normalized, dy: Tensor, known: KnownCall | None = None
    ) -> Normalized:
        """Gradients of all inputs, in their shapes and dtypes; None for what is None."""

    def gate(self, problem: GateProblem, inputs: Gated, known: KnownCall | None = None) -> Tensor:
        """Log decays in g's shape and ``problem.output_dtype``, contiguous."""

    def gate_backward(self, problem: GateProblem, inputs: Gated, dy: Tensor, known: KnownCall | None = None) -> Gated:
        """Gradients of all inputs, in their shapes and dtypes; None for what is None."""


class Entry(NamedTuple):
    rule: str  # name of the module that is a Backend
    around: str | None  # of the one that is an AroundBackend
    takes_cpu: Callable[[], bool]  # whether it is worth a look for tensors on the CPU


_entries: dict[str, Entry] = {}


def register(name: str, rule: str, around: str | None = None, *, takes_cpu: Callable[[], bool] = lambda: False) -> None:
    """Adds a backend, which callers can ask for by ``name`` from now on. Register before the first call: a call like an
    earlier one stays with the backend that was chosen then.

    Args:
        name: what ``backend=`` and ``FLASH_DELTA_BACKEND`` take.
        rule: the name of a module that is a :class:`Backend`. It is imported when a call first looks at it.
        around: the name of a module that is an :class:`AroundBackend`, its own or another backend's. Layers ask for
            their convolutions and norms by the same ``name``. None: those calls are refused.
        takes_cpu: whether it is worth importing for tensors on the CPU. By default it is not: calls are refused.

    Raises:
        ValueError: if the name is taken.
    """
    if name in _entries:
        raise ValueError(f"name: expected a name that is not taken ({', '.join(_entries)}), got {name!r}")
    _entries[name] = Entry(rule, around, takes_cpu)


def unregister(name: str) -> None:
    """Takes it away again. Calls that were made on it may be remembered: a process should not continue with them."""
    find(name)
    del _entries[name]


def names() -> tuple[str, ...]:
    return tuple(_entries)


def find(name: str) -> Entry:
    entry = _entries.get(name)
    if entry is None:
        raise ValueError(f"backend: expected one of {', '.join(_entries)}, got {name!r}")
    return entry


def takes_cpu(name: str) -> bool:
    return find(name).takes_cpu()


def load(name: str) -> ModuleType:
    """The module that is a :class:`Backend`."""
    module = find(name).rule
    return sys.modules.get(module) or importlib.import_module(module)


def plans_on_host(backend: ModuleType) -> bool:
    """Whether ops have to read the lengths of packed sequences for it, and wait for the device that has them."""
    return getattr(backend, "plans_on_host", False)


def load_around(name: str) -> ModuleType | None:
    """The module that is an :class:`AroundBackend`, or None."""
    module = find(name).around
    return module and (sys.modules.get(module) or importlib.import_module(module))


# Convolution, norms and gates as PyTorch's own operations, which autograd and compilers see through.
AROUND_IN_TORCH = f"{PACKAGE}.reference.modules"


def is_seen_through(name: str) -> bool:
    """Whether a backend stands on `AROUND_IN_TORCH`. A tracer can follow this: nothing is imported."""
    return find(name).around == AROUND_IN_TORCH


register(
    "triton",
    f"{PACKAGE}.kernels.triton.backend",
    f"{PACKAGE}.kernels.triton.around.backend",
    takes_cpu=lambda: bool(os.environ.get("TRITON_INTERPRET")),
)
register("hopper", f"{PACKAGE}.kernels.hopper.backend", f"{PACKAGE}.kernels.triton.around.backend")
register("torch", f"{PACKAGE}.reference.backend", AROUND_IN_TORCH, takes_cpu=lambda: True)
