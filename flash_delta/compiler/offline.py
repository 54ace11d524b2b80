"""Inside ``offline(target)`` every launch of a kernel compiles for the target instead of running; no GPU is needed.

There is no second table of signatures. A launcher is called with tensors of device "meta". The kernel that it would
launch gets compiled, with the same types, specialisation and tile.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from itertools import count
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from flash_delta.compiler.key import key_of, with_all_that_is_read
from flash_delta.compiler.targets import TARGETS


class Compiled(NamedTuple):
    name: str  # of the function
    key: str  # another one, if anything that the code depends on is another (key.py)
    kernel: Any  # triton.compiler.CompiledKernel; the key again, where nothing is compiled
    log: str  # what ptxas -v said


_devices = count()  # kernels cache compiled code per device, so a new device number means an empty cache


class Driver:
    """Stands in for the GPU's driver, which Triton asks for target, device and stream."""

    def __init__(self, target: str):
        backend, arch, warp_size, _ = TARGETS[target]
        self.target = GPUTarget(backend, arch, warp_size)
        self.device = next(_devices)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


@contextmanager
def offline(target: str, compiles: bool = True) -> Iterator[list[Compiled]]:
    """Yields a list that grows with every compilation. If a launch finds its kernel compiled, it adds nothing.

    If it ``compiles`` nothing, kernels only get their keys, a hundred in a second.
    """
    if knobs.runtime.interpret:
        raise ValueError("TRITON_INTERPRET: expected no value where kernels are compiled, got '1'")
    compiled: list[Compiled] = []
    run, do_compile = JITFunction.run, JITFunction._do_compile

    def warm_up(self: JITFunction, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, warmup=True, **kwargs)

    def record(
        self: JITFunction, name: str, signature: dict, device: int, constants: dict, options: Any, attributes: dict,
        warmup: bool,
    ) -> Any:  # fmt: skip
        known, _, _, backend, _ = self.device_caches[device]
        key = key_of(self, backend, signature, constants, options, attributes)
        with redirect_stdout(io.StringIO()) as log:
            if compiles:
                kernel = do_compile(self, name, signature, device, constants, options, attributes, warmup)
            else:
                kernel = known.setdefault(name, key)
        compiled.append(Compiled(self.fn.__name__, key, kernel, log.getvalue()))
        return kernel

    with (
        knobs.compilation.scope(),
        knobs.nvidia.scope(),
        with_all_that_is_read(),
        patch.object(driver, "_active", Driver(target)),
        patch.object(JITFunction, "run", warm_up),
        patch.object(JITFunction, "_do_compile", record),
    ):
        knobs.compilation.always_compile = True  # code from the disk cache comes without ptxas' log
        knobs.nvidia.dump_ptxas_log = True
        yield compiled
