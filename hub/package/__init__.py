"""Gated-delta-rule linear attention: functions, and ``layers`` for the library ``kernels``.

The ops have fla's names and arguments, the convolutions and the norm those that transformers calls them by.
"""

from flash_delta import __version__
from flash_delta.integrations.transformers.functions import causal_conv1d_fn, causal_conv1d_update
from flash_delta.modules import GatedRMSNorm as RMSNormGated
from flash_delta.ops import (
    chunk_gated_delta_rule,
    chunk_kda,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
)

from . import layers

__all__ = [
    "RMSNormGated",
    "__version__",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
    "layers",
]
