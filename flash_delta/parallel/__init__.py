"""One long packed row on many GPUs. Every rank holds some of its tokens, and ranks exchange states.

The tokens that a rank holds of a sequence map the sequence's state by an affine map,

.. math::
    S_{\\text{end}} = \\Phi S_{\\text{start}} + B, \\qquad
    dS_{\\text{start}} = \\Phi^\\top dS_{\\text{end}} + D,

whose size does not depend on the number of tokens. Ranks exchange (Phi, B) in the forward pass and D in the backward
pass. Each rank composes the maps between the sequence's start (or end) and its own tokens. Then it runs the op on its
own tokens from the right state. A rank may hold several stretches of a sequence. Each of them has such a map.
"""

from flash_delta.parallel.context import ContextParallel
from flash_delta.parallel.device_context import DeviceContextParallel
from flash_delta.parallel.split import head_tail

__all__ = ["ContextParallel", "DeviceContextParallel", "head_tail"]
