"""fla.layers.kda."""

from flash_delta import layers
from flash_delta.integrations.fla.layers._forward import FlaForward


class KimiDeltaAttention(FlaForward, layers.KimiDeltaAttention):
    """:class:`flash_delta.layers.KimiDeltaAttention`, called as fla's is; the constructor has the same arguments."""
