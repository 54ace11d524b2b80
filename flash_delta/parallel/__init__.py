"""One long packed row on many GPUs: every rank holds some of its tokens, and states cross from rank to rank.

A rank's tokens move the state of a sequence that goes through them by an affine map,

.. math::
    S_{\\text{end}} = \\Phi S_{\\text{start}} + B, \\qquad
    dS_{\\text{start}} = \\Phi^\\top dS_{\\text{end}} + D,

whose size does not depend on their number. Ranks exchange (Phi, B) forward and D backward, compose what lies between a
sequence's start (its end) and them, and run the op on their own tokens from the state that it would have had there.
A rank may hold several stretches of a sequence: each of them has such a map.
"""

from flash_delta.parallel.context import ContextParallel
from flash_delta.parallel.split import head_tail

__all__ = ["ContextParallel", "head_tail"]
