"""Which backend runs a problem: one page of ifs."""

import os
from dataclasses import dataclass
from types import ModuleType

from flash_delta.problem import Problem
from flash_delta.reference import chunked

BACKENDS = ("torch",)  # the preferred one first
ENVIRONMENT = "FLASH_DELTA_BACKEND"


def load_backend(name: str) -> ModuleType:
    """The module behind a name: ``unsupported``, ``forward``, ``backward``, ``step``."""
    if name == "torch":
        return chunked
    raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {name!r}")


def wished(wish: str | None) -> str | None:
    """The caller's wish, else the environment's, else None."""
    return wish or os.environ.get(ENVIRONMENT) or None


def choose_backend(problem: Problem, wish: str | None) -> str:
    """A wish is obeyed or refused; without one, the first that can."""
    wish = wished(wish)
    if wish is not None:
        reason = load_backend(wish).unsupported(problem)
        if reason is not None:
            raise ValueError(f"{problem.op}: backend {wish!r} cannot run this: {reason}")
        return wish
    refusals = []
    for name in BACKENDS:
        reason = load_backend(name).unsupported(problem)
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
        refusals = {name: load_backend(name).unsupported(problem) for name in BACKENDS}
        able = [name for name, refusal in refusals.items() if refusal is None]
        if wish is not None:
            load_backend(wish)
            able = [name for name in able if name == wish]
        chosen = able[0] if able else None
        reasons = {}
        for name, refusal in refusals.items():
            if refusal is not None:
                reasons[name] = f"cannot: {refusal}"
            elif name == chosen:
                reasons[name] = "chosen, as asked for" if wish else "chosen, the first that can"
            else:
                reasons[name] = f"can, but {wish or chosen!r} {'was asked for' if wish else 'is preferred'}"
        return Explanation(problem, chosen, reasons)
