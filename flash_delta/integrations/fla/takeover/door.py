"""Decides which of fla's calls our functions run. It decides once for calls that differ only in tensors' values."""

import logging
import os
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flash_delta.ops._known_calls import Remembered

SWITCH = "FLA_FLASH_DELTA"
MOST_REASONS = 16  # reasons that are kept per function, for people to read

CPU = torch.device("cpu")

_logger = logging.getLogger("flash_delta")

Refusal = Callable[..., str | None]


class Taken(NamedTuple):
    """A function of fla, and our function with the same names of arguments."""

    ours: Callable[..., Any]
    refusal: Refusal  # takes a call's arguments; why ours leaves the call to fla, or None. It may raise ValueError
    paths: tuple[str, ...]  # where fla has it; the first one that exists in a version counts
    operation: str | None = None  # its name in fla's registry, if that is not the function's name
    keywords: tuple[str, ...] = ()  # the names that fla reads from its **kwargs


class Door:
    """The way of calls of one function of fla. ``refusal`` says why a call stays with fla, and ``run`` calls our
    function."""

    def __init__(self, taken: Taken, theirs: Callable[..., Any]):
        parameters = signature(theirs).parameters.values()
        self.name, self.taken = taken.ours.__name__, taken
        self.positions = [p.name for p in parameters if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
        self.names = {p.name for p in parameters if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)}
        if any(p.kind is Parameter.VAR_KEYWORD for p in parameters):
            self.names |= {*taken.keywords}
        self.names &= {*signature(taken.ours).parameters}
        self.known = Remembered()
        self.left: dict[str, None] = {}

    def refusal(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Why the call stays with fla, or None."""
        why = self._look(args, kwargs)
        if why is not None and why not in self.left and len(self.left) < MOST_REASONS:
            self.left[why] = None
            _logger.info("%s is left to fla: %s", self.name, why)
        return why

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self.taken.ours(**self._arguments(args, kwargs))

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        arguments = dict(zip(self.positions, args, strict=False), **kwargs)
        if arguments.get("output_final_state", False) is None:  # a layer passes its use_cache, which may be None
            arguments["output_final_state"] = False
        return arguments

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        if len(args) > len(self.positions) or not kwargs.keys().isdisjoint(self.positions[: len(args)]):
            return "the arguments are not those of the function"
        arguments = self._arguments(args, kwargs)
        try:
            key = _key(arguments)
            found = self.known[key]
        except (TypeError, RuntimeError):  # it cannot be a key, or a tensor has no values: do not remember it
            return self._ask(arguments)
        if found is None:
            found = self.known[key] = (self._ask(arguments),)
        return found[0]

    def _ask(self, arguments: dict[str, Any]) -> str | None:
        unknown = arguments.keys() - self.names
        if unknown:
            return f"{', '.join(sorted(unknown))}: no such argument here"
        for name, value in arguments.items():
            if isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter):
                return f"{name}: expected a plain tensor, got a {type(value).__name__}"
        try:
            return self.taken.refusal(**arguments)
        except (ValueError, TypeError, AttributeError, IndexError) as error:  # wrong calls too: fla raises their error
            return str(error).removeprefix(f"{self.name}: ")


def stand_in(door: Door, theirs: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement for a function that is not in fla's registry. Compilers do not trace it, nor the registry."""

    @wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        if os.environ.get(SWITCH) == "0" or door.refusal(args, kwargs) is not None:
            return theirs(*args, **kwargs)
        return door.run(*args, **kwargs)

    call.implementation = door.taken.ours  # for reports
    return torch.compiler.disable(call)


def _key(arguments: dict[str, Any]) -> tuple[Any, ...]:
    """Everything about a call that may matter for the decision. For bounds on the host, this includes their values."""
    key = [torch.is_grad_enabled(), *arguments]
    for value in arguments.values():
        key.append(type(value))
        if isinstance(value, Tensor):
            key += (value.shape, value.dtype, value.device, value.requires_grad)
            if value.device == CPU and not value.is_floating_point():
                key.append(tuple(value.flatten().tolist()))
        else:
            key.append(tuple(value) if isinstance(value, list) else value)
    return tuple(key)
