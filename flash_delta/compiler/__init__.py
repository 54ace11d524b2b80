"""Compiles every launch of kernels for every target, without a GPU.

``offline``, ``facts`` and ``cases`` import Triton. The compile gate imports them only in other processes (``pool.py``).
"""

from flash_delta.compiler.launch import Launch, Stage
from flash_delta.compiler.targets import TARGETS, Target, target_of

__all__ = ["TARGETS", "Launch", "Stage", "Target", "target_of"]
