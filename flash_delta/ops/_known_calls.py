"""The one memory of calls: what was found of a call holds for all that differ from it in their tensors' values only.

To check a call, and to choose its backend, takes longer than to launch it.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, is_grad_enabled
from torch._C import _len_torch_dispatch_stack as count_modes
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from flash_delta.kernels.runtime import fastcall
from flash_delta.problem import KnownCall

MOST = 1024  # calls of a generation; each takes some kilobytes


class Remembered(dict):
    """By all that can change what is found; ``remembered[key]`` is None of a call that is not known.

    There are two generations: these items, and those of the ``old`` one, which come back when they are asked for. When
    there are too many, these become the old ones, and what of those was not asked for all the while is forgotten, one
    for every call that is remembered from then on: so a call that comes again and again stays, however many others
    come in between, nothing is ever forgotten in one go, and to find a call takes no more than a look into a dict.
    """

    def __init__(self) -> None:
        self.old: dict[Any, Any] = {}
        self.forgotten: list[Any] = []

    def __missing__(self, key: Any) -> Any:
        found = self.old.get(key)
        if found is not None:
            self[key] = found
        return found

    def __setitem__(self, key: Any, found: Any) -> None:
        if len(self) >= MOST:
            self.forgotten += self.old.values()
            self.old = dict(self)
            super().clear()
        super().__setitem__(key, found)
        del self.forgotten[-1:]

    def clear(self) -> None:
        super().clear()
        self.old = {}


calls = Remembered()


def recall(given: tuple[Any, ...], x: tuple[Tensor | None, ...]) -> KnownCall | None:
    """What `look_at` has found of a call on a GPU. None: it is not known, or more has to be asked, since it may be
    traced, there may be tangents, or its tensors are no plain ones."""
    if is_dynamo_compiling() or not getattr(x[0], "is_cuda", False) or count_modes() or forward_ad._current_level >= 0:
        return None
    try:
        key = fastcall.key(is_grad_enabled(), x)
        return calls[given, key] if type(key) is bytes else None  # C's: of plain tensors
    except (AttributeError, TypeError, RuntimeError):
        return None


def look_at(
    make: Callable[..., KnownCall],
    gradients: bool,
    given: tuple[Any, ...],
    options: dict[str, Any] | None,
    *groups: tuple[Tensor | None, ...],
) -> KnownCall:
    """The known call, or what ``make(given, options, *groups)`` finds, which is remembered.

    Args:
        make: checks the call and chooses its backend; raises ValueError for what is wrong.
        gradients: whether autograd is on.
        given: all that decides about the call beside its tensors: the op, the backend that is asked for, options.
        options: the same options by name, for ``make``.
        groups: the call's tensors, as named tuples.
    """
    try:
        key = (given, fastcall.key(gradients, *groups))
        found = calls[key]
    except (AttributeError, TypeError, RuntimeError):  # no tensor, no number, or wrapped: the checks will name it
        return make(given, options, *groups)
    if found is None:
        found = calls[key] = make(given, options, *groups)
    return found
