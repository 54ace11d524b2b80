"""fla.layers.comba."""

from flash_delta import layers
from flash_delta.integrations.fla.layers._forward import FlaForward


class Comba(FlaForward, layers.Comba):
    """:class:`flash_delta.layers.Comba`, called as fla's is; the constructor has the same arguments."""

    state_v_first = False
