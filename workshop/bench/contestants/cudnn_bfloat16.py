"""cuDNN with the bfloat16 gates and write strengths of a model. Every call converts them to float32."""

import torch
from torch import Tensor

from flash_delta.testing import Workload
from flash_delta.testing.calls import Call
from workshop.bench.contestants import cudnn

PACKAGE = cudnn.PACKAGE
CACHES = cudnn.CACHES


def unsupported(workload: Workload, device: torch.device) -> str | None:
    reason = cudnn.unsupported(workload, device)
    if reason is None and not workload.raw:
        return "gates and write strengths are float32 for everybody: this is what cudnn runs"
    return reason


def prepare(workload: Workload, x: dict[str, Tensor]) -> Call:
    return cudnn.call(workload, x, getattr(torch, workload.dtype))
