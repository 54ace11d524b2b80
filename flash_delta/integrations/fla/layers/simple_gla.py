"""fla.layers.simple_gla."""

from flash_delta import layers
from flash_delta.integrations.fla.layers._forward import FlaForward


class SimpleGatedLinearAttention(FlaForward, layers.SimpleGatedLinearAttention):
    """:class:`flash_delta.layers.SimpleGatedLinearAttention`, called as fla's is; the constructor has the same
    arguments."""
