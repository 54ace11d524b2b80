"""Kernels without a GPU: what the compiler makes of every launch, for every target. Triton is imported only by
``offline`` and ``facts``, which run in processes of their own (see ``pool.py``)."""

from flash_delta.compiler.launch import Launch, Stage
from flash_delta.compiler.targets import TARGETS, Target, target_of

__all__ = ["TARGETS", "Launch", "Stage", "Target", "target_of"]
