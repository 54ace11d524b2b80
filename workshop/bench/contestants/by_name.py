"""This library, called in other ways: on a backend that the call names, or by fla's layers.

A row with a backend by name shows what the library's own choice costs. A row with fla's layers shows what our own layer
does.
"""

import torch
from torch import Tensor

from flash_delta.testing import Workload
from flash_delta.testing.calls import Call
from workshop.bench.contestants import fla_layer, flash_delta


class ByName:
    """What a contestant's module exports, for one backend."""

    PACKAGE, CACHES = flash_delta.PACKAGE, flash_delta.CACHES

    def __init__(self, backend: str):
        self.backend = backend

    def unsupported(self, workload: Workload, device: torch.device) -> str | None:
        return "it is not compared on decoding" if workload.kind == "decode" else None

    def prepare(self, workload: Workload, x: dict[str, Tensor]) -> Call:
        return flash_delta.prepare(workload, x, self.backend)


class Registered:
    """What a contestant's module exports, for fla's layer after ``register()``."""

    PACKAGE, CACHES = flash_delta.PACKAGE, flash_delta.CACHES

    def unsupported(self, workload: Workload, device: torch.device) -> str | None:
        return fla_layer.unsupported()

    def prepare(self, workload: Workload, x: dict[str, Tensor]) -> Call:
        return fla_layer.prepare(workload, x, registered=True)
