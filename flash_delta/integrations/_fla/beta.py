"""What fla's ``allow_neg_eigval`` says about a beta that is given."""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

NAME = "allow_neg_eigval"
Op = TypeVar("Op", bound=Callable[..., Any])


def as_in_fla(op: Op) -> Op:
    """The op, for which False means None. False is fla's default, so it says nothing about a beta that is given."""
    place = [*signature(op).parameters].index(NAME)

    @wraps(op)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > place and args[place] is False:
            args = (*args[:place], None, *args[place + 1 :])
        if kwargs.get(NAME) is False:
            kwargs[NAME] = None
        return op(*args, **kwargs)

    return cast(Op, call)
