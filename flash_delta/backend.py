"""The interface of backends, and the list of backends. See docs/adding-a-backend.md.

A backend is a module with the functions of :class:`Backend`. It may also have a module with the functions of
:class:`ElementwiseBackend`. Ops check a call first, so a backend may rely on what :class:`~flash_delta.problem.Problem`
says. No function waits for the device, and the same call gives the same bits again. A backend that can run packed
sequences only if the host knows their lengths either refuses calls without lengths, or has ``plans_on_host = True``.
Then ops wait for the device, read the lengths, and pass them in ``Problem.lengths``.
"""

import importlib
import os
from collections.abc import Callable
from functools import cache
from threading import RLock
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from flash_delta.problem import (
    PACKAGE,
    Around,
    ConvolutionProblem,
    Convolved,
    ElementwiseProblem,
    Gated,
    GateProblem,
    Inputs,
    Int8Problem,
    KnownCall,
    Normalized,
    NormProblem,
    Outputs,
    Problem,
    Resting,
    Slots,
)

Preference = tuple[int, str | None]  # the highest is asked first; for `explain`, why it is not higher


class Backend(Protocol):
    """The gated delta rule. A function may be missing if ``unsupported`` refuses all problems that need it.

    Shapes, dtypes and devices of ``inputs`` are as :class:`~flash_delta.problem.Inputs` and the problem say. Strides
    may be any. Values of ``cu_seqlens`` and of indices may be wrong, but must not make a kernel touch other memory.
    Autocast is off. ``problem.steps`` is 1 unless the backend has a ``takes_steps(problem)`` that is True.

    ``known``: None, or an object that is the same for all calls that differ only in their tensors' values. A backend
    may keep in ``known.launches`` what it found about the call, or may ignore ``known``.
    """

    def unsupported(self, problem: Problem) -> str | None:
        """Why this backend cannot run ``problem``, as the end of a sentence; None if it can. Only the problem decides.
        The function has to be quick, since it is called for every call of new sizes. While torch.compile traces, sizes
        may be symbols."""

    def preference(self, problem: Problem) -> Preference:
        """The backend's preference for ``problem``, even if it does not support it. The backend with the highest number
        is asked first; of equal ones, that which was registered first. The number must not depend on lengths, or else a
        longer call would compile another backend's kernels. Below 0, a call on a GPU gives a warning."""

    def remark(self, problem: Problem) -> str | None:
        """What `explain` says about how this backend would run ``problem``, or None."""

    def forward(self, problem: Problem, inputs: Inputs, known: KnownCall | None = None) -> Outputs:
        """Runs whole sequences.

        Returns:
            * ``o`` of ``problem.o_shape`` in ``problem.dtype``. In a packed ``o``, rows after the last sequence are 0.
            * ``final_state`` of ``problem.state_shape`` in ``problem.accumulate``, always, and in its own memory.
            * With ``problem.needs_grad``: ``saved``, which ``backward`` needs, and ``planned``, which saves it work.
            * With ``problem.keep_states``: ``states``, those at the chunks' starts.
        """

    def backward(
        self, problem: Problem, inputs: Inputs, saved: tuple[Tensor, ...], do: Tensor, dfinal: Tensor | None,
        known: KnownCall | None = None,
    ) -> Inputs:  # fmt: skip
        """Gradients of all inputs, in their shapes and dtypes; None for what is None. ``do`` and ``dfinal`` may have
        any strides. ``saved`` is what ``forward`` saved, and then ``planned``, except under torch.compile. It is
        empty after ``step``, and under torch.compile without ``empty_saved``. Under torch.compile autograd records
        nothing in this function."""

    def step(self, problem: Problem, inputs: Inputs, known: KnownCall | None = None) -> Outputs:
        """Runs ``forward`` token by token. T calls of one token, which pass the state on, give the bits of one call."""

    def decode(
        self, problem: Problem, inputs: Inputs, slots: Slots, around: Around, known: KnownCall | None = None
    ) -> Tensor:
        """Runs one token or a draft of every row, on a pool of states that is written in place. Returns
        ``o [B, T, HV, V]``, contiguous, in ``problem.dtype``, or ``slots.out`` if there is one. An index outside of the
        pool, or ``problem.pools.null_slot``, reads zeros and writes nothing. If there is a ``slots.write_pool``, that
        pool is written and the other one only read. With ``most_tokens`` of ``problem.pools`` rows are packed, with
        ``taps`` a short convolution comes before the rule, with ``eps`` a gated norm of o (rounded or not) after it,
        and with ``records`` tokens leave no states, but records (:class:`flash_delta.ops.serving.Ring`)."""

    def commit(self, problem: Problem, inputs: Inputs, slots: Slots, known: KnownCall | None = None) -> None:
        """Applies records to the states of all layers. Their k, u and decays are ``inputs.k``, ``.v`` and ``.g``."""

    def prefill(
        self, problem: Problem, inputs: Inputs, slots: Slots, around: Around, known: KnownCall | None = None
    ) -> Tensor:
        """Runs packed sequences from their states in a pool, which is written in place. Returns ``o [1, T, HV, V]``,
        contiguous, in ``problem.dtype``, or ``slots.out`` if there is one. Convolution and norm ``around`` the rule are
        as in ``decode``, except that o is rounded before the norm. Windows are read and written wherever states are,
        also at checkpoints."""

    def workspace_bytes(self, problem: Problem, inputs: Inputs, slots: Slots, around: Around) -> int:
        """The bytes that ``prefill`` or ``decode`` allocates besides ``o``. Tensors may be on "meta"."""

    def plans(self, problem: Problem, inputs: Inputs, *on_pool: tuple[Tensor | None, ...]) -> dict[str, Any]:
        """What each pass launches, as text a line for each. ``on_pool``: `Slots`, `Around`. It may be missing."""

    def empty_saved(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, ...]:
        """New tensors with the shapes, strides and dtypes of those that ``forward`` saves, for torch.compile. They are
        computed from sizes, which may be symbols. ``problem.lengths`` has no values then. This function may be missing.
        Then ``problem.needs_grad`` is False in a compiled ``forward``, and nothing is saved."""


class ElementwiseBackend(Protocol):
    """Short convolution, RMS norm and gate around the rule, and states at rest in int8. Ops run the first three in one
    autograd Function, and under torch.compile in operators. Only inputs are saved. `IN_TORCH` alone lacks
    ``gate_backward``; a backend without such kernels may use it. ``known`` is as in :class:`Backend`. A backend may
    also have ``convolve_heads``, ``convolve_heads_backward`` and ``normalize_backward_to``, as in
    `kernels/triton/elementwise/backend.py`. Then a mixer is one node of autograd. Otherwise its parts run one by one.
    """

    def unsupported(self, problem: ElementwiseProblem) -> str | None:
        """Returns what :meth:`Backend.unsupported` returns."""

    def preference(self, problem: ElementwiseProblem) -> Preference:
        """Returns what :meth:`Backend.preference` returns."""

    def convolve(
        self, problem: ConvolutionProblem, inputs: Convolved, known: KnownCall | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """``y [B, T, D]``, and the final state ``[N, D, W]`` if the problem asks for it; both contiguous."""

    def convolve_backward(
        self, problem: ConvolutionProblem, inputs: Convolved, dy: Tensor | None, dfinal: Tensor | None,
        known: KnownCall | None = None,
    ) -> Convolved:  # fmt: skip
        """Gradients of the four inputs with values; None for what is None. ``dy`` or ``dfinal`` None means zeros."""

    def convolve_token(self, problem: ConvolutionProblem, inputs: Convolved, known: KnownCall | None = None) -> Tensor:
        """``y [N, D]`` for one token ``x [N, D]`` of every row. ``initial_state`` is updated in place."""

    def normalize(self, problem: NormProblem, inputs: Normalized, known: KnownCall | None = None) -> Tensor:
        """``y`` in x's shape and ``problem.output_dtype``, contiguous."""

    def normalize_backward(
        self, problem: NormProblem, inputs: Normalized, dy: Tensor, known: KnownCall | None = None
    ) -> Normalized:
        """Gradients of all inputs, in their shapes and dtypes; None for what is None."""

    def gate(self, problem: GateProblem, inputs: Gated, known: KnownCall | None = None) -> Tensor:
        """Log decays in g's shape and ``problem.output_dtype``, contiguous."""

    def gate_backward(self, problem: GateProblem, inputs: Gated, dy: Tensor, known: KnownCall | None = None) -> Gated:
        """Gradients of all inputs, in their shapes and dtypes; None for what is None."""

    def move_states(self, problem: Int8Problem, inputs: Resting, known: KnownCall | None = None) -> None:
        """Rounds states of the pool to int8, or with ``problem.restores`` restores them. For padding nothing moves."""


class Entry(NamedTuple):
    rule: str  # name of the module that is a Backend
    elementwise: str | None  # name of the module that is an ElementwiseBackend
    takes_cpu: Callable[[], bool]  # whether to import it for tensors on the CPU


_entries: dict[str, Entry] = {}
_importing = RLock()  # threads import one after the other: Triton's modules need each other


def register(
    name: str, rule: str, elementwise: str | None = None, *, takes_cpu: Callable[[], bool] = lambda: False
) -> None:
    """Adds a backend, which callers can ask for by ``name``. Register it before the first call, because a call like an
    earlier one stays with the backend that was chosen then.

    Args:
        name: the name for ``backend=`` and ``FLASH_DELTA_BACKEND``.
        rule: the name of a module that is a :class:`Backend`. It is imported when a call first needs it.
        elementwise: the name of a module that is an :class:`ElementwiseBackend`, its own or another backend's. Layers
            ask for their convolutions and norms by the same ``name``. None: such calls are refused.
        takes_cpu: whether it is worth importing for tensors on the CPU. By default it is not: calls are refused.

    Raises:
        ValueError: if the name is taken.
    """
    if name in _entries:
        raise ValueError(f"name: expected a name that is not taken ({', '.join(_entries)}), got {name!r}")
    _entries[name] = Entry(rule, elementwise, takes_cpu)


def unregister(name: str) -> None:
    """Removes a backend. The process may still remember calls on it, so it should not make such calls again."""
    find(name)
    del _entries[name]
    _module.cache_clear()


def names() -> tuple[str, ...]:
    return tuple(_entries)


def find(name: str) -> Entry:
    if name not in _entries:
        raise ValueError(f"backend: expected one of {', '.join(_entries)}, got {name!r}")
    return _entries[name]


def load(name: str) -> ModuleType:
    """The module that is a :class:`Backend`."""
    return _module(find(name).rule)


def plans_on_host(backend: ModuleType) -> bool:
    """Whether ops have to wait for the device and read the lengths of packed sequences for this backend."""
    return getattr(backend, "plans_on_host", False)


def load_elementwise(name: str) -> ModuleType | None:
    """The module that is an :class:`ElementwiseBackend`, or None."""
    module = find(name).elementwise
    return module and _module(module)


@cache
def _module(name: str) -> ModuleType:
    """The complete module."""
    with _importing:
        return importlib.import_module(name)


IN_TORCH = f"{PACKAGE}.reference.elementwise"  # PyTorch's own operations, which autograd and compilers can follow


def is_seen_through(name: str) -> bool:
    """Whether a backend uses `IN_TORCH`. A tracer can follow this function, since it imports nothing."""
    return find(name).elementwise == IN_TORCH


_kernels, _elementwise = f"{PACKAGE}.kernels", f"{PACKAGE}.kernels.triton.elementwise.backend"
register("triton", f"{_kernels}.triton.backend", _elementwise, takes_cpu=lambda: "TRITON_INTERPRET" in os.environ)
register("hopper", f"{_kernels}.hopper.backend", _elementwise)
TORCH = "torch"  # PyTorch's own operations
register(TORCH, f"{PACKAGE}.reference.backend", IN_TORCH, takes_cpu=lambda: True)
