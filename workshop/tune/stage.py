"""What a module of kernels offers to the tuner."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


class Stage(NamedTuple):
    """A kernel with several possible tiles. A module lists its stages by name in ``STAGES``."""

    sizes: tuple[int, ...]  # the sizes that a row of the table is for, e.g. (K, V)
    tiles: Callable[[str], list[Any]]  # target -> tiles worth trying: those that may fit
    make: Callable[[torch.device], Tensors]  # random inputs that fill the chip
    launch: Callable[[Tensors, Any], Tensors]  # inputs and tile -> outputs
    truth: Callable[[Tensors], Tensors]  # the same outputs in float64
