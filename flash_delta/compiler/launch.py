"""What a module of kernels offers to those who compile them."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Launch(NamedTuple):
    """One launch that a table of tiles can select on a target. A module yields them from ``launches(target)``.

    ``call`` calls the real launcher with tensors of device "meta". The kernel that it would run gets compiled.
    """

    name: str
    call: Callable[[], Any]
