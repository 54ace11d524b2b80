"""What a module of kernels offers to the compile gate and to the tuner."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


class Launch(NamedTuple):
    """One launch that a table of tiles can select on a target. A module yields them from ``launches(target)``.

    ``call`` calls the real launcher with tensors of device "meta". The kernel that it would run gets compiled.
    """

    name: str
    call: Callable[[], Any]


class Stage(NamedTuple):
    """A kernel with several possible tiles. A module lists its stages by name in ``STAGES``."""

    sizes: tuple[int, ...]  # the sizes that a row of the table is for, e.g. (K, V)
    tiles: Callable[[str], list[Any]]  # target -> tiles worth trying: those that may fit
    make: Callable[[torch.device], Tensors]  # random inputs that fill the chip
    launch: Callable[[Tensors, Any], Tensors]  # inputs and tile -> outputs
    truth: Callable[[Tensors], Tensors]  # the same outputs in float64
