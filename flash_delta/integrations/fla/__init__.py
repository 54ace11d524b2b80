"""The names, paths and signatures of fla 0.6.0 (flash-linear-attention) over this library's ops, modules and layers.

To use it in code that was written for fla, change ``fla.`` to ``flash_delta.integrations.fla.`` in the import lines.
docs/fla.md has every argument and every difference.

Example:
    >>> import torch
    >>> from flash_delta.integrations.fla.layers import GatedDeltaNet  # before: from fla.layers import GatedDeltaNet
    >>> from flash_delta.integrations.fla.modules import ShortConvolution
    >>> from flash_delta.integrations.fla.ops import fused_recurrent_delta_rule
    >>> y, _, cache = GatedDeltaNet(hidden_size=64, num_heads=2, head_dim=16)(torch.randn(2, 50, 64))
    >>> z, _ = ShortConvolution(64, kernel_size=4)(y)
    >>> x = torch.randn(2, 50, 2, 32)
    >>> o, _ = fused_recurrent_delta_rule(x, x, x, torch.rand(2, 50, 2), use_qk_l2norm_in_kernel=True)
    >>> y.shape, z.shape, o.shape
    (torch.Size([2, 50, 64]), torch.Size([2, 50, 64]), torch.Size([2, 50, 2, 32]))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flash_delta.integrations._fla_mirror import MARK, submodule
from flash_delta.integrations.fla.mixers import (
    Comba,
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    KimiDeltaAttention,
    SimpleGatedLinearAttention,
)

if TYPE_CHECKING:
    from flash_delta.integrations.fla.stand_in import install, uninstall
    from flash_delta.integrations.fla.takeover.register import register, unregister

__all__ = [
    "Comba",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedDeltaProduct",
    "KimiDeltaAttention",
    "SimpleGatedLinearAttention",
    "install",
    "register",
    "uninstall",
    "unregister",
]

# Imported when they are asked for: names do not need them.
DOORS = dict.fromkeys(("install", "uninstall"), "stand_in")
DOORS |= dict.fromkeys(("register", "unregister"), "takeover.register")
__path__.append(MARK + __name__)  # for pkgutil

if not TYPE_CHECKING:  # a checker would take any name

    def __getattr__(name: str) -> Any:
        if name in DOORS:
            return getattr(import_module(f"{__name__}.{DOORS[name]}"), name)
        return submodule(__name__, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *DOORS})
