"""One long packed row on many GPUs: every rank holds a run of its tokens, and states cross from rank to rank.

A rank's tokens move the state of a sequence that goes through them by an affine map,

.. math::
    S_{\\text{end}} = \\Phi S_{\\text{start}} + B, \\qquad
    dS_{\\text{start}} = \\Phi^\\top dS_{\\text{end}} + D,

whose size does not depend on their number. Ranks exchange (Phi, B) forward and D backward, compose what lies between a
sequence's start (its end) and them, and run the op on their own tokens from the state that it would have had there.
"""

from flash_delta.parallel.context import ContextParallel

__all__ = ["ContextParallel"]
