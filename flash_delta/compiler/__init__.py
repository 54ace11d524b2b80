"""Compiles launches of kernels for every target, and calls launchers, without a GPU.

``offline`` and ``pretended_gpu`` import Triton. Kernels are compiled only in other processes (``pool.py``).
"""

from flash_delta.compiler.launch import Launch
from flash_delta.compiler.targets import TARGETS, Target, target_of

__all__ = ["TARGETS", "Launch", "Target", "target_of"]
