"""What commands that run a model do at their start."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
SMALL = 256  # hidden size; up to this size one thread was measured to be faster than two


def require_device(name: str) -> "torch.device":
    import torch

    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device: expected a device that torch can use here, got {name!r} ({reason})") from error
    if device.type == "meta":
        raise ValueError(f"device: expected a device that computes, got {name!r}")
    return device


def calm_threads(device: "torch.device", hidden_size: int) -> None:
    """Lets a small model compute with one thread of the CPU, since several threads would wait for each other longer
    than they compute. If the environment asks for a number of threads, that number stays."""
    import torch

    if device.type == "cpu" and hidden_size <= SMALL and not any(map(os.environ.get, THREADS)):
        torch.set_num_threads(1)


def quiet_transformers() -> None:
    """Turns off bars of transformers that would break our own, and warnings that no user can act on."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
