"""Records of what was replaced in other libraries' modules, and of what was not."""

from __future__ import annotations

from collections.abc import Callable
from inspect import getclosurevars, isclass, isfunction
from types import ModuleType
from typing import Any, NamedTuple


class Replaced(NamedTuple):
    """``owner.name`` was ``old`` and is ``new``."""

    owner: ModuleType | type
    name: str
    old: Any
    new: Callable[..., Any]

    @property
    def module(self) -> str:
        return self.owner.__module__ if isclass(self.owner) else self.owner.__name__

    def __str__(self) -> str:
        name = f"{self.owner.__name__}.{self.name}" if isclass(self.owner) else self.name
        return f"{name}: {_describe(self.old)} -> {_describe(self.new)}"


class Refused(NamedTuple):
    """A module in which nothing is replaced, because of one name in it."""

    module: str
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.module}: {self.name}: {self.reason}"


def _describe(function: Any) -> str:
    """The name of the function that computes. transformers' wrapper calls fla's op if fla can be imported, and our
    replacement in fla calls our op."""
    function = function.fget if isinstance(function, property) else function
    if isinstance(function, bool):
        return str(function)
    if isfunction(function):
        inner = vars(function).get("implementation") or getclosurevars(function).nonlocals.get("implementation")
        function = inner or function
    label = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{label} of {function.__module__.split('.')[0]}"
