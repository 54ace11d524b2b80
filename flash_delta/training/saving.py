"""Writes checkpoints, and beside them the history and the curve of the run.

A checkpoint is written under another name, flushed to the disk, and renamed when it is complete. Only then are old ones
removed. So a run that is killed at any moment leaves whole checkpoints.
"""

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from flash_delta.training.checkpoint import NAME, checkpoint_folder, checkpoints
from flash_delta.training.figures import loss_figure
from flash_delta.training.ranks import Ranks
from flash_delta.training.run import Run

ONE_FILE = 1 << 62  # bytes; parameters of up to this size are not split over files


def save_run(folder: Path, run: Run, model: PreTrainedModel, optimizer: Optimizer, keep: int, ranks: Ranks) -> None:
    """Saves a checkpoint. All ranks call this. The first rank collects and writes. The newest ``keep`` checkpoints
    stay.

    Raises:
        OSError: on every rank, if a file cannot be written. Earlier checkpoints stay.
    """
    parameters, moments = _collect(model.state_dict()), _collect(moments_of(optimizer))

    def write() -> None:
        _write_checkpoint(checkpoint_folder(folder, len(run.records)), model, parameters, moments, run.as_json())
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
        history, curve = folder / "history.json", folder / "loss.png"
        records = [asdict(record) for record in run.records]
        history.write_text(json.dumps(records, indent=1), encoding="utf-8")
        loss_figure(records, run.corpus.entropy).savefig(curve, dpi=150)

    ranks.first_does(write)


def moments_of(optimizer: Optimizer) -> dict[str, Tensor]:
    """`<parameter>.<moment>` -> tensor, or this rank's part of it."""
    named = ((n, p) for g in optimizer.param_groups for n, p in zip(g["param_names"], g["params"], strict=True))
    return {f"{n}.{moment}": tensor for n, p in named for moment, tensor in optimizer.state[p].items()}


def _write_checkpoint(
    folder: Path, model: PreTrainedModel, parameters: dict[str, Tensor], moments: dict[str, Tensor], progress: dict
) -> None:
    for left in folder.parent.glob(f"{NAME}.tmp"):  # left by a process that was killed
        shutil.rmtree(left)
    unfinished = folder.with_suffix(".tmp")
    try:
        model.save_pretrained(unfinished, state_dict=parameters, max_shard_size=ONE_FILE)
        save_file(moments, unfinished / "optimizer.safetensors")
        (unfinished / "trainer.json").write_text(json.dumps(progress, allow_nan=False), encoding="utf-8")
        for path in (*unfinished.iterdir(), unfinished):
            _flush(path)
        unfinished.rename(folder)
        _flush(folder.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise OSError(f"{folder}: expected room and leave to write a checkpoint, got: {error}") from error


def _collect(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors on the first rank's host, collected one after the other. On other ranks the result is empty."""
    first, whole = not dist.is_initialized() or dist.get_rank() == 0, {}
    for name, tensor in tensors.items():
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if first:
            whole[name] = tensor.cpu()
    return whole


def _flush(path: Path) -> None:
    """Writes files to the disk, so that a power failure cannot leave a checkpoint's name without its content."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open folders
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
