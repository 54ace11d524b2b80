"""Kernels of fla and SGLang on a CPU, in Triton's interpreter: `prepare` before they are imported, `repair` after."""

import builtins
import sys

import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner


def prepare() -> None:
    """Nothing can be timed, so that the first choice is taken."""
    made = Autotuner.__init__
    Autotuner.__init__ = lambda self, fn, names, configs, *rest, **more: made(
        self, fn, names, configs[:1], *rest, **more
    )


def repair() -> None:
    """Numbers that a kernel's loop counts are tensors for Triton, and integers of Python for its interpreter."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("fla.", "sglang.kernels.")):
            module.range = _range


def _range(*bounds):
    in_kernel = any(isinstance(b, tl.core.tensor) for b in bounds)
    numbers = (int(b.handle.data.item()) if isinstance(b, tl.core.tensor) else b for b in bounds)
    return map(interpreter._implicit_cvt, builtins.range(*numbers)) if in_kernel else builtins.range(*numbers)
