"""fla.layers.gated_deltanet."""

from flash_delta import layers
from flash_delta.integrations.fla.layers._forward import FlaForward


class GatedDeltaNet(FlaForward, layers.GatedDeltaNet):
    """:class:`flash_delta.layers.GatedDeltaNet`, called as fla's is; the constructor has the same arguments."""
