"""A run's checkpoints, `RUN/checkpoint-100/`: those of transformers' Trainer, which `from_pretrained` reads."""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.trainer import TRAINER_STATE_NAME

from flash_delta.models import FlashDeltaForCausalLM


def latest_checkpoint(run: str | Path) -> Path | None:
    """The run's newest complete checkpoint, or None if there is none. Trainer writes its state last."""
    complete = (file.parent for file in Path(run).glob(f"checkpoint-*/{TRAINER_STATE_NAME}"))
    return max(complete, key=lambda folder: int(folder.name.rpartition("-")[2]), default=None)


def require_checkpoint(run: str | Path) -> Path:
    folder = latest_checkpoint(run)
    if folder is None:
        raise FileNotFoundError(f"run: expected a folder that `flash-delta train --out` wrote, got {run}")
    return folder


def read_history(run: str | Path) -> list[dict[str, Any]]:
    """What the run logged up to its newest checkpoint: a record for each step, and one for each evaluation."""
    file = require_checkpoint(run) / TRAINER_STATE_NAME
    try:
        return json.loads(file.read_text(encoding="utf-8"))["log_history"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: expected what transformers' Trainer wrote, got: {error!r}") from error


def load_model(checkpoint: Path) -> FlashDeltaForCausalLM:
    """The checkpoint's model, on the CPU.

    Raises:
        OSError, ValueError: if a file cannot be read, if its tensors are not those of the model, or if a parameter is
            not finite.
    """
    try:
        model, found = FlashDeltaForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    except Exception as error:  # each library that reads a part has errors of its own
        raise ValueError(f"{checkpoint}: expected a model that can be read, got: {error}") from error
    if wrong := {name: list(keys) for name, keys in found.items() if keys}:
        raise ValueError(f"{checkpoint}: expected the model's own tensors, got {wrong}")
    if name := first_not_finite(model):
        kept = f"remove {checkpoint} to go on from the checkpoint before it"
        raise ValueError(f"{checkpoint}: expected finite numbers, got {name} with NaN or infinity; {kept}")
    return model


def first_not_finite(model: PreTrainedModel) -> str | None:
    """The name of the first parameter with a NaN or an infinity in this rank's part."""
    local = ((name, getattr(p, "_local_tensor", p).detach()) for name, p in model.named_parameters())
    return next((name for name, p in local if not p.isfinite().all()), None)
