"""The memory of calls. It keeps what was found about a call, for later calls that differ only in tensors' values.

To check a call and to choose its backend takes longer than to launch it.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, is_grad_enabled
from torch._C import _len_torch_dispatch_stack as count_modes
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from flash_delta.kernels.runtime import fastcall
from flash_delta.problem import KnownCall

MOST = 1024  # calls in a generation; each takes some kilobytes


class Remembered(dict):
    """What is known about calls, by keys of everything that matters. ``remembered[key]`` is None for unknown calls.

    There are two generations: the items of this dict, and those of ``old``. An old item that is looked up becomes an
    item of this dict again. When this dict is full, its items become the old ones. Old items that were not looked up
    until then are forgotten, one for each call that is remembered afterwards. So a call that comes again and again
    stays, no matter how many others come between. Calls are never forgotten all at once, and a look-up is fast.
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
    """What `look_at` has found about a call on a GPU. None if the call is not known, or needs more checks because it
    may be traced, may have tangents, or has tensors that are not plain."""
    if is_dynamo_compiling() or not getattr(x[0], "is_cuda", False) or count_modes() or forward_ad._current_level >= 0:
        return None
    try:
        key = fastcall.key(is_grad_enabled(), x)
        return calls[given, key] if type(key) is bytes else None  # bytes: the C module made it, of plain tensors
    except (AttributeError, TypeError, RuntimeError):
        return None


def look_at(
    make: Callable[..., KnownCall],
    gradients: bool,
    given: tuple[Any, ...],
    options: dict[str, Any] | None,
    *groups: tuple[Tensor | None, ...],
) -> KnownCall:
    """The known call. If there is none, ``make(given, options, *groups)`` makes it, and it is remembered.

    Args:
        make: checks the call and chooses its backend; raises ValueError for what is wrong.
        gradients: whether autograd is on.
        given: all that matters about the call except its tensors: the op, the backend that is asked for, options.
        options: the same options by name, for ``make``.
        groups: the call's tensors, as named tuples.
    """
    try:
        key = (given, fastcall.key(gradients, *groups))
        found = calls[key]
    except (AttributeError, TypeError, RuntimeError):  # not a tensor, not a number, or wrapped: the checks will name it
        return make(given, options, *groups)
    if found is None:
        found = calls[key] = make(given, options, *groups)
    return found
