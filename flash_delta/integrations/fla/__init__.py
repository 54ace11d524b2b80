"""The names, paths and signatures of fla 0.6.0 (flash-linear-attention) over this library's ops, modules and layers.

A code base written for fla changes its import lines, ``fla.`` to ``flash_delta.integrations.fla.``. docs/fla.md has
every argument, and what differs.
"""

from flash_delta.integrations.fla.layers import GatedDeltaNet, KimiDeltaAttention

__all__ = ["GatedDeltaNet", "KimiDeltaAttention"]
