"""Compiles every launch of kernels for every target, without a GPU. Only ``offline`` and ``facts`` import Triton. They
run in processes of their own (see ``pool.py``)."""

from flash_delta.compiler.launch import Launch, Stage
from flash_delta.compiler.targets import TARGETS, Target, target_of

__all__ = ["TARGETS", "Launch", "Stage", "Target", "target_of"]
