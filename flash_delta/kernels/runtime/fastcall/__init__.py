"""How a call is known again: the key under which what was found of it is remembered.

`key` is Python's until a GPU's kernels are loaded, and from then on C's (key.c), which takes a tenth of the time and
asks Python about whatever is no plain tensor. Where there is no GPU nothing is compiled, nor is Triton needed. The two
never agree on a key, one being bytes: at the worst a call is looked at once more.

C reads tensors through an interface that torch has from 2.10 on. An older torch keeps Python's key, and Triton's own
launcher launches.
"""

import os
from collections.abc import Hashable, Sequence
from pathlib import Path
from threading import Lock
from types import ModuleType

import torch
from torch import Tensor

from flash_delta.problem import ENVIRONMENT, needs_gradient

SOURCES = ("key.c", "frame.c", "build.c", "module.c")  # one module; each stands on those before it
API = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)  # how C reads tensors; None: torch is older than 2.10
_loaded: ModuleType | None = None
_lock = Lock()


def look(gradients: bool, *groups: tuple[Tensor | None, ...]) -> tuple[Hashable, ...]:
    """All that decides about a call on these tensors, but values and options: their signatures, whether autograd has
    to know of it, the environment's wish. ``gradients``: whether autograd is on."""
    tensors = [t for group in groups for t in group]
    wish = os.environ.get(ENVIRONMENT) or None
    return (wish, gradients and needs_gradient(tensors), *signature(tensors))


def signature(tensors: Sequence[Tensor | None]) -> list[tuple | None]:
    """All that can change how a call without gradients runs, except the values. Without gaps the shape gives the
    strides."""
    return [
        t if t is None else (t.shape, t.is_contiguous() or t.stride(), t.dtype, t.device, t.data_ptr() % 16)
        for t in tensors
    ]


key = look  # to be called as ``fastcall.key``: it changes


def load() -> ModuleType:
    """The module of C: ``key``, ``frame``, ``copy``, ``launch``. It is compiled once, as Triton's own is, and kept in
    Triton's cache."""
    global _loaded, key
    with _lock:
        if _loaded is None:
            from triton.runtime.build import compile_module_from_src

            source = "\n".join(Path(__file__).with_name(name).read_text() for name in SOURCES)
            module = compile_module_from_src(source, "flash_delta_known")
            module.setup(API, torch.Tensor, torch.nn.Parameter, ENVIRONMENT.encode(), look)
            _loaded, key = module, module.key
    return _loaded
