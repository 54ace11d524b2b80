"""Chooses the backend that runs a problem."""

import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from textwrap import indent
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import flash_delta.backend as backends
from flash_delta.ops._execute import interleaved, takes_steps
from flash_delta.problem import ENVIRONMENT, ElementwiseProblem, Problem

Call = Problem | ElementwiseProblem
Load = Callable[[str], ModuleType | None]
Offer = tuple[float, str, ModuleType | str, str | None]
DISABLED = "FLASH_DELTA_DISABLE"  # the variable that names backends on which no call runs
CPU = torch.device("cpu")  # comparing with it takes a tenth of the time of `device.type`
NOWHERE = -math.inf  # the preference of a backend that cannot be asked

load_backend, load_elementwise = backends.load, backends.load_elementwise


def _offers(problem: Call, load: Load) -> list[Offer]:
    """All backends by preference, highest first. Those that cannot be asked come last, in the order of registration."""
    on_cpu, offers = problem.device == CPU, []
    for name in backends.names():
        module = _find(name, on_cpu, load)
        eager, why = (NOWHERE, None) if isinstance(module, str) else module.preference(problem)
        offers.append((eager, name, module, why))
    offers.sort(key=itemgetter(0), reverse=True)
    return offers


def _find(name: str, on_cpu: bool, load: Load) -> ModuleType | str:
    """The module of a backend, or the reason why there is none for this call."""
    if name in _disabled():
        return f"{DISABLED} turns it off"
    if on_cpu and not backends.find(name).takes_cpu():
        return "it needs a GPU, the tensors are on the CPU"  # known without importing Triton
    try:
        return load(name) or "it has nothing for this"
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"


def _refusal(module: ModuleType | str, problem: Call) -> str | None:
    return module if isinstance(module, str) else module.unsupported(problem)


def _disabled() -> list[str]:
    """The backends that the environment turns off."""
    names = [name.strip() for name in os.environ.get(DISABLED, "").split(",") if name.strip()]
    for name in names:
        if name not in backends.names():
            raise ValueError(f"{DISABLED}: expected some of {', '.join(backends.names())}, got {name!r}")
    return names


def refuse_disabled(op: str, name: str) -> None:
    """Refuse a backend that the environment turns off, where no backend is asked what it can run."""
    if name in _disabled():
        raise ValueError(f"{op}: backend {name!r} cannot run this: {DISABLED} turns it off")


def wished(wish: str | None) -> str | None:
    """The backend that the caller names, or else the one that the environment names, or None."""
    if wish:
        return wish
    name = os.environ.get(ENVIRONMENT) or None
    if name is not None and name not in backends.names():
        raise ValueError(f"{ENVIRONMENT}: expected one of {', '.join(backends.names())}, got {name!r}")
    return name


def choose_backend(
    problem: Call, wish: str | None, load: Load | None = None, without: ModuleType | None = None, quiet: bool = False
) -> str:
    """The backend that is wished for, or an error. Without a wish: the first backend that can run the problem. If that
    is PyTorch on a GPU, a warning says so, unless ``quiet``.

    ``without``: a module that is left out. ``load``: `load_elementwise`, for problems around the rule.
    """
    wish, load, refusals = wished(wish), load or load_backend, []
    if wish is not None:
        reason = _refusal(_find(wish, problem.device == CPU, load), problem)
        if reason is not None:
            raise ValueError(f"{problem.op}: backend {wish!r} cannot run this: {reason}")
        return wish
    for preference, name, module, _ in _offers(problem, load):
        if module is without:
            continue
        reason = _refusal(module, problem)
        if reason is None:
            # Float64 is there to compare with, and only PyTorch computes in it.
            if preference < 0 and problem.device.type == "cuda" and problem.dtype != torch.float64 and not quiet:
                why = f"{problem.op}: no kernel can run this, so it runs on {name!r}, which is slow on a GPU"
                warnings.warn("; ".join([why, *refusals]), stacklevel=2)
            return name
        refusals.append(f"{name!r}: {reason}")
    raise ValueError(f"{problem.op}: no backend can run this. {'; '.join(refusals)}")


@dataclass(frozen=True)
class Explanation:
    """What a call would do; made by :func:`flash_delta.explain`.

    Example:
        >>> import torch
        >>> from flash_delta import chunk_delta_rule, explain
        >>> x = torch.randn(1, 64, 2, 32)
        >>> explanation = explain(chunk_delta_rule, x, x, x, torch.rand(1, 64, 2), backend="hopper")
        >>> explanation.backend is None, explanation.reasons["hopper"]
        (True, 'cannot: it needs a GPU, the tensors are on the CPU')
    """

    problem: Problem
    backend: str | None  # the backend that would run; None: the call would be refused
    reasons: dict[str, str]  # per backend: why, or why not
    groups: tuple[Any, ...] = field(default=(), repr=False)  # the call's tensors, as backends take them
    launches: dict[str, str] = field(default_factory=dict)  # of each pass: a line per kernel; empty unless asked for

    def __str__(self) -> str:
        head = f"{self.problem.op} would run on backend {self.backend!r}"
        if self.backend is None:
            head = f"{self.problem.op} would be refused"
        lines = [f"  {name}: {reason}" for name, reason in self.reasons.items()]
        for name, launches in self.launches.items():
            lines += [f"{name}:", indent(launches, "  ")]
        return "\n".join([head, *lines])


@dataclass(frozen=True)
class Explain:
    """Given as ``backend``, it makes an op return an :class:`Explanation` instead of running."""

    wish: str | None = None
    launches: bool = False

    def of(self, problem: Problem, *groups: tuple[Tensor | None, ...]) -> Explanation:
        """``groups``: the call's tensors, as backends take them."""
        wish, launches = wished(self.wish), {}
        if self.launches and problem.device.type == "meta" and torch.cuda.is_available():
            problem = problem._replace(device=torch.device("cuda", torch.cuda.current_device()))
        if wish is not None:  # a backend that is not installed is a refusal; a name that does not exist is an error
            backends.find(wish)
        offers = _offers(problem, load_backend)
        refusals = {name: _refusal(module, problem) for _, name, module, _ in offers}
        hesitations = {name: why for _, name, _, why in offers}
        able = [name for name, why in refusals.items() if why is None and name == (wish or name)]
        chosen = able[0] if able else None
        reasons = {}
        for name, why in refusals.items():
            if why is not None:
                reasons[name] = f"cannot: {why}"
            elif name == chosen:
                how = load_backend(name).remark(problem)
                reasons[name] = "chosen, as asked for" if wish else "chosen, the first that can"
                reasons[name] += "" if how is None else f"; {how}"
            elif wish:
                reasons[name] = f"can, but {wish!r} was asked for"
            else:
                why = hesitations[name]
                reasons[name] = f"can, but {chosen!r} is preferred" + ("" if why is None else f": {why}")
        if self.launches and chosen is not None and hasattr(load_backend(chosen), "plans"):
            module, run, given = load_backend(chosen), problem, groups
            if not takes_steps(module, problem):
                run, given = problem._replace(steps=1), (interleaved(problem.steps, groups[0]),)
            launches = {name: str(plan) for name, plan in module.plans(run, *given).items()}
        return Explanation(problem, chosen, reasons, groups, launches)
