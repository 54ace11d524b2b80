"""A run's checkpoints: `RUN/checkpoints/step-00000100/`, safetensors and JSON only, nothing that could execute code.

A checkpoint is written under another name and renamed when complete, and the one before it goes only after that, so a
run killed at any moment leaves one whole checkpoint. `config.json` and `model.safetensors` in it are what
`from_pretrained` reads; `optimizer.safetensors` holds `<parameter>.<moment>`; `trainer.json` says how far the run is.
It is the same whatever number of ranks wrote it, whole tensors in plain files, and torch.distributed.checkpoint lets
each rank of any number read its own part of the moments.
"""

import json
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel


def save_checkpoint(run: Path, step: int, model: PreTrainedModel, optimizer: Optimizer, progress: dict) -> None:
    """Called by all ranks; the first one collects and writes."""
    parameters, moments = _collect(model.state_dict()), _collect(_moments(optimizer))
    if parameters is not None:
        folder = run / "checkpoints" / f"step-{step:08d}"
        unfinished = folder.with_suffix(".tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        model.save_pretrained(unfinished, state_dict=parameters)
        save_file(moments, unfinished / "optimizer.safetensors")
        (unfinished / "trainer.json").write_text(json.dumps(progress))
        unfinished.rename(folder)
        for other in folder.parent.iterdir():
            if other != folder:
                shutil.rmtree(other)
    if dist.is_initialized():
        dist.barrier()


def latest_checkpoint(run: str | Path) -> Path | None:
    """The run's newest complete checkpoint; None where there is none."""
    return max((Path(run) / "checkpoints").glob("step-????????"), default=None)


def require_checkpoint(run: str | Path) -> Path:
    folder = latest_checkpoint(run)
    if folder is None:
        raise FileNotFoundError(f"run: expected a folder that `flash-delta train --out` wrote, got {run}")
    return folder


def load_progress(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "trainer.json").read_text())


def load_optimizer(checkpoint: Path, optimizer: Optimizer) -> None:
    """Puts the saved moments into an optimizer made with the same named parameters; of parts of them only the parts."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            optimizer.state[p] = {moment: tensor.detach() for moment, tensor in state.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is .* to load in a single process", UserWarning)
        dcp.load(_moments(optimizer), storage_reader=HuggingFaceStorageReader(str(checkpoint)))


def _moments(optimizer: Optimizer) -> dict[str, Tensor]:
    named = ((n, p) for g in optimizer.param_groups for n, p in zip(g["param_names"], g["params"], strict=True))
    return {f"{n}.{moment}": tensor for n, p in named for moment, tensor in optimizer.state[p].items()}


def _collect(tensors: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """Parts put together on the first rank's host, one tensor after the other; None on the others."""
    first, whole = not dist.is_initialized() or dist.get_rank() == 0, {}
    for name, tensor in tensors.items():
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if first:
            whole[name] = tensor.cpu()
    return whole if first else None
