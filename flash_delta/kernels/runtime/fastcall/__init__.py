"""The key of a call, under which it is remembered and found again.

`key` is a Python function until a GPU's kernels are loaded. From then on it is a C function (key.c), which takes a
tenth of the time and calls Python for tensors that are not plain. Without a GPU nothing is compiled, and Triton is not
needed. The keys of the two functions differ, since C returns bytes. So a call may at worst be checked once more.

C reads tensors through an interface that torch has from 2.10 on. With an older torch, `key` stays the Python function,
and Triton launches.
"""

import logging
import os
from collections.abc import Hashable, Sequence
from pathlib import Path
from subprocess import SubprocessError
from threading import Lock
from types import ModuleType

import torch
from torch import Tensor

from flash_delta.kernels.runtime.fastcall.built import load_built
from flash_delta.problem import ENVIRONMENT, PACKAGE, needs_gradient

NAME = "flash_delta_known"
SOURCES = ("key.c", "frame.c", "describe.c", "build.c", "plan.c", "module.c")  # each uses those before it
API = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)  # how C reads tensors; None: torch is older than 2.10
loaded: ModuleType | None = None
log = logging.getLogger(PACKAGE)
_lock = Lock()


def look(gradients: bool, *groups: tuple[Tensor | None, ...]) -> tuple[Hashable, ...]:
    """Everything that matters about a call on these tensors, except values and options: their signatures, whether
    autograd has to record the call, and the backend that the environment names. ``gradients``: whether autograd is
    on."""
    tensors = [t for group in groups for t in group]
    wish = os.environ.get(ENVIRONMENT) or None
    return (wish, gradients and needs_gradient(tensors), *signature(tensors))


def signature(tensors: Sequence[Tensor | None]) -> list[tuple | None]:
    """Everything that can change how a call without gradients runs, except values. Strides of contiguous tensors follow
    from the shape."""
    return [
        t if t is None else (t.shape, t.is_contiguous() or t.stride(), t.dtype, t.device, t.data_ptr() % 16)
        for t in tensors
    ]


key = look  # call it as ``fastcall.key``, since `load` replaces it


def source_of_module() -> str:
    return "\n".join(Path(__file__).with_name(name).read_text() for name in SOURCES)


def load() -> ModuleType | None:
    """The C module with ``key``, ``facts``, ``places``, ``frame``, ``copy`` and ``launch``. If no folder has it
    (built.py), it is compiled once, like Triton's own module, and kept in Triton's cache. None if there is no C
    compiler, or no header of Python: Triton launches from then on."""
    global loaded, key, API
    with _lock:
        if loaded is None and API is not None:
            from triton.runtime.build import compile_module_from_src

            source = source_of_module()
            try:
                module = load_built(NAME, source) or compile_module_from_src(source, NAME)
            except (OSError, RuntimeError, SubprocessError) as error:
                API = None
                log.warning("the C module cannot be compiled, so Triton launches kernels, which is slow: %s", error)
                return None
            module.setup(API, torch.Tensor, torch.nn.Parameter, ENVIRONMENT.encode(), look)
            loaded, key = module, module.key
    return loaded
