"""What the commands that run a model do first."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def require_device(name: str) -> "torch.device":
    import torch

    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device: expected one that torch can use here, got {name!r} ({reason})") from error


def quiet_transformers() -> None:
    """No progress bars for files that are written in a moment: they would cut through ours."""
    from transformers.utils import logging

    logging.disable_progress_bar()
