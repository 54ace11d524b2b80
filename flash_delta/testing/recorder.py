"""A backend that keeps the calls of a model's layers. PyTorch's backend runs them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import nn

from flash_delta.backend import register, unregister
from flash_delta.problem import Inputs, KnownCall, Outputs, Problem
from flash_delta.reference import backend as torch_backend


class Call(NamedTuple):
    layer: str  # the name of the module that made the call
    problem: Problem
    x: Inputs


_calls: list[Call] = []
_running: list[str] = []  # modules whose forward runs, the innermost last


@contextmanager
def recording(model: nn.Module) -> Iterator[list[Call]]:
    """Gives the list to which the model's layers add their calls in this block. Calls that name a backend, by
    ``backend=`` or by the environment, run there and are not in the list."""
    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: _running.append(name)))
        hooks.append(module.register_forward_hook(lambda *_: _leave(), always_call=True))
    register("recorder", __name__, takes_cpu=lambda: True)
    try:
        yield _calls
    finally:
        unregister("recorder")
        for hook in hooks:
            hook.remove()
        _calls.clear()


def _leave() -> None:  # what a hook returns would take the place of the module's output
    _running.pop()


def unsupported(problem: Problem) -> str | None:
    if problem.needs_grad or problem.pools is not None:
        return "it keeps calls without gradients, and without pools"
    return torch_backend.unsupported(problem)


def preference(problem: Problem) -> tuple[int, str | None]:
    return 100, None


def remark(problem: Problem) -> str | None:
    return "it keeps the call"


def forward(problem: Problem, x: Inputs, known: KnownCall | None = None) -> Outputs:
    _calls.append(Call(_running[-1], problem, x))
    return torch_backend.forward(problem, x, known)


def step(problem: Problem, x: Inputs, known: KnownCall | None = None) -> Outputs:
    _calls.append(Call(_running[-1], problem, x))
    return torch_backend.step(problem, x, known)
