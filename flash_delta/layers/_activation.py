"""Activations by the names that configurations give them."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: x.clamp(max=0).exp() + x.clamp(min=0),  # elu(x) + 1, without the difference of exp(x) and 1
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "identity": lambda x: x,
    "logsigmoid": F.logsigmoid,
    "relu": F.relu,
    "sigmoid": F.sigmoid,
    "silu": F.silu,
    "sqrelu": lambda x: F.relu(x).square(),
    "swish": F.silu,
}
