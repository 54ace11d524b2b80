"""Which backend runs a problem: one page of ifs."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import flash_delta.backend as backends
from flash_delta.problem import ENVIRONMENT, ConvolutionProblem, NormProblem, Problem

Call = Problem | ConvolutionProblem | NormProblem
Load = Callable[[str], ModuleType | None]
NOWHERE = -(10**9)  # how eager a backend is that is not there

load_backend, load_modules = backends.load, backends.load_around


def refusal(name: str, problem: Call, load: Load | None = None) -> str | None:
    """Why a backend cannot run ``problem``; None if it can."""
    if problem.device.type == "cpu" and not backends.takes_cpu(name):
        return "it needs a GPU, the tensors are on the CPU"  # said without importing Triton
    try:
        module = (load or load_backend)(name)
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    return "it has nothing for this" if module is None else module.unsupported(problem)


def preferred(problem: Call, load: Load | None = None) -> dict[str, str | None]:
    """All backends, the most eager first, and why each is not more so."""
    found = {name: _preference(name, problem, load or load_backend) for name in backends.names()}
    order = sorted(found, key=lambda name: -found[name][0])
    return {name: found[name][1] for name in order}


def _preference(name: str, problem: Call, load: Load) -> backends.Preference:
    if problem.device.type == "cpu" and not backends.takes_cpu(name):
        return NOWHERE, None
    try:
        module = load(name)
    except ModuleNotFoundError:
        return NOWHERE, None
    return (NOWHERE, None) if module is None else module.preference(problem)


def wished(wish: str | None) -> str | None:
    """The caller's wish, else the environment's, else None."""
    if wish:
        return wish
    name = os.environ.get(ENVIRONMENT) or None
    if name is not None and name not in backends.names():
        raise ValueError(f"{ENVIRONMENT}: expected one of {', '.join(backends.names())}, got {name!r}")
    return name


def choose_backend(problem: Call, wish: str | None, load: Load | None = None) -> str:
    """A wish is obeyed or refused; without one, the first that can. ``load``: `load_modules` for what is around."""
    wish = wished(wish)
    if wish is not None:
        reason = refusal(wish, problem, load)
        if reason is not None:
            raise ValueError(f"{problem.op}: backend {wish!r} cannot run this: {reason}")
        return wish
    refusals = []
    for name in preferred(problem, load):
        reason = refusal(name, problem, load)
        if reason is None:
            return name
        refusals.append(f"{name!r}: {reason}")
    raise ValueError(f"{problem.op}: no backend can run this. {'; '.join(refusals)}")


@dataclass(frozen=True)
class Explanation:
    """What a call would do; made by :func:`flash_delta.explain`."""

    problem: Problem
    backend: str | None  # the one that would run; None: the call would be refused
    reasons: dict[str, str]  # per backend: why, or why not

    def __str__(self) -> str:
        head = f"{self.problem.op} would run on backend {self.backend!r}"
        if self.backend is None:
            head = f"{self.problem.op} would be refused"
        return "\n".join([head, *(f"  {name}: {reason}" for name, reason in self.reasons.items())])


@dataclass(frozen=True)
class Explain:
    """Given as ``backend``, it makes an op return an :class:`Explanation` instead of running."""

    wish: str | None = None

    def of(self, problem: Problem) -> Explanation:
        wish = wished(self.wish)
        if wish is not None:  # what is not installed is a refusal, which a name that does not exist is not
            backends.find(wish)
        eager = preferred(problem)
        refusals = {name: refusal(name, problem) for name in eager}
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
                why = eager[name]
                reasons[name] = f"can, but {chosen!r} is preferred" + ("" if why is None else f": {why}")
        return Explanation(problem, chosen, reasons)
