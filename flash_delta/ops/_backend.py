"""Which backend runs a problem: one page of ifs."""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from flash_delta.kernels.hopper.choice import hesitation
from flash_delta.problem import ENVIRONMENT, ConvolutionProblem, NormProblem, Problem

Call = Problem | ConvolutionProblem | NormProblem
Load = Callable[[str], ModuleType]

# The preferred one first, but for `preferred`. Loaded when asked for: the kernels need Triton, which a CPU can do
# without. "hopper" runs nothing that "triton" cannot.
BACKENDS = {
    "triton": "flash_delta.kernels.triton.backend",
    "hopper": "flash_delta.kernels.hopper.backend",
    "torch": "flash_delta.reference.backend",
}
MODULES = {  # of the convolution and the norms around the rule; "hopper" has none of its own and stands on "triton"
    "triton": "flash_delta.kernels.triton.around.backend",
    "hopper": "flash_delta.kernels.triton.around.backend",
    "torch": "flash_delta.reference.modules",
}


def load_backend(name: str) -> ModuleType:
    """The module behind a name: ``unsupported``, ``remark``, ``forward``, ``backward``, ``step``, ``decode``,
    ``prefill``."""
    return _load(name, BACKENDS)


def load_modules(name: str) -> ModuleType:
    """The same around the rule: ``unsupported``, ``convolve``, ``convolve_token``, ``normalize``; of kernels also
    ``convolve_backward`` and ``normalize_backward``."""
    return _load(name, MODULES)


def check_name(name: str) -> None:
    if name not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {name!r}")


def _load(name: str, backends: dict[str, str]) -> ModuleType:
    check_name(name)
    return sys.modules.get(backends[name]) or importlib.import_module(backends[name])


def refusal(name: str, problem: Call, load: Load | None = None) -> str | None:
    """Why a backend cannot run ``problem``; None if it can."""
    on_cpu = problem.device.type == "cpu"
    if on_cpu and (name == "hopper" or (name == "triton" and not os.environ.get("TRITON_INTERPRET"))):
        return "it needs a GPU, the tensors are on the CPU"  # said without importing Triton
    try:
        return (load or load_backend)(name).unsupported(problem)
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"


def preferred(problem: Call) -> list[str]:
    """All backends, the first choice first; the interpreter of kernels is never the choice of a CPU."""
    if problem.device.type == "cpu":
        return sorted(BACKENDS, key="torch".__ne__)
    hopper = isinstance(problem, Problem) and hesitation(problem) is None
    return sorted(BACKENDS, key="hopper".__ne__) if hopper else list(BACKENDS)


def wished(wish: str | None) -> str | None:
    """The caller's wish, else the environment's, else None."""
    if wish:
        return wish
    name = os.environ.get(ENVIRONMENT) or None
    if name is not None and name not in BACKENDS:
        raise ValueError(f"{ENVIRONMENT}: expected one of {', '.join(BACKENDS)}, got {name!r}")
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
    for name in preferred(problem):
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
            check_name(wish)
        refusals = {name: refusal(name, problem) for name in preferred(problem)}
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
                why = hesitation(problem) if (name, chosen) == ("hopper", "triton") else None
                reasons[name] = f"can, but {chosen!r} is preferred" + ("" if why is None else f": {why}")
        return Explanation(problem, chosen, reasons)
